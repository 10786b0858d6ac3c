"""Choosing the next token. The definition is exact, so that an independent script can reproduce every draw.

Given FP32 logits z[0…V) of one position, all in IEEE float64 from here on:

1. Penalties: z[t] −= frequency_penalty · n(t) + presence_penalty · [n(t) > 0], n(t) being how often t occurs in the
   answer so far (the prompt does not count).
2. temperature < 1e-6: the token is argmax z, the lowest id among equals. Done. Else z /= temperature.
3. top_k > 0: the top_k largest z stay; among equals at the edge the lower ids stay, so exactly min(top_k, V) do.
4. p = exp(z − max z) over what stays, divided by their sum.
5. top_p < 1: order by descending p, equals by ascending id; the shortest prefix whose running sum (added one by one)
   is ≥ top_p stays; all of it if rounding never lets the sum get there.
6. c = running sum of p over what stays, in ascending token-id order. With u of `uniform`, the token is the first id
   with c > u · c[last].

`uniform`: u = (BLAKE2b with an 8-byte digest over little-endian (seed u64, choice u32, position u32), read as a
little-endian u64, shifted right by 11 bits) / 2⁵³. `position` is the index of the generated token, from 0.

Log-probabilities reported are those of the raw logits: no penalty, temperature 1, nothing filtered.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from dataclasses import dataclass, field

import torch

from stage_runtime.link.messages import SamplingParameters, TokenLogprob

# A division by less could overflow, and hardly anything but the largest logit has a chance here anyway.
LEAST_TEMPERATURE = 1e-6

_RANDOM_KEY = struct.Struct("<QII")


def uniform(seed: int, choice: int, position: int) -> float:
    """The u in [0, 1) of a generated token; see the module's text.

    Args:
        seed: u64. choice: u32. position: u32, index of the generated token, from 0.
    """
    digest = hashlib.blake2b(_RANDOM_KEY.pack(seed, choice, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) / 2**53)


@dataclass(frozen=True)
class Sample:
    """A chosen token; log-probabilities only if asked for."""

    token_id: int
    logprob: float | None = None
    alternatives: tuple[TokenLogprob, ...] = ()


@dataclass
class Sampler:
    """Draws the tokens of one sequence, one after another.

    Attributes:
        parameters: of the request.
        counts: occurrences of each token in the answer so far.
        position: index of the next token.
    """

    parameters: SamplingParameters
    counts: Counter[int] = field(default_factory=Counter)
    position: int = 0

    def next_token(self, logits: torch.Tensor) -> Sample:
        """Choose a token and remember it.

        Args:
            logits: [vocab], FP32.
        """
        token = choose(logits, self.parameters, self.counts, self.position)
        self.counts[token] += 1
        self.position += 1
        if self.parameters.logprobs is None:
            return Sample(token)
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        best, ids = logprobs.sort(descending=True, stable=True)
        wanted = self.parameters.logprobs
        alternatives = zip(ids[:wanted].tolist(), best[:wanted].tolist(), strict=True)
        return Sample(token, float(logprobs[token]), tuple(TokenLogprob(i, p) for i, p in alternatives))


def choose(logits: torch.Tensor, parameters: SamplingParameters, counts: Counter[int], position: int) -> int:
    """The token by the module's definition.

    Args:
        logits: [vocab], FP32, not changed.
        counts: occurrences in the answer so far.
        position: index of the token, from 0.
    """
    greedy = parameters.temperature < LEAST_TEMPERATURE
    penalised = bool(parameters.frequency_penalty or parameters.presence_penalty) and bool(counts)
    if greedy and not penalised:
        return int(logits.argmax())  # exact in FP32 already: no arithmetic happens
    z = logits.double()
    if penalised:
        ids = torch.tensor(list(counts))
        times = torch.tensor([counts[i] for i in counts], dtype=torch.float64)
        z[ids] -= parameters.frequency_penalty * times + parameters.presence_penalty
    if greedy:
        return int(z.argmax())
    z = z / parameters.temperature
    kept = _filter(z, parameters)
    p = torch.softmax(z[kept], dim=-1) if kept.numel() < z.numel() else torch.softmax(z, dim=-1)
    return _draw(kept, p, parameters, position)


def _filter(z: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """Ids, ascending, that top_k leaves."""
    if not 0 < parameters.top_k < z.numel():
        return torch.arange(z.numel())
    order = z.argsort(descending=True, stable=True)  # stable: equals stay in ascending id order
    return order[: parameters.top_k].sort().values


def _draw(ids: torch.Tensor, p: torch.Tensor, parameters: SamplingParameters, position: int) -> int:
    """Nucleus and inverse cumulative distribution over ids in ascending order with probabilities p."""
    if parameters.top_p < 1:
        order = p.argsort(descending=True, stable=True)
        reached = (p[order].cumsum(0) >= parameters.top_p).nonzero()
        count = int(reached[0]) + 1 if reached.numel() else p.numel()
        stay = order[:count].sort().values
        ids, p = ids[stay], p[stay]
    cumulative = p.cumsum(0)
    u = uniform(parameters.seed, parameters.choice, position)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return int(ids[min(index, ids.numel() - 1)])
