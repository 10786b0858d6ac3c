"""Rounds survive an interruption, and the figures made of them are medians and quartiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.measure import Rounds, Spread, table


@pytest.fixture
def revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean working tree, and results elsewhere."""
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "source_revision", lambda: "0123456789ab")


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(5, 3.0, 2.0, 4.0)
    assert str(Spread.of([40.0, 10.0, 30.0, 20.0, 50.0])) == "30.0 [20.0-40.0]"
    assert str(Spread.of([1234.5])) == "1234"


@pytest.mark.usefixtures("revision")
def test_finished_rounds_are_taken_up_and_half_written_ones_are_not() -> None:
    rounds = Rounds("some", {"tokens": 4})
    rounds.add({"ring": 6.0, "peer": 2.0}, 0.1)
    rounds.add({"ring": 5.0, "peer": 5.0}, 0.1)
    with rounds.path.open("a") as file:
        file.write('{"load_average": 0.1, "val')
    again = Rounds("some", {"tokens": 4})
    assert again.finished == [{"ring": 6.0, "peer": 2.0}, {"ring": 5.0, "peer": 5.0}]
    again.add({"ring": 8.0}, 0.1)
    again = Rounds("some", {"tokens": 4})
    assert again.spread("ring") == Spread(3, 6.0, 5.5, 7.0)
    assert again.ratio("ring", "peer") == Spread(2, 2.0, 1.5, 2.5), "within a round; a round without the peer has none"
    assert again.spread("other") is None
    assert Rounds("some", {"tokens": 5}).finished == [], "other settings"
    assert Rounds("some", {"tokens": 4}, fresh=True).finished == []


@pytest.mark.usefixtures("revision")
def test_rounds_of_a_changed_working_tree_are_not_taken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "source_revision", lambda: None)
    Rounds("some", {}).add({"ring": 1.0}, 0.1)
    assert Rounds("some", {}).finished == []


def test_a_table_aligns_its_columns() -> None:
    assert table(["", "a"], [["row", "1"], ["r", "234"]]).splitlines() == ["       a", "row    1", "r    234"]
