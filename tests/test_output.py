"""Tables and paths for people, and the ways to name an inventory."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from fleet.cli import main as entry
from fleet.cli.output import print_table, short_path
from fleet.observe.health import Answer, SiteAnswers
from fleet.observe.site_view import MEMBER_COLUMNS, PLAN_COLUMNS
from fleet.observe.status import PIPELINE_COLUMNS, STAGE_COLUMNS, site_status
from tests.observe.test_status import AWAY, COORDINATOR, PIPELINE, READY, stage


class Terminal(io.StringIO):
    """Takes text as a terminal would."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *tables: tuple[str, Sequence[str], list[tuple[str, ...]]]) -> str:
    """What tables look like on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    with contextlib.redirect_stdout(Terminal()) as output:
        for table in tables:
            print_table(*table)
    return re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())


def test_the_status_of_a_site_fits_80_columns_and_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {"jetson-1": stage(), "pi-1": AWAY, "pi-2": stage(layers=[18, 30])}
    away = site_status(SiteAnswers(stages, READY, COORDINATOR))
    gateway = {"state": "ready", "pipelines": {"main": {**PIPELINE, "model": "smollm2-135m"}}}
    served = site_status(SiteAnswers({"box1": stage()}, Answer(gateway), COORDINATOR))
    text = on_a_terminal(
        monkeypatch,
        ("stages", STAGE_COLUMNS, [row.cells() for row in away.stages]),
        ("pipelines", PIPELINE_COLUMNS, [row.cells() for row in served.pipelines]),
        ("plans", PLAN_COLUMNS, [row.cells() for row in served.coordinator.plans]),
        ("members", MEMBER_COLUMNS, [row.cells() for row in served.coordinator.members]),
    )
    assert max(map(len, text.splitlines())) <= 80
    for word in ("unreachable", "embedding", "weights", "packed", "18-29", "smollm2-135m", "2.5e-05"):
        assert word in text


def test_a_column_that_says_nothing_is_not_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_a_terminal(monkeypatch, ("", ("box", "what failed"), [("box1", ""), ("[b]2[/b]", "")]))
    assert "what" not in text
    assert "[b]2[/b]" in text


def test_scripts_get_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("", ("box", "what failed"), [("box1", "")])
    assert capsys.readouterr().out == "box\twhat failed\nbox1\t\n"


def test_paths_below_the_present_directory_are_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "build" / "bundle") == "build/bundle"
    assert short_path(Path("/opt/fleet")) == "/opt/fleet"


@pytest.mark.parametrize("verb", ["plan", "bundle", "provision", "status", "down"])
@pytest.mark.parametrize("named", [["{}"], ["-i", "{}"], ["{}", "-i", "{}"]])
def test_an_inventory_is_named_in_either_way(
    verb: str, named: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "absent.yaml"
    assert entry.main([verb, *(part.format(file) for part in named)]) == 78
    assert f"{file}: no such file" in capsys.readouterr().err


def test_two_inventories_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["plan", "a.yaml", "-i", "b.yaml"]) == 2
    assert "two inventories: a.yaml and b.yaml" in capsys.readouterr().err
