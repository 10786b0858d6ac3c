"""Rounds of answers through the gateway, token by token with the time of each."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from fleet.drill.judge import StreamRun, StreamSpec
from fleet.drill.near_tie import GREEDY_CANDIDATES, SAMPLED_TOP_K, Candidate
from fleet.observe.site_access import Endpoint, connect_reason
from fleet.observe.site_view import mapping, text

CONNECT_SECONDS = 5.0
MAX_LINE_BYTES = 1 << 20
MAX_ERROR_BYTES = 1 << 16
# Long answers, so that the break falls into them; sampled ones at a temperature at which the tokens really vary.
PROMPTS = (
    "Write a long story about a lighthouse keeper and a whale.",
    "Explain step by step how bread is baked, in great detail.",
    "Describe a walk through a large city on a rainy day, street by street.",
    "List the planets of the solar system and tell something about each of them.",
)
SEEDED_TEMPERATURE = 0.8
FIRST_SEED = 4_711


def specs(count: int, max_tokens: int) -> tuple[StreamSpec, ...]:
    """So many streams, greedy and seeded in turn."""
    return tuple(
        StreamSpec(
            name=f"{'greedy' if number % 2 == 0 else 'seeded'}-{number // 2 + 1}",
            prompt=PROMPTS[number % len(PROMPTS)],
            temperature=0.0 if number % 2 == 0 else SEEDED_TEMPERATURE,
            seed=FIRST_SEED + number,
            max_tokens=max_tokens,
        )
        for number in range(count)
    )


class Users:
    """Clients of one gateway; use `users_of` to get them.

    Args:
        model: what they ask.
    """

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint, model: str) -> None:
        self._session = session
        self._endpoint = endpoint
        self._model = model

    async def round(
        self,
        wanted: Sequence[StreamSpec],
        *,
        when_at: int = 0,
        then: Callable[[], Awaitable[None]] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> tuple[StreamRun, ...]:
        """All streams at once.

        Args:
            when_at, then: what to do once every stream has so many tokens (or has ended).
            on_text: takes the text of the first stream as it comes.

        Raises:
            Whatever `then` raises; the streams are closed then.
        """
        progress = _Progress(len(wanted), when_at)
        runs = [_Recorder(on_text if index == 0 else None) for index in range(len(wanted))]
        tasks = [
            asyncio.create_task(self._one(spec, progress, index, runs[index])) for index, spec in enumerate(wanted)
        ]
        acting = [asyncio.create_task(progress.act(then))] if then is not None else []
        try:
            await asyncio.gather(*tasks, *acting)
            return tuple(task.result() for task in tasks)
        finally:
            for task in (*tasks, *acting):
                task.cancel()
            await asyncio.gather(*tasks, *acting, return_exceptions=True)

    async def _one(self, spec: StreamSpec, progress: _Progress, index: int, run: _Recorder) -> StreamRun:
        """One stream; trouble of the network or the gateway is its error."""
        try:
            await self._stream(spec, run, lambda: progress.at(index, len(run.tokens)))
        except asyncio.TimeoutError:
            run.error = f"no connection within {CONNECT_SECONDS:g} s"
        except aiohttp.ClientConnectorError as error:
            run.error = connect_reason(error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            run.error = f"the connection broke: {error or type(error).__name__}"
        finally:
            progress.ended(index)
        return run.done()

    async def _stream(self, spec: StreamSpec, run: _Recorder, on_tokens: Callable[[], None]) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": spec.prompt}],
            "stream": True,
            "max_tokens": spec.max_tokens,
            "temperature": spec.temperature,
            "seed": spec.seed,
            "return_token_ids": True,
            # what a token was chosen from, so that a changed one can be judged
            "logprobs": True,
            **(
                {"top_logprobs": GREEDY_CANDIDATES}
                if spec.mode == "greedy"
                else {"top_k": SAMPLED_TOP_K, "top_logprobs": SAMPLED_TOP_K + 1}
            ),
        }
        url = f"{self._endpoint.url}/v1/chat/completions"
        async with self._session.post(url, json=body, server_hostname=self._endpoint.server_name) as response:
            if response.status != 200:
                raw = await response.content.read(MAX_ERROR_BYTES)
                run.error = f"HTTP {response.status}: {_message(raw) or response.reason}"
                return
            while line := await response.content.readline():
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                run.take(mapping(json.loads(data)))
                on_tokens()
        if run.finish_reason is None and not run.error:
            run.error = "the answer broke off"


class _Recorder:
    def __init__(self, on_text: Callable[[str], None] | None) -> None:
        self._on_text = on_text
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        self.candidates: list[tuple[Candidate, ...]] = []
        self.finish_reason: str | None = None
        self.error = ""

    def take(self, event: Any) -> None:
        """One event of the stream."""
        now = time.monotonic()
        if "error" in event:
            self.error = text(mapping(event["error"]).get("message")) or "the gateway reports an error"
        for choice in event.get("choices") or []:
            new = choice.get("token_ids") or []
            self.tokens += new
            self.seconds += [now] * len(new)
            self.candidates += _candidates(choice)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            piece = text(mapping(choice.get("delta")).get("content"))
            if self._on_text is not None and piece is not None:
                self._on_text(piece)

    def done(self) -> StreamRun:
        tokens, seconds, candidates = tuple(self.tokens), tuple(self.seconds), tuple(self.candidates)
        return StreamRun(tokens, seconds, self.finish_reason, self.error, candidates)


class _Progress:
    """How far each stream of a round is."""

    def __init__(self, streams: int, when_at: int) -> None:
        self._missing = set(range(streams))
        self._when_at = when_at
        self._reached = asyncio.Event()

    def at(self, index: int, tokens: int) -> None:
        """A stream has so many tokens now."""
        if tokens >= self._when_at:
            self.ended(index)

    def ended(self, index: int) -> None:
        """Nobody waits for this stream any more."""
        self._missing.discard(index)
        if not self._missing:
            self._reached.set()

    async def act(self, then: Callable[[], Awaitable[None]]) -> None:
        """Do it once all are there."""
        await self._reached.wait()
        await then()


@asynccontextmanager
async def users_of(endpoint: Endpoint, context: ssl.SSLContext, key: str, model: str) -> AsyncIterator[Users]:
    """Clients with one API key; every stream has a connection of its own."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    connector = aiohttp.TCPConnector(ssl=context, force_close=True, limit=0)
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, trust_env=False, read_bufsize=MAX_LINE_BYTES
    ) as session:
        yield Users(session, endpoint, model)


def _candidates(choice: Mapping[str, Any]) -> list[tuple[Candidate, ...]]:
    """What each token of a chunk was chosen from, likeliest first."""
    content = mapping(choice.get("logprobs")).get("content")
    return [
        tuple(Candidate(other.get("token_id"), float(other["logprob"])) for other in entry["top_logprobs"])
        for entry in (content if isinstance(content, list) else [])
    ]


def _message(raw: bytes) -> str:
    """The message of an error body; empty if it is none."""
    try:
        return text(mapping(mapping(json.loads(raw)).get("error")).get("message")) or ""
    except ValueError:
        return ""
