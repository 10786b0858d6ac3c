"""The ring's probe as it travels: 64 fixed tokens at once and one by one; it is also the ring's warm-up."""

from __future__ import annotations

import asyncio
import math

from stage_runtime.engine.probe import EXACT_LARGEST_LOGIT_DIFFERENCE, PROBE_TOKENS, probe_token_ids
from stage_runtime.engine.stage import EngineError
from stage_runtime.link.messages import SamplingParameters
from stage_runtime.link.steps import PROBE_STEPS_ID, PROBE_WHOLE_ID, Output, StepEntry, TokenKind
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


async def run_probe(pipe: Pipe, wake: asyncio.Event, vocab_size: int, stages: int) -> float:
    """Send the probe round the ring.

    Args:
        pipe: the ring.
        wake: set whenever a micro-batch has come back.
        vocab_size: of the model.
        stages: micro-batches in flight at once.

    Returns:
        The largest logit difference between the whole pass and the single tokens.

    Raises:
        EngineError: something else than the probe came back.
        LinkError, FrameError: the ring broke.
    """
    ids = probe_token_ids(vocab_size)
    largest = 0.0
    for sequence_id in (PROBE_WHOLE_ID, PROBE_STEPS_ID):
        await pipe.open(sequence_id, "probe", SamplingParameters())
    steps = [(StepEntry(PROBE_WHOLE_ID, 0, PROBE_TOKENS, Output.ALL), ids)]
    steps += [(StepEntry(PROBE_STEPS_ID, i, 1, Output.ALL), [token]) for i, token in enumerate(ids)]
    # the tokens are known, so steps follow each other without waiting for answers
    while steps or pipe.in_flight:
        if pipe.has_returned:
            for result in (await pipe.collect()).results:
                if result.kind is not TokenKind.PROBE:
                    raise EngineError(f"the probe came back as {result}")
                largest = max(largest, result.value)
        elif steps and pipe.in_flight < stages:
            entry, tokens = steps.pop(0)
            await pipe.submit((entry,), tokens, PROBE_BATCH_LIMIT)
        else:
            await wake.wait()
            wake.clear()
    await pipe.free((PROBE_WHOLE_ID, PROBE_STEPS_ID))
    return largest
