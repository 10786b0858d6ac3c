"""Is a disturbed run equal to the undisturbed one? Lost, repeated and changed tokens, and near-ties with their margins.

Policy `exact` promises equal tokens but for near-ties, which are judged by the logits of `transformers` in FP32 at the
first different position: the machinery of the golden file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.site.streams import Prompt, Run, Stream

MOST_NEAR_TIES = 0.01
"""Share of requests that may differ at a near-tie; more is a failure (policy `exact`)."""
MOST_DIFFERENCE = 1e-3
"""Largest δ of a ring's probe that policy `exact` admits; what counts where no ring has been probed yet."""


def is_near_tie(margin: dict[str, float], difference: float) -> bool:
    """Whether logits that are `difference` apart can turn the choice: two logits, or a bound of the distribution."""
    logits = min(margin.get("gap", 1.0), margin.get("top_k", 1.0))
    probability = min(margin.get("boundary", 1.0), margin.get("top_p", 1.0))
    return logits <= 2 * difference or probability <= difference


class Reference:
    """`transformers` in FP32 on the bundle's own shards, loaded when a first difference asks for it.

    Args:
        directory: the bundle's model directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def _model(self) -> Any:
        from tests.golden import make_golden

        return make_golden.load_model(self._directory, json.loads((self._directory / "model.json").read_bytes()))

    def margin(self, prompt: Prompt, answer: Sequence[int]) -> dict[str, float]:
        """How near the choice of the token behind `answer` was to another one; keys as in the golden file."""
        import torch

        from tests.golden import make_golden

        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([[*prompt.ids, *answer]]), logits_to_keep=1)
        logits = output.logits[0, -1].numpy()
        if not prompt.sampling:
            return make_golden.greedy(logits)[1]
        return make_golden.draw(logits, list(answer), dict(prompt.sampling))[1]


@dataclass(frozen=True)
class Difference:
    """Where a stream first leaves the reference; a token of None is the answer's end."""

    prompt: str
    position: int
    wanted: int | None
    got: int | None
    margin: dict[str, float]
    near_tie: bool

    def __str__(self) -> str:
        margin = ", ".join(f"{name} {value:.1e}" for name, value in self.margin.items())
        word = "near-tie" if self.near_tie else "DIFFERENT"
        return f"{self.prompt}: {word} at token {self.position}: {self.wanted} and {self.got}, {margin}"


@dataclass
class Comparison:
    """What became of a run's streams.

    Attributes:
        failed: what the client was told, one entry a stream that did not end as an answer ends.
        lost, repeated, changed: tokens, counted in streams that differ without a near-tie.
    """

    streams: int = 0
    failed: list[str] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0
    changed: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def near_ties(self) -> list[Difference]:
        """Differences that policy `exact` admits."""
        return [difference for difference in self.differences if difference.near_tie]

    @property
    def is_equal(self) -> bool:
        """All streams complete and equal but for near-ties."""
        return not self.failed and len(self.near_ties) == len(self.differences)

    def add(self, other: Comparison) -> None:
        """Count another run's streams too."""
        self.streams += other.streams
        self.failed += other.failed
        self.lost += other.lost
        self.repeated += other.repeated
        self.changed += other.changed
        self.differences += other.differences

    def __str__(self) -> str:
        counts = f"{self.lost} lost, {self.repeated} repeated, {self.changed} changed"
        text = f"{self.streams} answers: {len(self.failed)} failed, tokens {counts}, {len(self.near_ties)} near-ties"
        return "; ".join([text, *self.failed, *map(str, self.differences)])


class Judge:
    """Compares runs with the undisturbed one.

    Args:
        undisturbed: each prompt's answer when nothing goes wrong.
    """

    def __init__(self, undisturbed: Run, reference: Reference) -> None:
        self._reference = reference
        self._wanted = {stream.prompt.name: stream for stream in undisturbed.streams}

    def compare(self, run: Run, difference: float) -> Comparison:
        """Judge every stream of a run.

        Args:
            difference: δ, the largest logit difference between the rings that computed.
        """
        result = Comparison()
        for stream in run.streams:
            result.add(self._stream(stream, difference))
        return result

    def tokens(self, prompt: Prompt) -> list[int]:
        """The undisturbed answer."""
        return self._wanted[prompt.name].tokens

    def _stream(self, stream: Stream, difference: float) -> Comparison:
        result, wanted = Comparison(streams=1), self._wanted[stream.prompt.name]
        if not stream.is_complete:
            result.failed.append(f"{stream.prompt.name} after {len(stream.tokens)} tokens: {stream.error or 'no end'}")
            return result  # what it has is a beginning; the tokens that it owes are not "lost" but refused
        if (stream.tokens, stream.finish, stream.text) == (wanted.tokens, wanted.finish, wanted.text):
            return result
        position = first_difference(wanted.tokens, stream.tokens)
        margin = self._reference.margin(stream.prompt, wanted.tokens[:position])
        near_tie = stream.tokens != wanted.tokens and is_near_tie(margin, difference)
        result.differences.append(
            Difference(
                stream.prompt.name,
                position,
                _at(wanted.tokens, position),
                _at(stream.tokens, position),
                margin,
                near_tie,
            )
        )
        if not near_tie:
            result.lost, result.repeated, result.changed = count_differences(wanted.tokens, stream.tokens)
        return result


def first_difference(wanted: Sequence[int], got: Sequence[int]) -> int:
    """The first position at which two answers differ; the shorter one's length where it is the other's beginning."""
    shorter = min(len(wanted), len(got))
    return next((index for index in range(shorter) if wanted[index] != got[index]), shorter)


def count_differences(wanted: Sequence[int], got: Sequence[int]) -> tuple[int, int, int]:
    """(lost, repeated, changed) tokens by the shortest edit that a matcher finds; a change of text alone counts one."""
    lost = repeated = changed = 0
    for kind, a, b, c, d in SequenceMatcher(None, list(wanted), list(got), autojunk=False).get_opcodes():
        lost += b - a if kind == "delete" else 0
        repeated += d - c if kind == "insert" else 0
        changed += max(b - a, d - c) if kind == "replace" else 0
    return lost, repeated, changed if lost or repeated or changed else 1


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
