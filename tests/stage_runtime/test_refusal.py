"""Whoever is refused may have gone already; that is no failure of who refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fleet import __version__
from stage_runtime.link.connection import LinkTiming
from stage_runtime.link.control import PROTOCOL
from stage_runtime.link.handshake import _refuse
from stage_runtime.link.messages import Hello
from stage_runtime.link.tls import server_name
from tests.stage_runtime.pki import SiteCa


async def test_a_peer_that_has_gone_is_refused_without_ado(tmp_path: Path) -> None:
    ca = SiteCa(tmp_path, "lab")
    tls, own = ca.issue("box1"), Hello(PROTOCOL, "stage", "box1", "lab", "", "", 0, __version__)
    outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()  # as a transport is when its peer has closed it
        try:
            await _refuse(writer, own, "not here", LinkTiming(handshake_seconds=0.2))
        except Exception as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls.server_context())
    port = server.sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls.client_context(), server_hostname=server_name("box1", "lab")
    )
    await outcome
    assert outcome.exception() is None
    writer.transport.abort()
    server.close()
