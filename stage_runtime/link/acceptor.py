"""Accepting connections from a network where anyone may open any number of them and say nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

ACCEPT_RETRY_SECONDS = 0.1
# Connections whose peer has not shown who it is. The oldest goes first, so that a neighbour, who needs milliseconds,
# still gets through.
HANDSHAKES_AT_ONCE = 128


class Acceptor:
    """Each accepted connection is handled by a task that this owns.

    By hand, because a server of asyncio takes any number of connections and says nothing about failed TLS handshakes.

    Args:
        serve: takes a connection with the peer's address, and owns it; calls `settled` once the peer is known.
        on_refused: told the address and the reason of every connection that is given up here.
    """

    def __init__(
        self,
        serve: Callable[[socket.socket, str], Coroutine[Any, Any, None]],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._serve = serve
        self._on_refused = on_refused
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: dict[asyncio.Task[None], str] = {}  # oldest first, with the peer's address

    @property
    def port(self) -> int:
        """The port it listens on (useful when 0 was asked for)."""
        if self._socket is None:
            raise RuntimeError("not listening")
        return int(self._socket.getsockname()[1])

    def start(self, host: str, port: int) -> None:
        """Start to listen.

        Raises:
            OSError: the address is in use or not ours.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self._socket.setblocking(False)
        self._own(self._accept(self._socket))

    def settled(self) -> None:
        """Called by a connection's own task: its peer is known, it does not count as a stranger any more."""
        if (task := asyncio.current_task()) is not None:
            self._handshakes.pop(task, None)

    async def close(self) -> None:
        """Stop listening and end what serves connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._handshakes.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection's handler failed", exc_info=error)

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, address = await asyncio.get_running_loop().sock_accept(listening)
            except OSError as error:  # e.g. no file descriptor left: others live on, this goes on when there is one
                self._on_refused("?", f"accept: {error}")
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            if len(self._handshakes) >= HANDSHAKES_AT_ONCE:
                oldest = next(iter(self._handshakes))
                self._on_refused(self._handshakes.pop(oldest), f"{HANDSHAKES_AT_ONCE} newer connections say nothing")
                oldest.cancel()
            peer = f"{address[0]}:{address[1]}"
            self._handshakes[self._own(self._serve(connection, peer))] = peer
