"""The first stage's view of the ring while it holds together: micro-batches go in, sampled tokens come out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stage_runtime.engine.stage import StageEngine
from stage_runtime.link.connection import Link, LinkError
from stage_runtime.link.control import Free, KvLength, KvLengths, Open, Ready, decode_control, encode_control
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.steps import Step, StepEntry, Tokens, decode_step, decode_tokens, encode_step
from stage_runtime.server.compute import ComputeThread

U32 = 2**32
# A SURVEY has a cap like any control frame; of more sequences than fit in, the oldest are prefilled again.
SURVEYED_SEQUENCES = 1000


@dataclass(frozen=True)
class _Sent:
    """A micro-batch in flight: its number, and (sequence, position) of its entries."""

    number: int
    entries: tuple[tuple[int, int], ...]

    def compare(self, returned: Iterable[tuple[int, int]]) -> None:
        """Raise FrameError unless the same entries came back; one that is missing would wait for ever."""
        if tuple(returned) != self.entries:
            raise FrameError(f"micro-batch {self.number} came back with other entries than it was sent with")


class Pipe:
    """Owns what is in flight during one life of the ring; a pipeline of one stage has no links and no hop.

    Args:
        engine, compute: the first stage's own part.
        epoch: of every frame.
        successor: link to the second stage; None in a pipeline of one.
        predecessor: link from the last stage; None in a pipeline of one.
        on_return: called when a micro-batch came back.
    """

    def __init__(
        self,
        engine: StageEngine,
        compute: ComputeThread,
        epoch: int,
        *,
        successor: Link | None,
        predecessor: Link | None,
        on_return: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._epoch = epoch
        self._successor = successor
        self._predecessor = predecessor
        self._on_return = on_return
        self._next_number = 0
        self._sent: deque[_Sent] = deque()  # micro-batches in flight, oldest first
        self._returned: deque[Tokens | tuple[_Sent, Frame]] = deque()
        self._surveyed: asyncio.Future[tuple[KvLength, ...]] = asyncio.get_running_loop().create_future()

    @property
    def in_flight(self) -> int:
        """Micro-batches submitted and not collected."""
        return len(self._sent) + len(self._returned)

    @property
    def has_returned(self) -> bool:
        """Whether `collect` has something to do."""
        return bool(self._returned)

    async def agree(self) -> dict[int, int]:
        """Ask round the ring how much every stage has kept of each sequence, and make all keep just that.

        Returns:
            Sequence → tokens that all stages have kept of it, at least 1.

        Raises:
            LinkError, FrameError, EngineError: the ring is broken.
        """
        kept = await self._compute.run(self._engine.kept_lengths)
        kept = dict(list(kept.items())[-SURVEYED_SEQUENCES:])
        lengths = tuple(KvLength(*item) for item in kept.items())
        if self._successor is not None:
            await self._send(FrameType.SURVEY, encode_control(KvLengths(lengths)))
            lengths = self._checked(kept, await asyncio.shield(self._surveyed))
        agreed = KvLengths(tuple(length for length in lengths if length.kv_len))
        await self._compute.run(self._engine.agree, agreed.sequences)
        await self._send(FrameType.AGREED, encode_control(agreed))
        return {length.sequence_id: length.kv_len for length in agreed.sequences}

    @staticmethod
    def _checked(kept: dict[int, int], found: tuple[KvLength, ...]) -> tuple[KvLength, ...]:
        if [length.sequence_id for length in found] != list(kept):
            raise FrameError("the survey came back with other sequences than it was sent with")
        if any(length.kv_len > kept[length.sequence_id] for length in found):
            raise FrameError("the survey came back with more tokens than it was sent with")
        return found

    async def open(self, wanted: Open) -> None:
        """A sequence begins, or goes on, on every stage."""
        await self._compute.run(self._engine.open, wanted.sequence_id, wanted.sampling, wanted.generated, wanted.kv_len)
        await self._send(FrameType.OPEN, encode_control(wanted))

    async def free(self, sequence_ids: tuple[int, ...]) -> None:
        """Sequences end on every stage."""
        await self._compute.run(self._engine.free, sequence_ids)
        await self._send(FrameType.FREE, encode_control(Free(sequence_ids)))

    async def announce_ready(self, largest_logit_difference: float) -> None:
        """The probe passed; every stage may say ready."""
        await self._send(FrameType.READY, encode_control(Ready(largest_logit_difference)))

    async def submit(self, entries: tuple[StepEntry, ...], token_ids: list[int], batch_limit: int) -> None:
        """Compute the own part of a micro-batch and send it on."""
        if self._successor is None:
            self._returned.append(await self._compute.step(self._whole, entries, token_ids, batch_limit))
            return
        step = await self._compute.step(self._first_part, entries, token_ids, batch_limit)
        self._next_number = (self._next_number + 1) % U32
        self._sent.append(_Sent(self._next_number, tuple((e.sequence_id, e.position) for e in entries)))
        await self._send(FrameType.STEP, encode_step(step), self._next_number)

    async def collect(self) -> Tokens:
        """The oldest micro-batch that came back, with its tokens sampled.

        Raises:
            FrameError: its body is malformed, or not the answer to what was sent.
        """
        returned = self._returned.popleft()
        if isinstance(returned, Tokens):
            return returned
        sent, frame = returned
        if frame.type is FrameType.TOKENS:
            tokens = decode_tokens(frame.body)
            sent.compare((result.sequence_id, result.position) for result in tokens.results)
            if any(result.token_id >= self._engine.config.vocab_size for result in tokens.results):
                raise FrameError(f"micro-batch {sent.number} came back with tokens outside the vocabulary")
            return tokens
        step = decode_step(frame.body, self._engine.config.hidden_size)
        sent.compare((entry.sequence_id, entry.position) for entry in step.entries)
        return await self._compute.step(self._engine.head, step)

    async def receive(self) -> None:
        """Take in what the last stage returns, until the link ends.

        Raises:
            LinkError, FrameError: the ring is broken.
        """
        if self._predecessor is None:
            raise LinkError("a pipeline of one stage has no predecessor")
        while True:
            frame = await self._predecessor.receive()
            if frame.type is FrameType.SURVEY and frame.epoch == self._epoch and not self._surveyed.done():
                self._surveyed.set_result(decode_control(KvLengths, frame.body).sequences)
                continue
            if frame.type not in (FrameType.OUTPUT, FrameType.TOKENS) or frame.epoch != self._epoch:
                raise FrameError(f"{frame.type.name} of epoch {frame.epoch} from the last stage")
            if not self._sent or frame.micro_batch != self._sent[0].number:
                raise FrameError(f"micro-batch {frame.micro_batch} came back out of order")
            self._returned.append((self._sent.popleft(), frame))
            self._on_return()

    async def _send(self, kind: FrameType, body: bytes, micro_batch: int = 0) -> None:
        if self._successor is not None:
            await self._successor.send(Frame(kind, body, self._epoch, micro_batch))

    def _first_part(self, entries: tuple[StepEntry, ...], token_ids: list[int], batch_limit: int) -> Step:
        return self._engine.forward(self._engine.embed(entries, token_ids, batch_limit))

    def _whole(self, entries: tuple[StepEntry, ...], token_ids: list[int], batch_limit: int) -> Tokens:
        return self._engine.head(self._engine.outputs(self._first_part(entries, token_ids, batch_limit)))
