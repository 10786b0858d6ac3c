"""What a request may ask for; pure, no torch."""

from __future__ import annotations

from stage_runtime.link.messages import GenerateRequest, SamplingParameters
from stage_runtime.link.steps import PROBE_STEPS_ID

U32 = 2**32
LARGEST_TOP_LOGPROBS = 20
LARGEST_PENALTY = 2.0
# Every stage hears a request's id in a control frame of its own, which has a cap; gateways draw at most 64 characters.
REQUEST_ID_CHARACTERS = 128
STOP_TOKENS_LIMIT = 256


def request_problem(request: GenerateRequest, most_tokens: int, vocab_size: int) -> str:
    """Why a request can't be served; empty if it can.

    Args:
        most_tokens: prompt and answer together.
        vocab_size: token ids are below it.
    """
    total = len(request.prompt) + request.max_tokens
    if not request.prompt or request.max_tokens < 1:
        return "prompt and max_tokens must have at least one token"
    if total > most_tokens:
        return (
            f"{len(request.prompt)} prompt tokens and {request.max_tokens} to generate are {total}, "
            f"the limit is {most_tokens}"
        )
    if len(request.generated) >= request.max_tokens:
        return f"{len(request.generated)} tokens are generated already, max_tokens is {request.max_tokens}"
    if any(token >= vocab_size for token in (*request.prompt, *request.generated)):
        return f"token ids must be below {vocab_size}"
    if request.sequence_id >= PROBE_STEPS_ID:
        return f"sequence id {request.sequence_id} is reserved"
    if len(request.request_id) > REQUEST_ID_CHARACTERS:
        return f"a request id has at most {REQUEST_ID_CHARACTERS} characters"
    if len(request.stop_token_ids) > STOP_TOKENS_LIMIT:
        return f"{len(request.stop_token_ids)} stop tokens, at most {STOP_TOKENS_LIMIT}"
    return sampling_problem(request.sampling)


def sampling_problem(sampling: SamplingParameters) -> str:
    """Why sampling parameters are out of range; empty if they are not."""
    if sampling.temperature < 0:
        return f"temperature {sampling.temperature} is negative"
    if not 0 < sampling.top_p <= 1:
        return f"top_p {sampling.top_p} is not in (0, 1]"
    for name, penalty in (("frequency", sampling.frequency_penalty), ("presence", sampling.presence_penalty)):
        if abs(penalty) > LARGEST_PENALTY:
            return f"{name}_penalty {penalty} is not in [-{LARGEST_PENALTY:g}, {LARGEST_PENALTY:g}]"
    if sampling.choice >= U32:
        return f"choice {sampling.choice} is no u32"
    if sampling.logprobs is not None and sampling.logprobs > LARGEST_TOP_LOGPROBS:
        return f"logprobs {sampling.logprobs}, at most {LARGEST_TOP_LOGPROBS}"
    return ""
