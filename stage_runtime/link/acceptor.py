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
        self._retry: asyncio.TimerHandle | None = None
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
        self._listen()

    def settled(self) -> None:
        """Called by a connection's own task: its peer is known, it does not count as a stranger any more."""
        if (task := asyncio.current_task()) is not None:
            self._handshakes.pop(task, None)

    async def close(self) -> None:
        """Stop listening and end what serves connections."""
        listening, self._socket = self._socket, None
        if listening is not None:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        if self._retry is not None:
            self._retry.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._handshakes.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection's handler failed", exc_info=error)

    def _listen(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._accept, self._socket)

    def _accept(self, listening: socket.socket) -> None:
        # a reader, not sock_accept: that fails inside asyncio when a stop and a connection come at once (Python 3.11)
        loop = asyncio.get_running_loop()
        try:
            connection, address = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # e.g. no file descriptor left: others live on, this goes on when there is one
            self._on_refused("?", f"accept: {error}")
            loop.remove_reader(listening)
            self._retry = loop.call_later(ACCEPT_RETRY_SECONDS, self._listen)
            return
        connection.setblocking(False)
        if len(self._handshakes) >= HANDSHAKES_AT_ONCE:
            oldest = next(iter(self._handshakes))
            self._on_refused(self._handshakes.pop(oldest), f"{HANDSHAKES_AT_ONCE} newer connections say nothing")
            oldest.cancel()
        peer = f"{address[0]}:{address[1]}"
        task = asyncio.ensure_future(self._serve(connection, peer))
        self._tasks.add(task)
        self._handshakes[task] = peer
        task.add_done_callback(self._ended)
