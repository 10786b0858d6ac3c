"""Server-sent events on their way to a client; nothing is sent, headers neither, before there is something to say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from stage_runtime.link.tasks import within

CLIENT_WRITE_SECONDS = 60.0
"""A client that takes nothing for so long is gone."""


class EventWriter:
    """Writes events and comments to a client.

    Args:
        request: the client's request.
        headers: of the response, beside those of an event stream.
    """

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={**headers, "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    @property
    def prepared(self) -> bool:
        """The headers are out: what goes wrong now can only be an event."""
        return self.response.prepared

    async def prepare(self) -> None:
        """Send the headers, if they are not out yet."""
        if not self.response.prepared:
            await self.response.prepare(self._request)

    async def send(self, number: int, data: dict[str, Any] | str) -> None:
        """Send one event.

        Args:
            number: its `id:`, counted from 1 within the stream.
            data: a JSON object, or text as it is.

        Raises:
            ConnectionError: the client is gone, or takes nothing any more.
        """
        text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"), allow_nan=False)
        await self._write(f"id: {number}\ndata: {text}\n\n")

    async def comment(self, text: str) -> None:
        """Send a comment, which clients ignore and connections live on; it has no `id:`.

        A line without an empty one behind it: the official client takes an empty line after the first `id:` for the
        end of an event, and fails on its empty data.
        """
        await self._write(f": {text}\n")

    async def end(self) -> None:
        """End the response."""
        await self.response.write_eof()

    async def _write(self, text: str) -> None:
        await self.prepare()
        try:
            await within(CLIENT_WRITE_SECONDS, self.response.write(text.encode()))
        except asyncio.TimeoutError:
            raise ConnectionError(f"the client took nothing for {CLIENT_WRITE_SECONDS:g} s") from None
