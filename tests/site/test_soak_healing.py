"""A kill at each token, and 200 mixed faults: no request fails, no token is lost, repeated or changed.

Counts and pauses of each case are kept in build/soak/heal.jsonl with commit, seed and time; the summary is over all
cases of the commit, those of earlier, interrupted runs too.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from tests.figures import note
from tests.site import faults
from tests.site.conftest import STAGE_BOXES
from tests.site.healing import Healing
from tests.site.streams import PROMPTS, Run
from tests.soak import append, commit, entries, now

pytestmark = [pytest.mark.lab, pytest.mark.soak]

SEED = 20261130
MIXED_FAULTS = 200
TOKENS = range(1, 21)
SOAK_PROMPTS = (PROMPTS[0], PROMPTS[2], PROMPTS[4], PROMPTS[7])
"""Two greedy and two seeded ones."""
MOST_TOKENS_BEFORE = 30
LONGEST_AWAY_SECONDS = 4.0
COUNTS = ("streams", "failed", "lost", "repeated", "changed", "near_ties")

BOX_FAULTS = {kind.name: kind for kind in (faults.KILL, faults.POWER_CUT, faults.LINK_CUT, faults.STOP)}
CONTROL_FAULTS: dict[str, faults.ProgramName] = {"coordinator-kill": "coordinator", "gateway-kill": "gateway"}


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        box: empty for programs of the control box.
        after_tokens: every stream has so many when it happens.
        away_seconds: how long the box is away before it is switched on, plugged in or continued.
    """

    kind: str
    box: str
    after_tokens: int
    away_seconds: float
    seed: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind}-{self.box}" if self.box else self.kind


def mixed_case(number: int) -> Case:
    """Kinds in turn, everything else by chance."""
    seed = f"{SEED}-{number}"
    chance = random.Random(seed)  # noqa: S311 - a sample of faults, no secret
    names = [*BOX_FAULTS, *CONTROL_FAULTS]
    kind = names[number % len(names)]
    box = chance.choice(STAGE_BOXES) if kind in BOX_FAULTS else ""
    return Case(
        kind, box, chance.randint(1, MOST_TOKENS_BEFORE), round(chance.uniform(0, LONGEST_AWAY_SECONDS), 2), seed
    )


def kill_case(token: int) -> Case:
    """A kill of the first, middle and last box in turn."""
    return Case("kill", STAGE_BOXES[token % len(STAGE_BOXES)], token, 0.0, f"{SEED}-token-{token}")


def put_fault(heal: Healing, case: Case) -> float:
    """The fault and, after a while, its end; returns when it happened."""
    if case.kind in CONTROL_FAULTS:
        return faults.kill(heal.box("control"), CONTROL_FAULTS[case.kind])
    kind, box = BOX_FAULTS[case.kind], heal.box(case.box)
    moment = kind.put(box)
    time.sleep(case.away_seconds)
    kind.take_back(box)
    return moment


@pytest.fixture(scope="module")
def summary() -> Iterator[None]:
    """Shows at the end what became of all cases of this commit."""
    yield
    found = entries("heal", commit())
    counts = ", ".join(f"{name} {sum(entry[name] for entry in found)}" for name in COUNTS)
    note(f"soak-heal, {len(found)} faults at {commit()[:12]}: {counts}")
    for kind in sorted({entry["kind"] for entry in found}):
        pauses = sorted(pause for entry in found if entry["kind"] == kind for pause in entry["pauses"])
        note(f"soak-heal, longest pause of a stream, {kind}: {_percentiles(pauses)}")


def _percentiles(values: list[float]) -> str:
    if len(values) < 2:
        return f"n {len(values)}"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return f"n {len(values)}, p50 {cuts[49]:.2f} s, p95 {cuts[94]:.2f} s, max {values[-1]:.2f} s"


def check(heal: Healing, case: Case, node: str) -> None:
    """Run streams through the case's fault, keep what came, and judge it."""
    run = heal.stream(
        fault=lambda: put_fault(heal, case),
        resumable=case.kind == "gateway-kill",
        after_tokens=case.after_tokens,
        prompts=SOAK_PROMPTS,
    )
    result = heal.compare(run)
    append(
        "heal",
        {
            "case": node,
            "commit": commit(),
            **now(),
            **asdict(case),
            **{name: _count(getattr(result, name)) for name in COUNTS},
            "pauses": _pauses(run),
        },
    )
    assert result.is_equal, f"{case}: {result}\n{heal.watch.report()}"
    heal.watch.wait_whole()


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list) else int(value)


def _pauses(run: Run) -> list[float]:
    """Longest pause of each stream that was open when the fault happened."""
    moment = float(run.fault_result)
    return [round(pause, 3) for stream in run.open_at(moment) if (pause := stream.pause_after(moment)) is not None]


@pytest.fixture
def whole(healing: Healing, summary: None) -> Iterator[Healing]:
    """A whole site; what a failed case leaves is put right for the next one."""
    healing.watch.wait_whole()
    yield healing
    if not healing.watch.holds(healing.watch.is_whole):
        healing.recover()


@pytest.mark.parametrize("token", TOKENS)
def test_kill_at_each_token(whole: Healing, token: int, request: pytest.FixtureRequest) -> None:
    check(whole, kill_case(token), request.node.nodeid)


@pytest.mark.parametrize("number", range(MIXED_FAULTS))
def test_mixed_faults(whole: Healing, number: int, request: pytest.FixtureRequest) -> None:
    check(whole, mixed_case(number), request.node.nodeid)
