"""The ladder of limits."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.thermal.levels import FULL_DUTY_PERCENT, Level, ladder


@given(st.integers(1, 512), st.floats(1, 100), st.floats(1, 99))
def test_from_the_full_limits_to_the_least_and_down_all_the_way(most: int, least_duty: float, step: float) -> None:
    rungs = ladder(most, least_duty, step)
    assert rungs[0] == Level(most, FULL_DUTY_PERCENT)
    assert rungs[-1] == Level(1, least_duty)
    for upper, lower in pairwise(rungs):
        assert lower != upper
        assert lower.sequences <= upper.sequences
        assert lower.duty_percent <= upper.duty_percent
        assert (lower.sequences == upper.sequences) != (lower.duty_percent == upper.duty_percent)


@pytest.mark.parametrize(
    ("most", "least_duty", "step"), [(0, 25, 90), (4, 0, 90), (4, 101, 90), (4, 25, 100), (4, 25, 0)]
)
def test_a_ladder_without_an_end_is_refused(most: int, least_duty: float, step: float) -> None:
    with pytest.raises(ValueError, match="no ladder"):
        ladder(most, least_duty, step)


def test_small_steps_end_too() -> None:
    # 4.9 % less 1 % is 4.9 % again when rounded to tenths
    assert ladder(1, 1.0, 99.0)[-1] == Level(1, 1.0)
    assert len(ladder(1, 1.0, 99.0)) <= 1 + (100 - 1) * 10


def test_the_first_step_lowers_the_batch_limit_if_it_can() -> None:
    assert ladder(4, 25.0, 90.0)[:3] == (Level(4, 100.0), Level(3, 100.0), Level(3, 90.0))
    assert ladder(1, 25.0, 50.0) == (Level(1, 100.0), Level(1, 50.0), Level(1, 25.0))
