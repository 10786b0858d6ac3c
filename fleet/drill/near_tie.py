"""How near the choice of a token was to another one. Pure; what policy `exact` promises ends at a near-tie.

No two plans compute bit-equal logits; under `exact` they differ by 1e-3 at most, or the ring's probe refuses to serve.
Where that is enough to choose another token, another token is no fault. The sampler's definition is in
`stage_runtime/engine/sampling.py`; it is followed here with the likeliest tokens alone, which is exact because a
drill's sampled streams ask for `top_k`.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

EXACT_DIFFERENCE = 1e-3
"""The largest logit difference δ between plans under which policy `exact` serves."""
GREEDY_CANDIDATES = 2
SAMPLED_TOP_K = 19
"""One less than the API shows alternatives (20), so that the first token outside is seen too."""
_RANDOM_KEY = struct.Struct("<QII")


@dataclass(frozen=True)
class Candidate:
    """A token that could have been chosen, with its natural log-probability at temperature 1, unfiltered.

    Attributes:
        token_id: None where the gateway does not say.
    """

    token_id: int | None
    logprob: float


@dataclass(frozen=True)
class Margin:
    """How much would have had to differ for another token, and how much `exact` allows. The same unit for both.

    Attributes:
        unit: "logit" (greedy) or "probability" (the distance of a draw from the bound between two tokens).
    """

    value: float
    allowed: float
    unit: str

    @property
    def is_near_tie(self) -> bool:
        """Whether `exact` admits another token here."""
        return self.value <= self.allowed

    def __str__(self) -> str:
        return f"{self.unit} {self.value:.1e} of {self.allowed:.1e}"


def greedy_margin(candidates: Sequence[Candidate]) -> Margin | None:
    """Of a token that was the likeliest.

    Args:
        candidates: likeliest first, GREEDY_CANDIDATES at least; None with fewer.
    """
    if len(candidates) < GREEDY_CANDIDATES:
        return None
    return Margin(candidates[0].logprob - candidates[1].logprob, 2 * EXACT_DIFFERENCE, "logit")


def sampled_margin(candidates: Sequence[Candidate], *, temperature: float, seed: int, position: int) -> Margin | None:
    """Of a token that was drawn with `top_k` SAMPLED_TOP_K, choice 0, no `top_p` and no penalties.

    Args:
        candidates: likeliest first, SAMPLED_TOP_K + 1 at least; None with fewer, or without token ids.
        position: index of the token in the answer.
    """
    kept, outside = candidates[:SAMPLED_TOP_K], candidates[SAMPLED_TOP_K : SAMPLED_TOP_K + 1]
    if not outside or any(candidate.token_id is None for candidate in kept):
        return None
    in_order = sorted(kept, key=lambda candidate: candidate.token_id or 0)
    weights = [_weight(candidate, kept[0], temperature) for candidate in in_order]
    total = sum(weights)
    # where another token may come in from outside, every bound may move by its share too
    edge = kept[-1].logprob - outside[0].logprob <= 2 * EXACT_DIFFERENCE
    share = _weight(kept[-1], kept[0], temperature) * math.exp(2 * EXACT_DIFFERENCE / temperature) if edge else 0.0
    drawn = uniform(seed, position)
    margins = [
        Margin(abs(drawn - bound / total), _shift(bound / total, temperature) + share / total, "probability")
        for bound in list(accumulate(weights))[:-1]
    ]
    return min(margins, key=lambda margin: margin.value - margin.allowed)


def _weight(candidate: Candidate, likeliest: Candidate, temperature: float) -> float:
    return math.exp((candidate.logprob - likeliest.logprob) / temperature)


def _shift(bound: float, temperature: float) -> float:
    """How far a cumulative probability moves if all logits below it are off by δ one way, and all above the other."""
    odds = math.exp(2 * EXACT_DIFFERENCE / temperature)
    up, down = bound * odds / (1 - bound + bound * odds), bound / (bound + (1 - bound) * odds)
    return max(up - bound, bound - down)


def uniform(seed: int, position: int) -> float:
    """The sampler's u in [0, 1) of choice 0."""
    digest = hashlib.blake2b(_RANDOM_KEY.pack(seed, 0, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) / 2**53)
