from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.findings import Repair, State
from guards.memory.gpu import GpuMemory
from guards.memory.headroom import Headroom, Room
from guards.memory.pressure import judge_box, judge_gpu, must_shed
from guards.settings import MemorySettings

SETTINGS = MemorySettings()


def box(free_percent: float, some_percent: float | None = 0.0, path: str = "") -> Headroom:
    free = round(free_percent * 10_000)
    return Headroom(free, Room(path, 1_000_000, free), some_percent, 0.0)


def card(percent: float) -> GpuMemory:
    return GpuMemory(0, "card", round(percent * 10_000), 1_000_000)


UNKNOWN = Headroom(reasons=("/proc/meminfo: Permission denied",))
SHARED = GpuMemory(0, "Orin (nvgpu)", reason="Not Supported")


@pytest.mark.parametrize(
    ("seen", "state", "words"),
    [
        (box(50.0), State.HEALTHY, ""),
        (box(8.0), State.HEALTHY, ""),
        (box(7.9), State.DEGRADED, "the box has 7.9 % of its memory left, less than 8 %"),
        (box(6.0, path="/edge"), State.DEGRADED, "control group /edge has 6.0 %"),
        (box(3.9), State.UNHEALTHY, "3.9 %"),
        (box(50.0, 20.0), State.HEALTHY, ""),
        (box(50.0, 24.07), State.DEGRADED, "tasks waited for memory 24.07 % of a minute, more than 20 %"),
        (box(50.0, None), State.HEALTHY, ""),
        (UNKNOWN, State.DEGRADED, "Permission denied"),
    ],
)
def test_the_box(seen: Headroom, state: State, words: str) -> None:
    finding = judge_box(seen, SETTINGS)
    assert finding.state == state
    assert words in finding.reason
    assert (finding.repair == Repair.NONE) == (state == State.HEALTHY)


def test_what_is_not_known_is_no_number() -> None:
    evidence = judge_box(UNKNOWN, SETTINGS).evidence
    assert (evidence["available_bytes"], evidence["available_percent"], evidence["some_percent"]) == (None, None, None)


@pytest.mark.parametrize(
    ("gpu", "state", "repair"),
    [
        (card(85.0), State.HEALTHY, Repair.NONE),
        (card(85.1), State.DEGRADED, Repair.SHED_SEQUENCES),
        (SHARED, State.UNSUPPORTED, Repair.NONE),
    ],
)
def test_a_gpu(gpu: GpuMemory, state: State, repair: Repair) -> None:
    finding = judge_gpu(gpu, SETTINGS)
    assert (finding.part, finding.state, finding.repair) == ("gpu0", state, repair)


@pytest.mark.parametrize(
    ("seen", "gpus", "shedding", "expected"),
    [
        (box(50.0), [card(86.0)], False, True),
        (box(50.0), [card(80.0)], False, False),
        (box(50.0), [card(80.0)], True, True),
        (box(50.0), [card(74.0)], True, False),
        (box(50.0), [card(74.0), card(80.0)], True, True),
        (box(7.0), [], False, True),
        (box(10.0), [], False, False),
        (box(10.0), [], True, True),
        (box(13.0), [], True, False),
        (box(7.0), [SHARED], False, True),
        (box(13.0), [SHARED], True, False),
        (UNKNOWN, [card(86.0)], False, True),
        (UNKNOWN, [card(74.0)], True, False),
        (UNKNOWN, [], True, True),
        (UNKNOWN, [SHARED], False, False),
    ],
)
def test_new_sequences_wait(seen: Headroom, gpus: list[GpuMemory], shedding: bool, expected: bool) -> None:
    assert must_shed(seen, gpus, shedding, SETTINGS) is expected


@given(st.lists(st.floats(0.0, 100.0), max_size=60), st.booleans())
def test_the_latch_moves_only_where_memory_crossed_the_whole_band(percents: list[float], shedding: bool) -> None:
    states = [shedding]
    for percent in percents:
        states.append(must_shed(box(50.0), [card(percent)], states[-1], SETTINGS))
    for percent, (before, after) in zip(percents, pairwise(states), strict=True):
        used = card(percent).used_percent
        assert used is not None
        if after != before:
            assert (used > SETTINGS.gpu_memory_percent) if after else (used < SETTINGS.gpu_recovered_percent)
    swings = sum(a != b for a, b in pairwise(states))
    crossings = [p for p in percents if p > SETTINGS.gpu_memory_percent or p < SETTINGS.gpu_recovered_percent]
    assert swings <= len(crossings)
