"""Which of several time servers to believe. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from guards.clock.packet import Answer

# Spread over all servers that counts as agreement: each reading is granted RFC 5905's MINDISP of 5 ms either way.
SLACK_SECONDS = 0.01


@dataclass(frozen=True)
class Agreement:
    """What servers say together.

    Attributes:
        best: the answer with the shortest way there, of those that agree; None: there is no majority.
        falsetickers: servers that are left out.
        reason: why there is no best.
    """

    best: Answer | None
    falsetickers: tuple[str, ...] = ()
    reason: str = ""


def agree(answers: Sequence[Answer]) -> Agreement:
    """More than half must share some time within what each can be off by (Marzullo's intersection, RFC 5905 § 11.2.1).
    One server alone is believed; two that differ are not."""
    if not answers:
        return Agreement(None, reason="no time server gave a usable answer")
    edges = sorted({edge for answer in answers for edge in _interval(answer)})
    believed = max(([each for each in answers if _holds(each, edge)] for edge in edges), key=len)
    if 2 * len(believed) <= len(answers):
        said = ", ".join(f"{each.server}: {each.offset_seconds:+.6f} s" for each in answers)
        return Agreement(None, tuple(each.server for each in answers), f"time servers disagree: {said}")
    # those that know their source go before those that run freely, however near
    best = min(believed, key=lambda each: (each.free_running, each.uncertainty_seconds, each.stratum))
    return Agreement(best, tuple(each.server for each in answers if each not in believed))


def _interval(answer: Answer) -> tuple[float, float]:
    half = answer.distance_seconds + SLACK_SECONDS / 2
    return answer.offset_seconds - half, answer.offset_seconds + half


def _holds(answer: Answer, offset_seconds: float) -> bool:
    low, high = _interval(answer)
    return low <= offset_seconds <= high
