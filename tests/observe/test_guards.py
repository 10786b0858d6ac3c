"""`fleet guard status`: against a real `python -m guards`, and against documents that no guard would send."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.cli.main import main
from fleet.errors import ExitCode
from fleet.observe.guards import (
    EVENTS_SHOWN,
    MOST_ROWS,
    MOST_TEXT_CHARACTERS,
    BoxGuards,
    budget_rows,
    event_rows,
    exit_code,
    guard_rows,
    problems,
    setting_rows,
)
from fleet.observe.health import Answer
from guards.settings import GuardSettings
from tests.gateway.site import free_port
from tests.observe.conftest import Site

WAIT_SECONDS = 60.0
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
)
FINDINGS = st.lists(
    st.dictionaries(st.sampled_from(["part", "state", "reason", "evidence", "repair"]), JSON, max_size=5) | JSON,
    max_size=5,
)
STANDINGS = st.fixed_dictionaries({"state": JSON, "findings": FINDINGS}) | JSON
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "guards": st.dictionaries(st.text(max_size=12), STANDINGS, max_size=4) | JSON,
        "budgets_left": JSON,
        "events": st.lists(st.dictionaries(st.sampled_from(["guard", "kind", "times", "text"]), JSON)) | JSON,
        "settings": st.dictionaries(st.text(max_size=12), JSON, max_size=4) | JSON,
        "trouble": JSON,
        "observe": JSON,
    },
)


@given(document=DOCUMENTS)
def test_any_document_makes_printable_rows(document: dict[str, Any]) -> None:
    found = [BoxGuards("box1", Answer(document))]
    rows = [
        *guard_rows(found, every_part=True),
        *guard_rows(found, every_part=False),
        *budget_rows(found),
        *event_rows(found),
        *setting_rows(found),
        problems(found),
    ]
    cells = [cell for row in rows for cell in row]
    assert all(isinstance(cell, str) and cell.isprintable() for cell in cells)
    assert all(len(cell) <= MOST_TEXT_CHARACTERS + len("box1: ") for cell in cells)
    assert exit_code(found) in (ExitCode.OK, ExitCode.FAILED)


def test_what_a_terminal_would_obey_is_shown_instead() -> None:
    finding = {"part": "soc\x1b[2J", "state": "degraded", "reason": "x\n\u202ey" + "z" * 10_000}
    document = {"guards": {"thermal": {"state": "degraded", "findings": [finding]}}}
    ((*_, part, state, seen),) = guard_rows([BoxGuards("b", Answer(document))], every_part=False)
    assert (part, state) == ("soc\\x1b[2J", "degraded")
    assert seen.startswith("x\\n\\u202eyzzz")
    assert (len(seen), seen[-1]) == (MOST_TEXT_CHARACTERS, "…")


def test_a_box_that_says_much_does_not_fill_the_screen() -> None:
    findings = [{"part": str(number), "state": "unhealthy"} for number in range(10_000)]
    events = [{"guard": "clock", "kind": "state", "times": 1, "text": str(number)} for number in range(1000)]
    document = {"guards": {"clock": {"state": "unhealthy", "findings": findings}}, "events": events}
    found = [BoxGuards("b", Answer(document))]
    assert len(guard_rows(found, every_part=False)) == MOST_ROWS
    assert [row[-1] for row in event_rows(found)] == [str(number) for number in range(1000)][-EVENTS_SHOWN:]


def answer(*states: str) -> Answer:
    return Answer({"guards": {str(number): {"state": state} for number, state in enumerate(states)}})


OFF = Answer(None, unreachable=True, error="no answer")
STRANGE = Answer(None, error="HTTP 403")


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([answer("healthy", "unsupported"), answer("degraded", "initialising")], ExitCode.OK),
        ([answer("healthy", "unhealthy")], ExitCode.FAILED),
        ([answer("healthy"), OFF], ExitCode.UNREACHABLE),
        ([answer("unhealthy"), OFF], ExitCode.FAILED),
        ([STRANGE, OFF], ExitCode.FAILED),
        ([answer("excellent")], ExitCode.FAILED),
        ([Answer({})], ExitCode.FAILED),
    ],
)
def test_exit_codes(answers: list[Answer], code: ExitCode) -> None:
    found = [BoxGuards(f"box{number}", one) for number, one in enumerate(answers)]
    assert exit_code(found) is code
    told = {line.split(":")[0] for line in problems(found)}
    assert told == {each.box for each in found if not each.guards}


def test_boxes_with_the_same_settings_share_their_rows() -> None:
    hot = {"thermal": {"high_celsius": 80.0}}
    same = [BoxGuards(box, Answer({"settings": hot})) for box in ("a", "b")]
    assert setting_rows([*same, BoxGuards("c", OFF)]) == [("all", "thermal", "high_celsius", "80")]
    other = BoxGuards("c", Answer({"settings": {"thermal": {"high_celsius": 75.5}}}))
    assert [row[0] for row in setting_rows([*same, other])] == ["a", "b", "c"]


@pytest.fixture
def guarded(site: Site) -> Iterator[Site]:
    """The guards of `control` as a process; nobody answers for `box1`."""
    port, state, file = free_port(), site.directory / "guards", site.directory / "guards.json"
    state.mkdir()
    config = {
        "schema": 1,
        "site": "demo",
        "box": "control",
        "listen": {"host": "127.0.0.1", "port": port},
        "tls": {"ca": str(site.pki.ca), "certificate": str(site.pki.certificate), "key": str(site.pki.key)},
        "clock_synchronised_file": None,
        "state_directory": str(state),
        "supervisor_socket": f"{state}/nobody.sock",
        "programs": [],
        "stage": None,
        "coordinator": None,
        "log_directory": str(state),
        "directories": [str(state)],
        "time_servers": [],
        "build_unix_seconds": 1_700_000_000,
        "link_mbit_per_second": 0.0,
        "mac": None,
        "stop_seconds": 5.0,
        "ready_seconds": 5.0,
        "observe": True,
        "settings": dataclasses.asdict(GuardSettings()),
    }
    file.write_text(json.dumps(config))
    site.write_endpoints()
    path = site.directory / ".fleet" / "demo" / "endpoints.json"
    entry = {"host": "127.0.0.1", "server_name": "control.demo.fleet.internal"}
    guards = {"box1": entry | {"port": free_port()}, "control": entry | {"port": port}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"guards": guards}))
    with subprocess.Popen([sys.executable, "-m", "guards", "--config", str(file)]) as process:
        try:
            yield site
        finally:
            process.terminate()


def ask(site: Site, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["guard", "status", str(site.inventory), *options])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_real_process_and_a_box_that_is_off(guarded: Site, capsys: pytest.CaptureFixture[str]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while True:
        code, out, _ = ask(guarded, capsys, "-o", "json")
        boxes = json.loads(out)["data"]["boxes"]
        if all(guard["rounds"] for guard in boxes["control"].get("guards", {"": {"rounds": 0}}).values()):
            break
        assert time.monotonic() < end, boxes
        time.sleep(0.2)
    assert set(boxes["control"]["guards"]) == {"thermal", "memory", "clock", "liveness", "surroundings"}
    assert "Connection refused" in boxes["box1"]["error"]
    states = {guard["state"] for guard in boxes["control"]["guards"].values()}
    assert code == (ExitCode.FAILED if "unhealthy" in states else ExitCode.UNREACHABLE)

    code, out, err = ask(guarded, capsys, "--settings")
    lines = [line.split("\t") for line in out.splitlines()]
    assert ["box1", "-", "-", "unknown"] in [line[:4] for line in lines]
    assert ["control", "liveness", "supervisord"] in [line[:3] for line in lines]  # none runs there
    assert ["all", "thermal", "high_celsius", "80"] in lines
    assert any(line[:2] == ["control", "clock-correction"] for line in lines)
    assert "control: its guards only observe" in err
    assert "next: fleet guard status --all" in err

    code, out, err = ask(guarded, capsys, "--box", "box1")
    assert (code, "control" in out) == (ExitCode.UNREACHABLE, False)
    assert "box1: 127.0.0.1:" in err
    code, _, err = ask(guarded, capsys, "--box", "contrl")
    assert code == ExitCode.USAGE
    assert 'did you mean "control"?' in err


def test_a_site_of_a_version_without_guards(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.write_endpoints()
    code, _, err = ask(site, capsys)
    assert code == 1
    assert "provisioned by a version without guards" in err
    assert f"next: fleet provision {site.inventory}" in err


@pytest.mark.parametrize("arguments", [("guard",), ("guard", "status")])
def test_help_has_three_examples(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--help"]) == 0
    examples = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("fleet ")]
    assert len(examples) == 3
    assert Path(examples[0].split()[-1]).suffix == ".yaml"
