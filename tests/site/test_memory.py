"""A stage reads only its own tensors and holds them once, measured on a lab box from a cold page cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.bundle.manifest import load_manifest
from fleet.bundle.model_info import ModelInfo, read_model_json
from fleet.inventory.sitefile import SiteFile
from fleet.planning.plan import PipelinePlan, Plan, StagePlan
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


def plan_of(watch: Watch, config: dict[str, Any], info: ModelInfo) -> PipelinePlan:
    """The plan that serves, as the coordinator hands it to stages."""
    site = watch.site_file.site.pipelines[watch.name]
    stages = tuple(
        StagePlan(stage["box"], stage["layers"][0], stage["layers"][1], stage["embedding"], stage["head"])
        for stage in watch.pipeline()["stages"]
    )
    return PipelinePlan(
        model=site.model,
        model_digest=info.digest,
        layers=info.config.num_hidden_layers,
        policy=config["policy"],
        max_sequences=site.max_sequences,
        max_tokens_per_sequence=site.max_tokens_per_sequence,
        stages=stages,
    )


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
    config = json.loads(box.exec(["cat", f"{prefix}/current/etc/stage.json"]).stdout)
    plan = plan_of(watch, config, info)
    stage = plan.stage_of(name)
    assert stage is not None
    shards = own_files(info, stage)
    empty = measure(box, prefix, "empty")
    own = measure(box, prefix, Plan(0, {watch.name: plan}).to_json())
    # before it is told what to hold, a stage measures itself on its first layers, and on the head where it has it
    end = min(stage.end, stage.start + MEASURED_LAYERS)
    tried = own_files(info, replace(stage, end=end, embedding=False))
    read, expected = own["read_bytes"] - empty["read_bytes"], sum(shards.values()) - sum(tried.values())
    note(f"{name}: read {read} of {expected} bytes beside {sorted(tried)}; empty {empty}, own {own}")
    assert abs(read - expected) <= READ_TOLERANCE * sum(shards.values())
    assert set(own["mapped_shards"]) <= set(shards)
    assert own["pss_bytes"] <= own["weight_bytes"] + PROCESS_BYTES
    assert (empty["weight_bytes"], empty["mapped_shards"]) == (0, [])
    assert empty["pss_bytes"] <= PROCESS_BYTES
