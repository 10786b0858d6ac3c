"""How streams are asked for: by the official client, or by one that resumes where it was torn off."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any

import aiohttp
import openai

from fleet.inventory.sitefile import SiteFile
from fleet.observe.site_access import api_key, client_context
from tests.site.commands import async_client_of, gateway_url
from tests.site.streams import Stream

MODEL = "smollm2-135m"
RESUME_SECONDS = 120
SILENT_SECONDS = 3.0
"""A resuming client that hears nothing for so long takes its connection for dead, as after the gateway's power cut."""
CONNECT_SECONDS = 2.0
AGAIN_SECONDS = 0.1
_TORN = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)


class OfficialClient:
    """`openai.AsyncOpenAI` with the site's CA and key; it never asks twice."""

    def __init__(self, site: SiteFile) -> None:
        self._site = site
        self._client: openai.AsyncOpenAI | None = None

    async def __aenter__(self) -> OfficialClient:
        self._client = async_client_of(self._site)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def ask(self, stream: Stream, max_tokens: int, on_tokens: Callable[[], None]) -> None:
        """One request."""
        assert self._client is not None
        sampling: dict[str, Any] = {"temperature": 0.0, **stream.prompt.sampling}
        extra = {"return_token_ids": True, **({"top_k": sampling.pop("top_k")} if "top_k" in sampling else {})}
        try:
            chunks = await self._client.completions.create(
                model=MODEL,
                prompt=list(stream.prompt.ids),
                max_tokens=max_tokens,
                stream=True,
                extra_body=extra,
                **sampling,
            )
            async with chunks:
                async for chunk in chunks:
                    for choice in chunk.choices:
                        _take(stream, choice.model_dump())
                    on_tokens()
        except openai.OpenAIError as error:
            stream.error = f"{type(error).__name__}: {error}"


class ResumingClient:
    """Asks for resumable streams over plain HTTP; when a connection tears it asks for the rest until the end comes.

    An event whose number does not follow the last one's is an error of the stream: the rest must be exactly the rest.
    """

    def __init__(self, site: SiteFile) -> None:
        self._url = gateway_url(site)
        self._headers = {"Authorization": f"Bearer {api_key(site)}"}
        self._context = client_context(site, with_certificate=False)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ResumingClient:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
        connector = aiohttp.TCPConnector(ssl=self._context, limit=0, force_close=True)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, stream: Stream, max_tokens: int, on_tokens: Callable[[], None]) -> None:
        """One request, and as many for its rest as it takes."""
        assert self._session is not None
        body = {
            "model": MODEL,
            "prompt": list(stream.prompt.ids),
            "max_tokens": max_tokens,
            "stream": True,
            "return_token_ids": True,
            "temperature": 0.0,
            **stream.prompt.sampling,
        }
        answer = _Answer(stream, on_tokens)
        headers = {"Fleet-Resume-Seconds": str(RESUME_SECONDS)}
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body, headers=headers) as response:
                await answer.read(response)
        except _TORN as error:
            if not answer.stream_id:
                stream.error = f"{type(error).__name__}: {error}"
                return
        while not answer.has_ended:
            stream.resumed += 1
            headers = {"Last-Event-ID": str(answer.last)}
            try:
                async with self._session.get(f"{self._url}/v1/streams/{answer.stream_id}", headers=headers) as rest:
                    await answer.read(rest)
            except _TORN:
                await asyncio.sleep(AGAIN_SECONDS)


class _Answer:
    """A stream's events, over all its connections.

    Attributes:
        last: number of the newest event.
    """

    def __init__(self, stream: Stream, on_tokens: Callable[[], None]) -> None:
        self.stream = stream
        self.stream_id = ""
        self.last = 0
        self.has_ended = False
        self._on_tokens = on_tokens

    async def read(self, response: aiohttp.ClientResponse) -> None:
        """Take the events of one connection, until its end or the stream's."""
        if response.status != 200:
            self._fail(f"HTTP {response.status}: {(await response.text())[:300]}")
            return
        self.stream_id = response.headers["Fleet-Stream-Id"]
        async for number, data in events(response):
            if number != self.last + 1:
                self._fail(f"event {number} came behind {self.last}")
                return
            self.last = number
            self._take(data)

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.has_ended = True
            return
        event = json.loads(data)
        if "error" in event:
            self.stream.error = str(event["error"])
        for choice in event.get("choices", []):
            _take(self.stream, choice)
        self._on_tokens()

    def _fail(self, reason: str) -> None:
        self.stream.error, self.has_ended = reason, True


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[int, str]]:
    """(id, data) of server-sent events; comments are left out."""
    number, data = 0, ""
    async for raw in response.content:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data:
            yield number, data
            data = ""


def _take(stream: Stream, choice: Mapping[str, Any]) -> None:
    """Add what a chunk's choice says."""
    tokens = choice.get("token_ids") or []
    stream.tokens += tokens
    stream.times += [time.monotonic()] * len(tokens)
    stream.text += choice.get("text") or ""
    stream.finish = choice.get("finish_reason") or stream.finish
