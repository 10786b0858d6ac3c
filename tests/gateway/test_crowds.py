"""Anyone may open connections to the gateway's port: half-open and idle ones keep no client from an answer."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from tokenizers import Tokenizer

from fleet.gateway.server import CONNECTIONS_AT_ONCE
from stage_runtime.link.acceptor import HANDSHAKES_AT_ONCE
from stage_runtime.link.messages import GenerateRequest
from tests.gateway.site import MODEL, Pki, Script, ScriptedPipeline, running, says, tokens_of
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


async def test_idle_connections_make_room_and_open_answers_do_not(
    tmp_path: Path, pki: Pki, tokenizer: Tokenizer
) -> None:
    asked, go_on, ids = asyncio.Event(), asyncio.Event(), tokenizer.encode("one two", add_special_tokens=False).ids

    def script(request: GenerateRequest) -> Script:
        asked.set()
        first, *rest = tokens_of(ids, request)
        return [first, go_on, *rest]

    async with running(tmp_path, pki, {"main": ScriptedPipeline(script)}) as gateway:
        context = trust(pki)
        answer = asyncio.ensure_future(ask(gateway.url, pki))
        await asked.wait()
        asked.clear()
        opened = [
            await asyncio.open_connection("localhost", gateway.https_port, ssl=context)
            for _ in range(CONNECTIONS_AT_ONCE)
        ]
        (oldest, _), *others = opened
        assert await asyncio.wait_for(oldest.read(1), 10) == b""
        assert not any(reader.at_eof() for reader, _ in others)
        another = asyncio.ensure_future(ask(gateway.url, pki))
        await asked.wait()
        assert await asyncio.wait_for(others[0][0].read(1), 10) == b""
        assert not any(reader.at_eof() for reader, _ in others[1:])
        go_on.set()
        assert [await answer, await another] == [200, 200]
        for _, writer in opened:
            writer.transport.abort()


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
