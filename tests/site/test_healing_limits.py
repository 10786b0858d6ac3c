"""What self-healing refuses: a merge that does not fit into memory, and a second box with the same key."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import openai
import pytest

from tests.figures import note
from tests.lab.lab import LabBox
from tests.lab.processes import wait_until
from tests.site import faults
from tests.site.askers import MODEL
from tests.site.commands import client_of
from tests.site.conftest import STAGE_BOXES
from tests.site.healing import Healing
from tests.site.watch import kinds

pytestmark = pytest.mark.lab

LIMIT_BYTES = 1300 << 20
"""Three such boxes hold the model's 30 layers with the caches of 8 × 2048 tokens (11 + 13 + 13), two do not: a layer
takes 7 MiB of weights and 25 MiB of caches, a process 280 MiB, the head 57 MiB, of three quarters less 256 MiB."""
RECONNECT_DEADLINE_SECONDS = 60.0
NEW_ADDRESS = "10.77.0.62"
CLONE = "/var/tmp/clone"
CLONE_PORTS = (17401, 17403)
CLONE_END_SECONDS = 20.0


@contextmanager
def limited_memory(heal: Healing, limit_bytes: int) -> Iterator[None]:
    """Stages that were started with so much memory a box; afterwards they have all of the machine's again."""
    for limit in (limit_bytes, None):
        before = heal.watch.last_event_id()
        for name in STAGE_BOXES:
            heal.box(name).memory_limit(limit)
        for name in STAGE_BOXES:
            faults.kill(heal.box(name))
        heal.watch.wait_for_event("plan-committed", before)
        heal.watch.wait_whole()
        if limit is not None:
            yield


def ask(heal: Healing) -> str:
    """One short answer.

    Raises:
        openai.APIStatusError: the site refused.
    """
    with client_of(heal.site) as client:
        answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0)
    return answer.choices[0].text


def test_a_merge_that_does_not_fit_is_refused_and_heals_when_the_box_returns(heal: Healing) -> None:
    kills = {name: heal.box(name).out_of_memory_kills for name in STAGE_BOXES}
    with limited_memory(heal, LIMIT_BYTES):
        before = heal.watch.last_event_id()
        assert "box2" in heal.watch.pipeline()["unsurvivable"]
        faults.cut_link(heal.box("box2"))
        refused = heal.watch.wait_for_event("plan-refused", before)
        pipeline = heal.watch.pipeline()
        note(f"without box2: {refused['text']}; missing {pipeline['missing_mebibytes']}")
        assert pipeline["state"] == "refused"
        assert set(pipeline["missing_mebibytes"]) <= {"box1", "box3"}
        assert sum(float(mebibytes) for mebibytes in pipeline["missing_mebibytes"].values()) > 0
        with pytest.raises(openai.InternalServerError) as error:
            ask(heal)
        assert error.value.status_code == 503
        assert int(error.value.response.headers["Retry-After"]) > 0
        assert "MiB" in str(error.value)
        heal.box("box2").link_heal()
        heal.watch.wait_whole()
        assert "Paris" in ask(heal)
        heal.assert_equal(heal.stream(), "after a refused merge")
        assert {name: heal.box(name).out_of_memory_kills for name in STAGE_BOXES} == kills


def start_clone(original: LabBox, host: LabBox) -> subprocess.Popen[bytes]:
    """A second stage with the key, certificate and name of `original`, on another box."""
    for name in ("box.key", "box.crt", "ca.crt"):
        host.write_file(f"{CLONE}/{name}", original.inside(f"/opt/fleet/pki/{name}").read_bytes(), mode=0o600)
    # the configuration lies behind an absolute link, which only resolves inside
    config = json.loads(original.exec(["cat", "/opt/fleet/current/etc/stage.json"]).stdout)
    config["ring"]["port"], config["metrics"]["port"] = CLONE_PORTS
    config["tls"] = {"key": f"{CLONE}/box.key", "certificate": f"{CLONE}/box.crt", "ca": f"{CLONE}/ca.crt"}
    config["admin_socket"], config["state_directory"] = f"{CLONE}/stage.sock", f"{CLONE}/state"
    host.write_file(f"{CLONE}/stage.json", json.dumps(config))
    host.exec(["mkdir", "-p", f"{CLONE}/state"])
    python = host.exec(["sh", "-c", "ls -d /opt/fleet/envs/*/bin/python | head -n 1"]).stdout.strip()
    environment = ["env", "PYTHONPATH=/opt/fleet/current/lib", "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1"]
    argv = [*environment, python, "-m", "stage_runtime", "--config", f"{CLONE}/stage.json"]
    with (host.paths.directory / "clone.log").open("wb") as log:
        return subprocess.Popen(host.exec_argv(argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def test_the_same_key_from_two_live_boxes_is_refused_and_both_are_named(heal: Healing) -> None:
    before = heal.watch.last_event_id()
    clone = start_clone(heal.box("box2"), heal.box("box3"))
    try:
        refused = heal.watch.wait_for_event("box-clone-refused", before, box="box2")
        run = heal.stream()
    finally:
        faults.end_with_argument(heal.box("box3"), f"{CLONE}/stage.json")
        clone.wait(CLONE_END_SECONDS)
    note(f"clone: {refused['text']}")
    assert all(heal.box(name).address in refused["text"] for name in ("box2", "box3"))
    heal.assert_equal(run, "while a clone of box2 asks to be let in")
    events = heal.watch.events(before)
    assert not {"box-dead", "box-hung", "box-joined", "box-moved"} & set(kinds(events)), heal.watch.report()
    # the stages have restarted in the test before: with their newer measurements, a better split is no fault
    plans = [event["text"] for event in events if event["kind"] == "plan-preparing"]
    assert all(", planned, a better split" in text for text in plans), heal.watch.report()


def test_a_known_box_at_a_new_address_is_taken_back(heal: Healing) -> None:
    box = heal.box("box2")
    old = box.address

    def move(source: str, target: str) -> float:
        moment = time.monotonic()
        box.exec(["ip", "address", "add", f"{target}/24", "dev", "eth0"])
        box.exec(["ip", "address", "del", f"{source}/24", "dev", "eth0"])
        # a secondary address goes with its primary one, so it is added again
        box.exec(["ip", "address", "replace", f"{target}/24", "dev", "eth0"])
        return moment

    try:
        for source, target in ((old, NEW_ADDRESS), (NEW_ADDRESS, old)):
            before = heal.watch.last_event_id()
            run = heal.stream(fault=partial(move, source, target), until=heal.watch.is_whole)
            heal.assert_equal(run, f"box2 moves to {target}")
            moved = heal.watch.wait_for_event("box-moved", before, box="box2")
            note(f"moved: {moved['text']}")
            assert heal.watch.site()["boxes"]["box2"]["address"].split(":")[0] == target
    finally:
        box.exec(["ip", "address", "replace", f"{old}/24", "dev", "eth0"])
        box.exec(["ip", "address", "del", f"{NEW_ADDRESS}/24", "dev", "eth0"], check=False)
    wait_until(lambda: heal.watch.holds(heal.watch.is_whole), "box2 is at home again", RECONNECT_DEADLINE_SECONDS)
