"""How often something may happen, and what is left of a text that others wrote."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet.coordinator.allowance import Allowance
from fleet.coordinator.text import line


@given(st.lists(st.floats(0, 10), max_size=200))
def test_never_more_than_the_stock_and_what_refills_it(gaps: list[float]) -> None:
    allowance, now, taken = Allowance.full(5, 0.5, 100.0), 100.0, 0
    for gap in gaps:
        now += gap
        taken += allowance.take(now)
        assert taken <= 5 + (now - 100.0) * 0.5 + 1e-6


@given(st.floats(2.0, 100.0))
def test_who_keeps_to_the_pace_is_never_refused(gap: float) -> None:
    allowance = Allowance.full(1, 0.5, 0.0)
    assert all(allowance.take(number * gap + 1e-6 * number) for number in range(1, 50))


@given(st.text(), st.integers(0, 50))
def test_a_line_is_short_and_printable_and_honest_text_stays(text: str, most: int) -> None:
    made = line(text, most)
    assert len(made) == min(len(text), most)
    assert made.isprintable()
    assert all(one == other for one, other in zip(made, text, strict=False) if other.isprintable())
