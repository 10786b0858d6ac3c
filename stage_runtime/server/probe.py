"""The ring's probe as it travels: 64 fixed tokens at once and one by one; it is also the ring's warm-up."""

from __future__ import annotations

import math
from collections import deque

from stage_runtime.engine.probe import EXACT_LARGEST_LOGIT_DIFFERENCE, PROBE_TOKENS, probe_token_ids
from stage_runtime.engine.stage import EngineError
from stage_runtime.link.control import Open
from stage_runtime.link.messages import SamplingParameters
from stage_runtime.link.steps import PROBE_STEPS_ID, PROBE_WHOLE_ID, Output, StepEntry, TokenKind, TokenResult
from stage_runtime.server.pipe import Pipe

# A probe asks for no smaller micro-batches than it is made of.
PROBE_BATCH_LIMIT = 1


class ProbeError(Exception):
    """The ring's probe did not pass; the message says by how much."""


def probe_problem(difference: float) -> str:
    """Why policy `exact` is refused; empty if the probe passed.

    Args:
        difference: largest logit difference found; infinite once a logit was no finite number.
    """
    if difference <= EXACT_LARGEST_LOGIT_DIFFERENCE:
        return ""
    if not math.isfinite(difference):
        return "policy exact is refused: the ring's probe found logits that are not finite numbers"
    return (
        f"policy exact is refused: the ring's probe found logits {difference:.2e} apart between a prefill and "
        f"single tokens, at most {EXACT_LARGEST_LOGIT_DIFFERENCE:.0e} is allowed"
    )


class RingProbe:
    """The probe of one life of the ring, step by step: whoever owns the pipe decides when the next one may go.

    Args:
        pipe: the ring.
        vocab_size: of the model.

    Attributes:
        largest: logit difference between the whole pass and the single tokens, so far.
    """

    def __init__(self, pipe: Pipe, vocab_size: int) -> None:
        ids = probe_token_ids(vocab_size)
        self.largest = 0.0
        self._pipe = pipe
        self._in_flight = 0
        self._steps: deque[tuple[StepEntry, list[int]]] = deque([(_entry(PROBE_WHOLE_ID, 0, PROBE_TOKENS), ids)])
        # the tokens are known, so steps follow each other without waiting for answers
        self._steps += [(_entry(PROBE_STEPS_ID, index, 1), [token]) for index, token in enumerate(ids)]
        self._begun = False

    @property
    def in_flight(self) -> int:
        """Steps sent that did not come back yet."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Steps to send."""
        return len(self._steps)

    @property
    def done(self) -> bool:
        """Whether everything came back."""
        return not self._steps and not self._in_flight

    async def send_next(self) -> None:
        """Send the next step."""
        if not self._begun:
            self._begun = True
            for sequence_id in (PROBE_WHOLE_ID, PROBE_STEPS_ID):
                await self._pipe.open(Open(sequence_id, "probe", SamplingParameters()))
        entry, tokens = self._steps.popleft()
        self._in_flight += 1
        await self._pipe.submit((entry,), tokens, PROBE_BATCH_LIMIT)

    def take(self, results: tuple[TokenResult, ...]) -> bool:
        """A micro-batch came back.

        Returns:
            Whether it was the probe's.

        Raises:
            EngineError: it was, and a stage could not compute it.
        """
        if not results or results[0].sequence_id not in (PROBE_WHOLE_ID, PROBE_STEPS_ID):
            return False
        self._in_flight -= 1
        for result in results:
            if result.kind is not TokenKind.PROBE:
                raise EngineError(f"the probe came back as {result}")
            self.largest = max(self.largest, result.value)
        return True

    async def finish(self) -> None:
        """Free what it took, and judge.

        Raises:
            ProbeError: the logits are too far apart.
        """
        await self._pipe.free((PROBE_WHOLE_ID, PROBE_STEPS_ID))
        if problem := probe_problem(self.largest):
            raise ProbeError(problem)


def _entry(sequence_id: int, position: int, rows: int) -> StepEntry:
    return StepEntry(sequence_id, position, rows, Output.ALL)
