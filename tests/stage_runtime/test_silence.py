"""The deadline on silence: its bounds, what raises it and for how long, and whose stall counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.link.silence import LATENESS_FACTOR, MEMORY_SECONDS, MOMENTS, Silence, ping_due

LEAST, MOST, PING = 0.8, 3.0, 0.2
gaps = st.lists(st.floats(0.001, 5.0), max_size=60)


def speak(silence: Silence, gaps_: list[float], now: float = 0.0) -> float:
    """Let the peer speak after each of the gaps, while the listener runs all the time; the time then."""
    for gap in gaps_:
        end = now + gap
        while end - now > PING:
            now += PING
            silence.ran(now)
        now = end
        silence.heard(now)
    return now


def fresh() -> Silence:
    return Silence(LEAST, MOST, PING, 0.0)


@given(gaps)
def test_the_deadline_has_bounds_and_follows_the_worst_lateness_of_a_minute(some: list[float]) -> None:
    silence = fresh()
    now = speak(silence, some)
    moments, at = [], 0.0
    for gap in some:
        at += gap
        moments.append((at, max(0.0, gap - PING)))
    worst = max((late for at, late in moments if now - at <= MEMORY_SECONDS), default=0.0)
    assert silence.deadline_seconds(now) == pytest.approx(min(LEAST + LATENESS_FACTOR * worst, MOST), abs=1e-6)
    assert LEAST <= silence.deadline_seconds(now) <= MOST


@given(st.floats(0.01, 2.0))
def test_a_late_ping_raises_the_deadline_for_a_minute_and_then_fades(lateness: float) -> None:
    silence = fresh()
    now = speak(silence, [PING, PING + lateness])
    raised = silence.deadline_seconds(now)
    assert raised > LEAST
    now = speak(silence, [PING] * int(MEMORY_SECONDS / PING - 2), now)
    assert silence.deadline_seconds(now) == raised
    now = speak(silence, [PING] * 4, now)
    assert silence.deadline_seconds(now) == LEAST


@given(st.floats(1.0, 1e6), gaps)
def test_a_stall_of_the_listener_is_no_silence_of_the_peer(stall: float, some: list[float]) -> None:
    silence = fresh()
    now = speak(silence, [gap for gap in some if gap < PING])
    before = silence.deadline_seconds(now)
    now += stall  # nobody ran: a stopped process, a machine that swaps
    assert silence.left_seconds(now) > 0
    silence.ran(now)
    assert silence.left_seconds(now) > 0
    assert silence.silent_seconds(now) <= PING + 1e-6
    silence.heard(now)
    assert silence.deadline_seconds(now) == pytest.approx(before)


@given(st.floats(0.0, 10.0))
def test_who_is_silent_beyond_the_deadline_is_dead(quiet: float) -> None:
    silence, now = fresh(), 0.0
    while now < quiet:
        now += PING / 2
        silence.ran(now)
    rounding_seconds = 1e-9  # of summed steps
    assert (silence.left_seconds(now) <= rounding_seconds) == (now >= LEAST - rounding_seconds)


def test_a_least_deadline_above_the_most_gives_way() -> None:
    assert Silence(5.0, 3.0, PING, 0.0).deadline_seconds(0.0) == 3.0


@given(st.floats(0.0, 1e7))
def test_a_ping_is_never_late_and_hardly_early(last_sent: float) -> None:
    rounding_seconds = 1e-6
    early = last_sent + PING - ping_due(last_sent, PING)
    assert -rounding_seconds <= early <= PING / MOMENTS + rounding_seconds


@given(st.lists(st.floats(0.0, PING), min_size=1, max_size=60))
def test_the_pings_of_many_links_share_a_few_moments(sent: list[float]) -> None:
    assert len({ping_due(each, PING) for each in sent}) <= MOMENTS + 1
