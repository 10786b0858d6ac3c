"""The main job on real boxes over SSH: bundle → provision → the right tokens → no drift → faults of power."""

from __future__ import annotations

import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from fleet.inventory.sitefile import SiteFile
from tests.lab.lab import Lab, LabBox
from tests.lab.tree import Entry, changed_paths, rewritten_paths
from tests.site.commands import client_of, fleet
from tests.site.conftest import ALL_BOXES
from tests.site.watch import Watch

pytestmark = pytest.mark.lab

BACK_IN_SERVICE_DEADLINE_SECONDS = 90.0
PINGS_SECONDS = 2.0  # idle links ping every half second
RING_PORT = 7401
STATE = "/opt/fleet/state"
"""Logs of epochs, and the gateway's journal: written by the programs whenever they like."""


def trees(lab: Lab, names: Sequence[str] = ALL_BOXES) -> dict[str, dict[str, Entry]]:
    """All of the boxes but what programs keep for themselves; a good gigabyte each, so the two cores share the work."""

    def tree(name: str) -> dict[str, Entry]:
        return lab.box(name).tree_digest(leave_out={STATE})

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(tree, names), strict=True))


def boxes_of(report: Any) -> dict[str, dict[str, Any]]:
    return {row["box"]: row for row in report["boxes"]}


def assert_untouched(before: dict[str, dict[str, Entry]], after: dict[str, dict[str, Entry]]) -> None:
    """Nothing was added, removed, changed or written again on any box."""
    for name, tree in before.items():
        assert changed_paths(tree, after[name]) == {}, name
        assert rewritten_paths(tree, after[name]) == set(), name


def wait_until_serving(watch: Watch) -> None:
    """Return when every box serves its layers again, and `fleet status` says so."""
    watch.wait_whole(BACK_IN_SERVICE_DEADLINE_SECONDS)
    assert fleet("status", "-i", watch.site_file.file, expect=None).code == 0, watch.report()


def test_first_provisioning_ends_with_a_site_that_answers(provisioned: Lab, lab_inventory: Path) -> None:
    status = fleet("status", "-i", lab_inventory, "-o", "json").data
    layers = {row["box"]: row["layers"] for row in status["stages"]}
    assert sorted(span for spans in layers.values() for span in [tuple(spans)]) == sorted(
        tuple(span) for span in layers.values()
    )
    assert layers["box1"][0] == 0 and layers["box3"][1] == 30
    assert layers["box1"][1] == layers["box2"][0] and layers["box2"][1] == layers["box3"][0]
    answer = fleet("ask", "-i", lab_inventory, "--max-tokens", "24", "What is the capital of France?")
    assert "Paris" in answer.stdout


def test_second_run_changes_nothing_with_one_connection_and_one_command_a_box(
    provisioned: Lab, lab_inventory: Path
) -> None:
    cursors = {name: provisioned.box(name).journal_cursor() for name in ALL_BOXES}
    before = trees(provisioned)
    report = fleet("provision", lab_inventory, "-o", "json").data
    after = trees(provisioned)
    for name in ALL_BOXES:
        counts = provisioned.box(name).sshd_counts(cursors[name])
        assert (counts.connections, len(counts.accepted), counts.sessions) == (1, 1, ("command",)), name
        assert (boxes_of(report)[name]["result"], boxes_of(report)[name]["changes"]) == ("ok", [])
    assert_untouched(before, after)


def test_summary_of_a_second_run_says_0_changed(provisioned: Lab, lab_inventory: Path) -> None:
    assert "0 changed" in fleet("provision", lab_inventory).stdout


@pytest.mark.parametrize(
    ("pattern", "watched"),
    [
        pytest.param("current/lib/stage_runtime/__main__.py", ALL_BOXES, id="our-code"),
        pytest.param("current/etc/stage.json", ["box2"], id="configuration"),
        pytest.param("models/*/layer-007.safetensors", ["box2"], id="weights"),
        pytest.param("envs/*/lib/python3.11/site-packages/aiohttp/web.py", ["box2"], id="third-party-wheel"),
    ],
)
def test_a_byte_changed_by_hand_is_found_and_mended_alone(
    watch: Watch, lab_inventory: Path, lab_site: SiteFile, pattern: str, watched: Sequence[str]
) -> None:
    provisioned = watch.lab
    box = provisioned.box("box2")
    # of several releases that lie there, the one that runs
    found = box.exec(["sh", "-c", f"readlink -f {lab_site.prefix_of('box2')}/{pattern}"]).stdout.split()
    assert len(found) == 1
    original = trees(provisioned, watched)
    flip_last_byte(box, found[0])
    damaged = trees(provisioned, watched)
    assert set(changed_paths(original["box2"], damaged["box2"])) == {found[0]}

    listed = fleet("provision", lab_inventory, "--check", "-o", "json").data
    assert len(boxes_of(listed)["box2"]["changes"]) == 1
    mended = fleet("provision", lab_inventory, "-o", "json").data
    assert {name: row["result"] for name, row in boxes_of(mended).items()} == {
        **dict.fromkeys(ALL_BOXES, "ok"),
        "box2": "changed",
    }
    after = trees(provisioned, watched)
    for name in watched:
        assert changed_paths(original[name], after[name]) == {}
        touched = rewritten_paths(damaged[name], after[name])
        files = {path for path in touched if not is_directory(after[name][path])}
        assert files == ({found[0]} if name == "box2" else set()), name
    wait_until_serving(watch)


