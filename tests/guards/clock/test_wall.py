from __future__ import annotations

import ctypes
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.clock.kernel import TIMEX_BYTES, kernel_synchronised
from guards.clock.wall import WallReading, read_wall, step_seconds


def test_the_clocks_of_this_machine() -> None:
    before, reading, after = time.time(), read_wall(), time.time()
    assert before <= reading.unix_seconds <= after
    assert 0 <= reading.uncertainty_seconds < 1
    assert 0 <= time.clock_gettime(time.CLOCK_BOOTTIME) - reading.boot_seconds < 60


def test_the_pair_read_in_the_shortest_time_is_taken() -> None:
    boots = iter([10.0, 10.5, 11.0, 11.001, 12.0, 12.3])
    reading = read_wall(wall=lambda: 7.0, boot=lambda: next(boots))
    assert reading.boot_seconds == pytest.approx(11.0005) and reading.uncertainty_seconds == pytest.approx(0.0005)


@given(elapsed=st.floats(0, 1e5), step=st.floats(-2e9, 2e9), unsure=st.floats(0, 0.1))
def test_a_step_is_seen_if_it_is_more_than_the_readings_leave_open(elapsed: float, step: float, unsure: float) -> None:
    before = WallReading(1.7e9, 500.0, unsure)
    now = WallReading(1.7e9 + elapsed + step, 500.0 + elapsed, unsure)
    seen = step_seconds(before, now, 0.001)
    assert seen == 0.0 or seen == pytest.approx(step, abs=1e-5)
    if abs(step) > 0.001 + 2 * unsure + 1e-5:
        assert seen != 0.0
    if abs(step) < 0.001 + 2 * unsure - 1e-5:
        assert seen == 0.0


def test_another_boot_is_no_step() -> None:
    assert step_seconds(WallReading(1.7e9, 5000.0, 0.0), WallReading(0.0, 12.0, 0.0), 0.001) == 0.0


def test_sleep_is_no_step() -> None:
    """CLOCK_BOOTTIME goes on while the machine sleeps, as the wall clock does."""
    assert step_seconds(WallReading(1.7e9, 100.0, 0.0), WallReading(1.7e9 + 9e4, 9e4 + 100.0, 0.0), 0.001) == 0.0


@pytest.mark.skipif(struct.calcsize("l") != 8, reason="the layout below is that of 64-bit machines")
def test_the_kernel_is_asked_and_nothing_is_changed() -> None:
    def timex() -> bytes | None:
        buffer = ctypes.create_string_buffer(TIMEX_BYTES)
        return None if ctypes.CDLL(None).adjtimex(buffer) < 0 else buffer.raw

    before = timex()
    said = kernel_synchronised()
    after = timex()
    if before is None or after is None:
        assert said is None
        return
    # struct timex: modes, offset, freq, maxerror, esterror, status (STA_UNSYNC 0x40, STA_CLOCKERR 0x1000)
    assert before[16:24] == after[16:24]  # freq
    assert said is not bool(struct.unpack_from("i", after, 40)[0] & 0x1040)
