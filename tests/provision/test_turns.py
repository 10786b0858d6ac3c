"""Whose programs may restart: one box after the other while the site serves, by a real HTTPS coordinator's word."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ExitCode
from fleet.planning.spec import PipelineSpec
from fleet.provision.diff import Change
from fleet.provision.rollout_gate import HealthTarget, moving
from fleet.provision.turns import Turns, place_of, restarts, serves, why_together
from fleet.ssh.pool import Cancellation
from fleet.ssh.results import BoxError, BoxUnreachable
from stage_runtime.link.control import PROTOCOL
from tests.planning.cases import spec_of_boxes
from tests.planning.test_split import model
from tests.provision.https import https_server

BOXES = ("box1", "box2", "box3")
RESTART = (Change("program", "stage", "fingerprint"),)
SPEC = spec_of_boxes(BOXES, model(6))
STAGES = [{"box": box, "layers": [0, 1]} for box in BOXES]


def site(**pipeline: Any) -> dict[str, Any]:
    """`/v1/site` of a whole site that serves what the run wants too."""
    main = {"state": "serving", "switching": None, "model_digest": SPEC.model_digest, "policy": SPEC.policy, **pipeline}
    boxes = {box: {"state": "serving"} for box in BOXES}
    return {"schema": 1, "protocol": PROTOCOL, "pipelines": {"main": main}, "boxes": boxes}


class Coordinator(http.server.BaseHTTPRequestHandler):
    """Says what `document` says."""

    document: dict[str, Any]

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v1/site" else 404)
        self.end_headers()
        self.wfile.write(json.dumps(self.document).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def document() -> dict[str, Any]:
    """What the coordinator says; a test changes it in place."""
    return site()


@pytest.fixture
def coordinator(tmp_path: Path, document: dict[str, Any]) -> Iterator[HealthTarget]:
    with https_server(tmp_path, type("Handler", (Coordinator,), {"document": document})) as server:
        yield server


class Run:
    """Boxes that restart side by side, each in its thread, as in a run; `log` has what happened in order."""

    def __init__(self, target: HealthTarget | None, *, at_once: bool = False, seconds: float = 30.0) -> None:
        self.log: list[str] = []
        self.lines: list[str] = []
        self.errors: dict[str, BoxError] = {}
        self.cancellation = Cancellation()
        self.turns = Turns(
            target,
            {"main": SPEC},
            at_once=at_once,
            seconds=seconds,
            cancellation=self.cancellation,
            report=self.lines.append,
        )

    def box(
        self, name: str, restart: Callable[[], None] = lambda: None, changes: tuple[Change, ...] = RESTART
    ) -> threading.Thread:
        """One box that has everything and now restarts."""

        def work() -> None:
            try:
                with self.turns.of(name, changes) as turn:
                    turn.begin()
                    self.log.append(f"{name} restarts")
                    restart()
                self.log.append(f"{name} is back")
            except BoxError as error:
                self.errors[name] = error

        thread = threading.Thread(target=work)
        thread.start()
        return thread


def end(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_boxes_of_a_serving_site_restart_one_after_the_other(coordinator: HealthTarget) -> None:
    run = Run(coordinator)
    end(*[run.box(name) for name in BOXES])
    assert [line.split()[1:] for line in run.log] == [["restarts"], ["is", "back"]] * len(BOXES)
    assert all(first.split()[0] == second.split()[0] for first, second in zip(run.log[::2], run.log[1::2], strict=True))
    assert sum("one after the other" in line for line in run.lines) == 1
    assert run.errors == {}


def test_the_next_one_waits_until_the_coordinator_has_the_last_one_back(
    coordinator: HealthTarget, document: dict[str, Any]
) -> None:
    run = Run(coordinator)
    first = run.box("box1", lambda: document["boxes"].update(box1={"state": "returning"}))
    while "box1 restarts" not in run.log:
        first.join(0.01)
    second = run.box("box2")
    while not any("box1 restarts first" in line for line in run.lines):
        second.join(0.01)
    assert run.log == ["box1 restarts"]
    document["boxes"]["box1"] = {"state": "serving"}
    document["boxes"]["box3"] = {"state": "dead"}  # of another box's trouble a turn knows nothing
    end(first, second)
    assert run.log == ["box1 restarts", "box1 is back", "box2 restarts", "box2 is back"]


@pytest.mark.parametrize("changes", [{"state": "none"}, {"policy": "fast"}])
def test_all_restart_at_once_where_turns_help_nobody(
    coordinator: HealthTarget, document: dict[str, Any], changes: dict[str, str]
) -> None:
    document["pipelines"]["main"].update(changes)
    meet(Run(coordinator))


def test_all_restart_at_once_where_the_operator_says_so(coordinator: HealthTarget) -> None:
    meet(Run(coordinator, at_once=True))


def test_all_restart_at_once_without_a_coordinator_that_answers(coordinator: HealthTarget) -> None:
    meet(Run(None))
    meet(Run(replace(coordinator, port=1)))


def meet(run: Run) -> None:
    """All are between restart and end at the same time."""
    together = threading.Barrier(len(BOXES), timeout=60)
    end(*[run.box(name, lambda: together.wait() and None) for name in BOXES])
    assert len(run.log) == 2 * len(BOXES)
    assert run.errors == {}


def test_a_box_without_restarts_waits_for_nobody(coordinator: HealthTarget) -> None:
    run = Run(coordinator)
    with run.turns.of("box1", RESTART) as turn:
        turn.begin()
        end(run.box("box2", changes=(Change("file", "/etc/fleet", "content"),)))
    assert run.log == ["box2 restarts", "box2 is back"]


def test_after_a_failure_the_others_keep_what_they_run(coordinator: HealthTarget) -> None:
    run = Run(coordinator)

    def fail() -> None:
        raise BoxError("box1", "health gate", "stage ended 3 times", exit_code=ExitCode.ROLLED_BACK)

    end(run.box("box1", fail))
    end(run.box("box2"))
    assert run.log == ["box1 restarts"]
    assert run.errors["box1"].exit_code is ExitCode.ROLLED_BACK
    assert "box2: turn: keeps the release that it runs, because box1 failed" in run.errors["box2"].message
    assert "--limit '!box1'" in str(run.errors["box2"].hint)


def test_a_box_that_does_not_come_back_ends_the_turns(coordinator: HealthTarget, document: dict[str, Any]) -> None:
    run = Run(coordinator, seconds=0.5)
    end(run.box("box1", lambda: document["boxes"].update(box1={"state": "dead"})))
    end(run.box("box2"))
    assert "not back in the plan after 0 s: box1 is" in run.errors["box1"].message
    assert "box1 is not back in the plan" in run.errors["box2"].message


@pytest.mark.parametrize("state", ["held-down", "standby"])
def test_a_box_that_served_must_serve_again(coordinator: HealthTarget, document: dict[str, Any], state: str) -> None:
    run = Run(coordinator, seconds=0.5)
    document["boxes"]["box2"] = {"state": state}
    end(run.box("box2"))  # it has no layers to lose, and is as it was
    end(run.box("box1", lambda: document["boxes"].update(box1={"state": state})))
    assert f"box1 is {state}" in run.errors["box1"].message
    assert run.log == ["box2 restarts", "box2 is back", "box1 restarts"]


def test_a_box_that_is_lost_while_it_waits_ends_nobodys_turn(coordinator: HealthTarget) -> None:
    run = Run(coordinator)

    def lose() -> None:
        raise BoxUnreachable("box1", "turn", "the box was silent for 60 s")

    end(run.box("box1", lose))
    end(run.box("box2"))
    assert isinstance(run.errors["box1"], BoxUnreachable)
    assert run.log == ["box1 restarts", "box2 restarts", "box2 is back"]


def test_a_restarted_coordinator_must_hear_the_others_again() -> None:
    document = site()
    document["boxes"] = {"box1": {"state": "serving", "heartbeat": {}}, "box2": {"state": "dead", "heartbeat": None}}
    expected = place_of("control", document)
    assert (expected.places, list(expected.heard)) == ({}, ["box1"])
    assert moving(json.dumps(document), expected) is None
    document["boxes"]["box1"]["heartbeat"] = None
    assert moving(json.dumps(document), expected) == "box1 is not heard"


def test_an_interrupted_run_ends_waiting_boxes(coordinator: HealthTarget, document: dict[str, Any]) -> None:
    run = Run(coordinator)
    first = run.box("box1", lambda: document["boxes"].update(box1={"state": "returning"}))
    while "box1 restarts" not in run.log:
        first.join(0.01)
    second = run.box("box2")
    run.cancellation.cancel()
    end(first, second)
    assert {error.exit_code for error in run.errors.values()} == {ExitCode.INTERRUPTED}
    assert run.log == ["box1 restarts"]


@pytest.mark.parametrize(
    ("kind", "path", "why", "needed"),
    [
        ("program", "stage", "fingerprint", True),
        ("program", "coordinator", "certificate", True),
        ("supervisor", "fleet-supervisord.service", "fingerprint, not enabled", True),
        ("program", "stage", "missing", False),
        ("program", "stage", "stopped", False),
        ("supervisor", "fleet-supervisord.service", "not enabled", True),
        ("supervisor", "fleet-supervisord.service", "stopped, not enabled", False),
        ("link", "/opt/fleet/current", "target", True),  # a program that is not wanted any more ends with it
        ("link", "/opt/fleet/current", "missing", False),
    ],
)
def test_what_needs_a_turn(kind: Any, path: str, why: str, needed: bool) -> None:
    assert restarts((Change("file", "/x", "content"), Change(kind, path, why))) is needed


@pytest.mark.parametrize(
    ("document", "serving", "reason"),
    [
        (site(), True, ""),
        (site(state="refused"), False, ""),
        (site(state="replanning"), True, ""),
        (site(stages=STAGES, unsurvivable=["box1"]), True, ""),
        (site(stages=STAGES, unsurvivable=list(BOXES)), True, "pipeline main can spare no box"),
        (site(model_digest="other"), True, "pipeline main gets another model or numeric policy"),
        ({**site(), "protocol": None}, True, f"the releases speak different protocols (None and {PROTOCOL})"),
        ({"protocol": PROTOCOL, "pipelines": 7}, False, ""),
        ({"protocol": PROTOCOL, "pipelines": {"main": []}}, False, ""),
        ({"protocol": PROTOCOL, "pipelines": {"gone": {"state": "serving"}}}, True, ""),
    ],
)
def test_what_the_coordinator_says(document: dict[str, Any], serving: bool, reason: str) -> None:
    wanted: dict[str, PipelineSpec] = {"main": SPEC}
    assert serves(document) is serving
    assert why_together(document, wanted) == reason
