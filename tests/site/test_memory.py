"""A stage reads only its own tensors and holds them once, measured on a lab box from a cold page cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.bundle.manifest import load_manifest
from fleet.bundle.model_info import ModelInfo, read_model_json
from fleet.inventory.sitefile import SiteFile
from fleet.planning.plan import StagePlan
from tests.figures import note
from tests.lab.lab import LabBox
from tests.site.watch import Watch

pytestmark = pytest.mark.lab

SCRIPT = Path(__file__).with_name("measure_stage.py")
READ_TOLERANCE = 0.05
MEASURED_LAYERS = 2
PROCESS_BYTES = 220 << 20
"""Interpreter, torch, TLS and HTTP in a stage without layers; `import torch` is nearly all of it."""
MEASURE_DEADLINE_SECONDS = 180.0


@pytest.fixture(scope="module")
def info(lab_site: SiteFile) -> ModelInfo:
    return read_model_json(load_manifest(lab_site.bundle_directory).model_directory("smollm2-135m"))


def stage_of(watch: Watch, name: str) -> StagePlan:
    """What a box holds under the plan that serves."""
    stage = next(stage for stage in watch.pipeline()["stages"] if stage["box"] == name)
    return StagePlan(name, stage["layers"][0], stage["layers"][1], stage["embedding"], stage["head"])


def own_files(info: ModelInfo, stage: StagePlan) -> dict[str, int]:
    """Shards that a stage needs, with their sizes."""
    kinds = {"embedding": stage.embedding or stage.head, "final": stage.head}
    return {
        file.name: file.size_bytes
        for file in info.files
        if kinds.get(file.kind, False) or (file.layer is not None and stage.start <= file.layer < stage.end)
    }


def measure(box: LabBox, prefix: str, wanted: str) -> dict[str, Any]:
    """Start a stage with a cold cache for everything but its programs, which another process has just read."""
    config = f"{prefix}/current/etc/stage.json"
    program = box.exec(["grep", "-o", "/opt/fleet/envs/[^ ]*/bin/python", f"{prefix}/current/etc/supervisord.conf"])
    python = program.stdout.split()[0]
    environment = str(Path(python).parents[1])
    box.exec(["mkdir", "-p", "/tmp/measure"])
    box.drop_page_cache()
    warm = f"find {environment}/ {prefix}/current/lib/ /usr/lib/python3* -type f -exec cat {{}} + > /dev/null"
    box.exec(["sh", "-c", warm], deadline_seconds=MEASURE_DEADLINE_SECONDS)
    variables = ["env", f"PYTHONPATH={prefix}/current/lib", "PYTHONDONTWRITEBYTECODE=1"]
    argv = [*variables, python, "-c", SCRIPT.read_text(encoding="utf-8"), config, "/tmp/measure", wanted]
    return dict(json.loads(box.exec(argv, deadline_seconds=MEASURE_DEADLINE_SECONDS).stdout))


@pytest.mark.parametrize("name", ["box1", "box2"])
def test_stage_reads_only_its_own_tensors_and_holds_them_once(
    watch: Watch, lab_site: SiteFile, info: ModelInfo, name: str
) -> None:
    watch.wait_whole()
    box, prefix = watch.lab.box(name), lab_site.prefix_of(name)
    stage = stage_of(watch, name)
    shards = own_files(info, stage)
    empty = measure(box, prefix, "empty")
    own = measure(box, prefix, "own")
    # a stage that knows no plan has read two layers too, to measure itself
    tried = own_files(info, StagePlan(name, 0, MEASURED_LAYERS, embedding=False, head=False))
    read, expected = own["read_bytes"] - empty["read_bytes"], sum(shards.values()) - sum(tried.values())
    note(f"{name}: read {read} of {expected} bytes beside {sorted(tried)}; empty {empty}, own {own}")
    assert abs(read - expected) <= READ_TOLERANCE * sum(shards.values())
    assert set(own["mapped_shards"]) <= set(shards)
    assert own["pss_bytes"] <= own["weight_bytes"] + PROCESS_BYTES
    assert (empty["weight_bytes"], empty["mapped_shards"]) == (0, [])
    assert empty["pss_bytes"] <= PROCESS_BYTES
