"""Server-sent events of a streamed answer; nothing is sent, headers neither, before the first event."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from stage_runtime.link.tasks import within

CLIENT_WRITE_SECONDS = 60.0
"""A client that takes nothing for so long is gone."""


class EventWriter:
    """Writes events to a client; `id:` counts them from 1.

    Args:
        request: the client's request.
        headers: of the response, beside those of an event stream.
    """

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={**headers, "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        self.sent = 0

    async def send(self, data: dict[str, Any]) -> None:
        """Send one event.

        Raises:
            ConnectionError: the client is gone, or takes nothing any more.
        """
        await self._write(json.dumps(data, separators=(",", ":"), allow_nan=False))

    async def done(self) -> None:
        """Send the last event, `[DONE]`, and end the response."""
        await self._write("[DONE]")
        await self.response.write_eof()

    async def _write(self, data: str) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        self.sent += 1
        event = f"id: {self.sent}\ndata: {data}\n\n".encode()
        try:
            await within(CLIENT_WRITE_SECONDS, self.response.write(event))
        except asyncio.TimeoutError:
            raise ConnectionError(f"the client took nothing for {CLIENT_WRITE_SECONDS:g} s") from None
