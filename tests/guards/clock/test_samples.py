from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.clock.samples import KEPT, Sample, best_sample, drift, jitter_seconds, kept


def sample(at: float, offset: float, uncertainty: float = 0.0005, server: str = "a") -> Sample:
    return Sample(server, at, offset, uncertainty)


def test_samples_are_kept_for_one_server_and_one_boot() -> None:
    samples: tuple[Sample, ...] = ()
    for at in range(50):
        samples = kept(samples, sample(at * 16.0, 0.0))
    assert len(samples) == KEPT and samples[0].boot_seconds == 18 * 16.0
    assert kept(samples, sample(800.0, 0.0, server="b")) == (sample(800.0, 0.0, server="b"),)
    assert kept(samples, sample(16.0, 0.0)) == (sample(16.0, 0.0),)  # booted since


def test_the_surest_sample_is_believed_while_the_newest_does_not_contradict_it() -> None:
    sure, unsure = sample(0.0, 0.0001, 0.0002), sample(16.0, 0.003, 0.004)
    assert best_sample([sure, unsure]) == sure
    stepped = sample(32.0, 5.0, 0.004)
    assert best_sample([sure, unsure, stepped]) == stepped


def test_no_sample() -> None:
    with pytest.raises(ValueError, match="no samples"):
        best_sample([])


@given(
    ppm=st.floats(-400, 400),
    start=st.floats(-10, 10),
    noise=st.lists(st.floats(-1, 1), min_size=10, max_size=32),
    uncertainty=st.floats(1e-6, 0.01),
)
def test_the_drift_is_wrong_by_no_more_than_the_samples_are(
    ppm: float, start: float, noise: list[float], uncertainty: float
) -> None:
    """Whatever the errors within each sample's uncertainty: the median lies among the slopes, and no slope is wrong by
    more than neighbours at their worst make it."""
    samples = [
        sample(at * 16.0, start + ppm * 1e-6 * at * 16.0 + error * uncertainty, uncertainty)
        for at, error in enumerate(noise)
    ]
    found = drift(samples)
    assert found is not None
    span = samples[-1].boot_seconds
    assert found.resolution_ppm == pytest.approx(2 * uncertainty / span * 1e6)
    worst_neighbours = 2 * uncertainty / 16.0 * 1e6
    assert abs(found.ppm - ppm) <= worst_neighbours + 1e-6


@given(ppm=st.floats(-400, 400), late=st.lists(st.integers(0, 31), max_size=6, unique=True))
def test_a_few_late_answers_do_not_bend_the_drift(ppm: float, late: list[int]) -> None:
    samples = [
        sample(at * 16.0, ppm * 1e-6 * at * 16.0 + (0.05 if at in late else 0.0), 0.05 if at in late else 1e-6)
        for at in range(KEPT)
    ]
    found = drift(samples)
    assert found is not None and found.ppm == pytest.approx(ppm, abs=1.0)


def test_too_few_or_too_close_together_say_no_drift() -> None:
    assert drift([sample(at * 16.0, 0.0) for at in range(4)]) is None
    assert drift([sample(at * 1.0, 0.0) for at in range(20)]) is None
    assert drift([]) is None


def test_jitter() -> None:
    assert jitter_seconds([sample(0.0, 1.0)]) is None
    same = [sample(at * 16.0, 0.002) for at in range(5)]
    assert jitter_seconds(same) == 0.0
    assert jitter_seconds([*same, sample(80.0, 0.003)]) == pytest.approx(0.001)  # about the newest, surest one
