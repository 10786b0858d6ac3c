"""What users of a disturbed round would have noticed, against an undisturbed one; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.drill.near_tie import Candidate, Margin, greedy_margin, sampled_margin

# So many tokens must fit behind a shift before it counts as lost or repeated tokens; fewer fit by chance.
EVIDENCE_TOKENS = 3
COMPLETE = ("stop", "length")


@dataclass(frozen=True)
class StreamSpec:
    """One answer of a round.

    Attributes:
        name: for people. temperature: 0 is greedy. seed: makes a sampled answer repeatable.
    """

    name: str
    prompt: str
    temperature: float
    seed: int
    max_tokens: int

    @property
    def mode(self) -> str:
        """How its tokens are chosen."""
        return "greedy" if self.temperature == 0 else "seeded"


@dataclass(frozen=True)
class StreamRun:
    """An answer as it came.

    Attributes:
        tokens: token ids in order. seconds: when each came, monotonic.
        finish_reason: None if it broke off. error: why, for people; empty if it did not.
        candidates: for each token what it was chosen from, likeliest first; shorter where the gateway does not say.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    finish_reason: str | None
    error: str = ""
    candidates: tuple[tuple[Candidate, ...], ...] = ()

    @property
    def completed(self) -> bool:
        """It came to its own end."""
        return self.finish_reason in COMPLETE and not self.error

    @property
    def longest_pause_milliseconds(self) -> float:
        """Longest time between a token and the next one; 0 with fewer than two."""
        pauses = (later - earlier for earlier, later in zip(self.seconds, self.seconds[1:], strict=False))
        return 1000 * max(pauses, default=0.0)


@dataclass(frozen=True)
class Difference:
    """How a sequence of tokens differs from the one that it should be."""

    lost: int = 0
    repeated: int = 0
    changed: int = 0


@dataclass(frozen=True)
class StreamVerdict:
    """What the user of one stream noticed; times in milliseconds.

    Attributes:
        usual_pause: longest one of the undisturbed round. first_difference: index of the first token that differs.
        margin: how near the choice of that token was to another one, None where that is not known.
        near_tie: tokens changed, and policy `exact` admits it: the first was chosen by less than plans may differ.
    """

    name: str
    mode: str
    tokens: int
    completed: bool
    lost: int
    repeated: int
    changed: int
    first_difference: int | None
    longest_pause_milliseconds: float
    usual_pause_milliseconds: float
    error: str
    margin: Margin | None = None
    near_tie: bool = False


def compare(wanted: Sequence[int], got: Sequence[int], *, completed: bool) -> Difference:
    """Classify the first thing that went wrong; what follows from it is not counted again.

    After the common beginning, tokens are *repeated* if the answer goes on as the wanted one did some tokens earlier,
    and *lost* if it goes on as the wanted one does some tokens later, the smallest shift first. Otherwise every token
    that differs from there on is *changed*. An answer that broke off has lost what is missing at its end too.

    Args:
        completed: the answer came to its own end.
    """
    same = next((index for index, pair in enumerate(zip(wanted, got, strict=False)) if pair[0] != pair[1]), None)
    missing = len(wanted) - len(got)
    if same is None:
        return Difference(changed=abs(missing)) if completed else Difference(lost=max(0, missing))
    rest = got[same:]
    for shift in range(1, max(same, len(wanted) - same) + 1):
        if shift <= same and _goes_on(wanted[same - shift :], rest):
            return Difference(repeated=shift, lost=0 if completed else max(0, missing + shift))
        if _goes_on(wanted[same + shift :], rest):
            return Difference(lost=shift if completed else max(shift, missing))
    changed = sum(1 for expected, came in zip(wanted[same:], rest, strict=False) if expected != came)
    return Difference(changed=changed + abs(missing)) if completed else Difference(max(0, missing), changed=changed)


def _goes_on(expected: Sequence[int], rest: Sequence[int]) -> bool:
    length = min(len(expected), len(rest))
    return length >= EVIDENCE_TOKENS and list(expected[:length]) == list(rest[:length])


def verdict(spec: StreamSpec, reference: StreamRun, disturbed: StreamRun) -> StreamVerdict:
    """The verdict on one stream."""
    difference = compare(reference.tokens, disturbed.tokens, completed=disturbed.completed)
    pairs = enumerate(zip(reference.tokens, disturbed.tokens, strict=False))
    shorter = min(len(reference.tokens), len(disturbed.tokens))
    first = next((index for index, (wanted, got) in pairs if wanted != got), shorter)
    margin = _margin(spec, reference, disturbed, first) if difference.changed else None
    return StreamVerdict(
        name=spec.name,
        mode=spec.mode,
        tokens=len(disturbed.tokens),
        completed=disturbed.completed,
        lost=difference.lost,
        repeated=difference.repeated,
        changed=difference.changed,
        first_difference=None if difference == Difference() else first,
        longest_pause_milliseconds=disturbed.longest_pause_milliseconds,
        usual_pause_milliseconds=reference.longest_pause_milliseconds,
        error=disturbed.error,
        margin=margin,
        near_tie=margin is not None and margin.is_near_tie,
    )


def _margin(spec: StreamSpec, reference: StreamRun, disturbed: StreamRun, position: int) -> Margin | None:
    """Of the first token that differs; where one answer had ended, what the other one was chosen from says it."""
    run = next((run for run in (reference, disturbed) if position < len(run.candidates)), None)
    if run is None:
        return None
    candidates = run.candidates[position]
    if spec.mode == "greedy":
        return greedy_margin(candidates)
    return sampled_margin(candidates, temperature=spec.temperature, seed=spec.seed, position=position)


def noticed(verdicts: Sequence[StreamVerdict], policy: str) -> bool:
    """Whether users noticed more than a pause: failed answers, lost or repeated tokens, under `exact` changed ones.

    What changed at a near-tie does not count, nor what follows from it: `exact` does not promise it.
    """
    return any(
        not one.completed or one.lost or one.repeated or (policy == "exact" and one.changed and not one.near_tie)
        for one in verdicts
    )
