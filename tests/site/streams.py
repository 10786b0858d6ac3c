"""Streams through a site's gateway: what came, and when, while a fault is put into the site.

Every prompt has a lane of its own. A lane asks its prompt once, or again and again until the test has seen enough, so
that a switch which comes when it likes always meets open answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from stage_runtime.link.tasks import within
from tests.site.commands import REPOSITORY

MAX_TOKENS = 48
FLOWING_TOKENS = 8
"""So many tokens of every stream have come when a fault is put in: it falls into the middle of each answer."""
STREAM_DEADLINE_SECONDS = 180.0
ENOUGH_DEADLINE_SECONDS = 120.0
AGAIN_SECONDS = 0.5
POLL_SECONDS = 0.1

_GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / "smollm2-135m.json").read_text(encoding="utf-8"))
_IDS: dict[str, list[int]] = {prompt["name"]: prompt["prompt"] for prompt in _GOLDEN["prompts"]}


@dataclass(frozen=True)
class Prompt:
    """What is asked: token ids, and sampling by the names of the golden file (empty: greedy). The name is unique."""

    name: str
    ids: tuple[int, ...]
    sampling: Mapping[str, float | int] = field(default_factory=dict)


def _prompt(golden: str, **sampling: float) -> Prompt:
    name = f"{golden} {' '.join(f'{key}={value:g}' for key, value in sampling.items())}".rstrip()
    return Prompt(name, tuple(_IDS[golden]), sampling)


# Prompts of the golden file with answers longer than MAX_TOKENS; the seeds were chosen so that this holds for them too.
PROMPTS = (
    _prompt("sky"),
    _prompt("python"),
    _prompt("sql"),
    _prompt("list"),
    _prompt("sky", temperature=0.8, seed=11),
    _prompt("python", temperature=0.8, seed=21),
    _prompt("list", temperature=0.7, top_k=40, seed=13),
    _prompt(
        "seeded-penalties",
        temperature=1.2,
        top_p=0.95,
        top_k=50,
        frequency_penalty=0.5,
        presence_penalty=0.3,
        seed=44,
    ),
)


@dataclass
class Stream:
    """One answer as it came.

    Attributes:
        times: arrival of each token, by the monotonic clock.
        finish: the API's finish reason; None while it is open, or when it was torn off.
        error: what the client was told instead of an end; empty if nothing.
        resumed: how often it was asked for again where it had been torn off.
    """

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: str = ""
    resumed: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether it ended as an answer ends."""
        return self.finish is not None and not self.error

    def pause_after(self, moment: float) -> float | None:
        """Longest time between two tokens of which the second came after `moment`; None if none came."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((later - earlier for earlier, later in pairs if later > moment), default=None)


@dataclass
class Run:
    """All streams of a run, in order of their beginning, and when the fault was put in (monotonic).

    Attributes:
        fault_result: what the fault's function returned.
    """

    streams: list[Stream] = field(default_factory=list)
    fault_began: float = 0.0
    fault_ended: float = 0.0
    fault_result: Any = None

    @property
    def longest_pause(self) -> float:
        """Of any stream, from the fault on, in seconds."""
        return max((stream.pause_after(self.fault_began) or 0.0 for stream in self.streams), default=0.0)

    def open_at(self, moment: float) -> list[Stream]:
        """Streams that had begun and had tokens to come at `moment`."""
        return [stream for stream in self.streams if stream.times and stream.times[0] <= moment < stream.times[-1]]

    def tokens_per_second(self, since: float, until: float) -> float:
        """Of all streams together."""
        count = sum(since < moment <= until for stream in self.streams for moment in stream.times)
        return count / (until - since)


class Asker(Protocol):
    """Asks for streams; an async context manager."""

    async def __aenter__(self) -> Asker: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def ask(self, stream: Stream, max_tokens: int, on_tokens: Callable[[], None]) -> None:
        """Fill `stream` until its end, or with the `error` that ended it; call `on_tokens` at each arrival."""


def run_streams(
    asker: Asker,
    *,
    prompts: Sequence[Prompt] = PROMPTS,
    fault: Callable[[], Any] | None = None,
    after_tokens: int = FLOWING_TOKENS,
    until: Callable[[], bool] | None = None,
    until_seconds: float = ENOUGH_DEADLINE_SECONDS,
    max_tokens: int = MAX_TOKENS,
) -> Run:
    """Ask every prompt at once, and put a fault in when all of them flow.

    Args:
        asker: `askers.OfficialClient` or `askers.ResumingClient`.
        fault: called in a thread when the first stream of each lane has `after_tokens` tokens.
        until: called in a thread after the fault; lanes ask again until it says yes. Without it each asks once.
        until_seconds: the longest to wait for that; streams then end, and the caller's assertions say what is wrong.

    Raises:
        Exception: what `fault` or `until` raised; the streams are cancelled.
    """
    return asyncio.run(_Lanes(asker, prompts, after_tokens, max_tokens).run(fault, until, until_seconds))


class _Lanes:
    def __init__(self, asker: Asker, prompts: Sequence[Prompt], after_tokens: int, max_tokens: int) -> None:
        self._asker = asker
        self._prompts = prompts
        self._after_tokens = after_tokens
        self._max_tokens = max_tokens
        self._run = Run()
        self._not_flowing = {index for index, _ in enumerate(prompts)}
        self._flowing = asyncio.Event()
        self._enough = asyncio.Event()

    async def run(self, fault: Callable[[], Any] | None, until: Callable[[], bool] | None, until_seconds: float) -> Run:
        async with self._asker:
            again = until is not None
            lanes = [asyncio.create_task(self._lane(index, again)) for index, _ in enumerate(self._prompts)]
            try:
                await self._drive(fault, until, until_seconds)
                await asyncio.gather(*lanes)
            finally:
                for lane in lanes:
                    lane.cancel()
                await asyncio.gather(*lanes, return_exceptions=True)
        return self._run

    async def _drive(
        self, fault: Callable[[], Any] | None, until: Callable[[], bool] | None, until_seconds: float
    ) -> None:
        await self._flowing.wait()
        if fault is not None:
            self._run.fault_began = time.monotonic()
            self._run.fault_result = await asyncio.to_thread(fault)
            self._run.fault_ended = time.monotonic()
        if until is not None:
            await asyncio.to_thread(_poll, until, until_seconds)
        self._enough.set()

    async def _lane(self, index: int, again: bool) -> None:
        while True:
            stream = Stream(self._prompts[index])
            self._run.streams.append(stream)
            await self._ask(stream, index)
            self._is_flowing(index)  # or has ended, which the assertions will say
            if self._enough.is_set() or not again:
                return
            if stream.error:  # a lane that is refused does not ask as fast as it can
                await asyncio.sleep(AGAIN_SECONDS)

    async def _ask(self, stream: Stream, index: int) -> None:
        def on_tokens() -> None:
            if len(stream.tokens) >= self._after_tokens:
                self._is_flowing(index)

        try:
            await within(STREAM_DEADLINE_SECONDS, self._asker.ask(stream, self._max_tokens, on_tokens))
        except asyncio.TimeoutError:
            stream.error = f"no end within {STREAM_DEADLINE_SECONDS:g} s"

    def _is_flowing(self, index: int) -> None:
        self._not_flowing.discard(index)
        if not self._not_flowing:
            self._flowing.set()


def _poll(until: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