def is_directory(entry: Entry) -> bool:
    return stat.S_ISDIR(entry.mode)


def flip_last_byte(box: LabBox, path: str) -> None:
    """Change one byte in place, as a tired hand or a tired SD card does."""
    script = f"f = open({path!r}, 'r+b'); f.seek(-1, 2); byte = f.read(1)[0]; f.seek(-1, 2); f.write(bytes([byte ^ 1]))"
    box.exec(["python3", "-I", "-c", script])


def test_check_and_diff_change_nothing_on_any_box(provisioned: Lab, lab_inventory: Path, tmp_path: Path) -> None:
    text = lab_inventory.read_text(encoding="utf-8").replace("max_sequences: 8", "")
    changed = lab_inventory.with_name("lab-changed.yaml")
    changed.write_text(text.replace("    policy: exact", "    policy: exact\n    max_sequences: 3"), encoding="utf-8")
    try:
        before = trees(provisioned)
        shown = fleet("provision", changed, "--check", "--diff")
        assert_untouched(before, trees(provisioned))
        assert "+" in shown.stdout and "max_sequences" in shown.stdout
        assert fleet("provision", changed, "--check", "--fail-on-changes", expect=None).code == 1
    finally:
        changed.unlink()


def test_power_cut_box_comes_back_serving_by_itself(provisioned: Lab, watch: Watch, lab_inventory: Path) -> None:
    box = provisioned.box("box2")
    with box.capture() as seen:
        time.sleep(PINGS_SECONDS)
        box.power_cut()
        time.sleep(PINGS_SECONDS)
        seen.stop()
        ring = [packet for packet in seen.tcp() if RING_PORT in (packet.source_port, packet.destination_port)]
    sent = [packet for packet in ring if packet.source == box.address]
    assert sent, "its links were alive"
    assert not [packet for packet in sent if packet.closes], "it went without a word"
    assert fleet("status", "-i", lab_inventory, expect=None).code == 3
    box.on()
    wait_until_serving(watch)
    answer = fleet("ask", "-i", lab_inventory, "--max-tokens", "24", "What is the capital of France?")
    assert "Paris" in answer.stdout
    assert fleet("provision", lab_inventory, "-o", "json").data["boxes"][1]["changes"] == []


def test_one_box_off_leaves_the_others_done(provisioned: Lab, watch: Watch, lab_inventory: Path) -> None:
    box = provisioned.box("box3")
    box.off()
    try:
        answer = fleet("provision", lab_inventory, "-o", "json", expect=3)
        results = {name: row["result"] for name, row in boxes_of(answer.data).items()}
        assert results == {**dict.fromkeys(ALL_BOXES, "ok"), "box3": "unreachable"}
        table = fleet("provision", lab_inventory, expect=3)
        assert "1 unreachable" in table.stdout
        assert "box3" in table.stderr.splitlines()[-2] + table.stderr.splitlines()[-1]
    finally:
        box.on()
        wait_until_serving(watch)


def test_openai_client_talks_to_the_site(provisioned: Lab, lab_site: SiteFile) -> None:
    with client_of(lab_site) as client:
        model = client.models.list().data[0].id
        question = [ChatCompletionUserMessageParam(role="user", content="What is the capital of France?")]
        whole = client.chat.completions.create(model=model, messages=question, max_tokens=24, temperature=0)
        assert "Paris" in (whole.choices[0].message.content or "")
        stream = client.chat.completions.create(
            model=model, messages=question, max_tokens=24, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content and len(pieces) > 3
        completion = client.completions.create(
            model=model, prompt="The capital of France is", max_tokens=4, temperature=0
        )
        assert "Paris" in completion.choices[0].text
