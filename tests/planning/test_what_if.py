"""`fleet plan --without`: the loss of boxes before it happens, with a real model's sizes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from fleet.bundle.manifest import BundledModel, FileEntry, LockedWheel, Manifest, TargetWheels, make_lock
from fleet.bundle.model_info import read_model_json
from fleet.cli.main import main
from tests.models import smollm2_directory

LAB = Path(__file__).parents[2] / "inventory" / "lab.yaml"


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's inventory with boxes of 1500 MiB, and a bundle that has the real model and no wheels worth the name."""
    directory = tmp_path_factory.mktemp("plan")
    text = LAB.read_text().replace("../build/bundle", "bundle").replace("../build/state", "state")
    sized = text.replace("    architecture: x86_64\n", "    architecture: x86_64\n    memory_mib: 1500\n")
    assert sized != text
    file = directory / "lab.yaml"
    file.write_text(sized)
    model = read_model_json(smollm2_directory())
    root = directory / "bundle" / "lab"
    (root / "models").mkdir(parents=True)
    (root / "models" / model.digest[:16]).symlink_to(model.directory)
    (root / "wheel.whl").write_bytes(b"wheel")
    digest = hashlib.sha256(b"wheel").hexdigest()
    lock = make_lock([LockedWheel("wheel", "1.0", "wheel.whl", digest)])
    Manifest(
        directory=root,
        site="lab",
        fleet_version="0.1.0",
        files={"wheel.whl": FileEntry(digest, 5)},
        fleet_wheel="wheel.whl",
        targets={"linux_x86_64-cp311": TargetWheels("wheel.whl", {"stage": lock, "control": lock})},
        models={"smollm2-135m": BundledModel(model.digest, f"models/{model.digest[:16]}", "apache-2.0")},
    ).write()
    return file


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_plan_names_what_the_site_can_not_lose(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = shown(capsys, inventory)
    assert code == 0
    assert "box1\t0-3 (4)\tembedding, head" in out and "869" in out  # 1500 × 0.75 − 256
    assert "pipeline main: it survives the loss of any single box." in out
    small = inventory.with_name("small.yaml")
    small.write_text(inventory.read_text().replace("memory_mib: 1500", "memory_mib: 1450"))
    code, out, _ = shown(capsys, small)
    assert code == 0 and "pipeline main: it does not survive the loss of any one of box1, box2, box3." in out


def test_without_a_box_shows_the_merged_plan_and_tokens_before_and_after(
    inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = shown(capsys, inventory, "--without", "box2")
    assert (code, err) == (0, "")
    after = out.split("\n\n")[1]
    assert [line.split("\t")[:2] for line in after.splitlines()[1:3]] == [["box1", "0-13 (14)"], ["box3", "14-29 (16)"]]
    assert "pipeline main without box2: 13 of 30 layers move. Predicted tokens/s: 22 before, 22 after" in after


def test_without_boxes_that_nobody_can_stand_in_for_is_refused(
    inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = shown(capsys, inventory, "--without", "box1,box3")
    assert code == 1
    assert "box2" in out
    assert err.startswith("fleet: pipeline main does not fit on 1 of 3 boxes: box2 lacks ")
    assert "MiB\n  next: add a box, free memory, or lower max_sequences" in err


def test_the_same_for_scripts(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = shown(capsys, inventory, "--without", "box2", "-o", "json")
    data = json.loads(out)["data"]["main"]
    assert code == 0
    assert data["without"]["lost"] == ["box2"] and data["without"]["moved_layers"] == 13
    assert [stage["layers"] for stage in data["without"]["stages"]] == [[0, 14], [14, 30]]
    assert data["without"]["tokens_per_second_full"] < data["tokens_per_second_full"]
    code, out, err = shown(capsys, inventory, "--without", "box1", "--without", "box3", "-o", "json")
    refused = json.loads(out)["data"]["main"]["without"]
    assert code == 1 and refused["refused"] in err
    assert list(refused["missing_bytes"]) == ["box2"] and refused["missing_bytes"]["box2"] > 0
    code, out, _ = shown(capsys, inventory, "-o", "json")
    assert code == 0 and json.loads(out)["data"]["main"]["without"] is None


def test_every_box_lost_is_refused_in_words(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = shown(capsys, inventory, "--without", "box1,box2,box3")
    assert code == 1 and "pipeline main: none of its 3 boxes is there" in err


@pytest.mark.parametrize(
    ("name", "near"), [("bx2", 'did you mean "box2"?'), ("control", "valid here: box1, box2, box3")]
)
def test_a_box_that_no_pipeline_has_is_named_with_the_nearest(
    name: str, near: str, inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = shown(capsys, inventory, "--without", f"box1,{name}")
    assert (code, out) == (2, "")
    assert f"--without {name}: no pipeline has such a box; {near}" in err


def test_raw_is_the_plan_of_the_whole_site(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = shown(capsys, inventory, "--raw")
    assert code == 0 and json.loads(out)["epoch"] == 1
    code, _, err = shown(capsys, inventory, "--raw", "--without", "box1")
    assert code == 2 and "leave out --without" in err
