"""Anyone may open connections to the gateway's port: half-open and idle ones keep no client from an answer."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from tokenizers import Tokenizer

from fleet.gateway.server import CONNECTIONS_AT_ONCE
from stage_runtime.link.acceptor import HANDSHAKES_AT_ONCE
from tests.gateway.site import MODEL, Pki, ScriptedPipeline, running, says
from tests.gateway.test_http import session, trust

HALF_OPEN = 400
HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"


async def ask(url: str, pki: Pki) -> int:
    async with session(pki) as http:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            await response.read()
            return response.status


async def test_half_open_handshakes_make_room_for_a_client(tmp_path: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    loop = asyncio.get_running_loop()
    silent: list[socket.socket] = []
    async with running(tmp_path, pki, {"main": ScriptedPipeline(says(tokenizer, "one two"))}) as gateway:
        try:
            for number in range(HALF_OPEN):
                connection = socket.socket()
                connection.setblocking(False)
                silent.append(connection)
                await loop.sock_connect(connection, ("127.0.0.1", gateway.https_port))
                if number % 2:
                    await loop.sock_sendall(connection, HALF_A_HELLO)
            assert await ask(gateway.url, pki) == 200
            assert sum(_ended(connection) for connection in silent) >= HALF_OPEN - HANDSHAKES_AT_ONCE
        finally:
            for connection in silent:
                connection.close()


async def test_the_newest_connection_goes_where_each_may_be_an_open_answer(
    tmp_path: Path, pki: Pki, tokenizer: Tokenizer
) -> None:
    async with running(tmp_path, pki, {"main": ScriptedPipeline(says(tokenizer, "one two"))}) as gateway:
        context = trust(pki)
        opened = [
            await asyncio.open_connection("localhost", gateway.https_port, ssl=context)
            for _ in range(CONNECTIONS_AT_ONCE + 1)
        ]
        *kept, last = [reader for reader, _ in opened]
        assert await asyncio.wait_for(last.read(1), 10) == b""
        assert not any(reader.at_eof() for reader in kept)
        opened[0][1].close()
        await opened[0][1].wait_closed()
        assert await ask(gateway.url, pki) == 200
        for _, writer in opened:
            writer.transport.abort()


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
