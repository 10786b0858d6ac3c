"""The one JSON form of specs and box costs: what goes in comes out, anything else is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.bundle.model_info import read_model_json
from fleet.inventory.loader import load_site
from fleet.planning.cost import MIB
from fleet.planning.site import box_costs, spec_of
from fleet.planning.spec import PipelineSpec, box_from_json, box_to_json, spec_from_json, spec_to_json
from tests.models import smollm2_directory
from tests.planning.cases import spec_of_boxes
from tests.planning.test_split import box, model

INVENTORY = Path(__file__).parents[2] / "inventory" / "lab.yaml"
SMALL = spec_of_boxes(["box1", "box2"], model(4))


def decoded(spec: PipelineSpec) -> Any:
    return json.loads(json.dumps(spec_to_json(spec)))


def test_the_lab_survives_json() -> None:
    site = load_site(INVENTORY).site
    spec = spec_of(site, "main", read_model_json(smollm2_directory()))
    assert spec.boxes == ("box1", "box2", "box3") and len(spec.cost.layers) == 30
    assert spec_from_json("main", decoded(spec)) == spec
    for name, cost in box_costs(site, "main").items():
        assert box_from_json(name, {"host": "10.0.0.1", **json.loads(json.dumps(box_to_json(cost)))}) == cost


def test_explicit_ranges_and_unknown_memory_survive_json() -> None:
    spec = replace(SMALL, explicit={"box1": (0, 1), "box2": (1, 4)})
    assert spec_from_json("main", decoded(spec)) == spec
    assert box_from_json("box1", box_to_json(box("box1"))) == box("box1")
    assert box_from_json("box1", box_to_json(box("box1", memory_mib=2))).memory_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["model"], "", "pipelines.main.model: read ''"),
        (["max_sequences"], 0, "pipelines.main.max_sequences: read 0, expected an integer from 1"),
        (["max_sequences"], True, "pipelines.main.max_sequences: read True"),
        (["boxes"], [], r"pipelines.main.boxes: read \[\]"),
        (["boxes"], ["box1", "box1"], "a name comes twice"),
        (["boxes"], [1], "expected names in ring order"),
        (["surplus"], 1, r"unknown or missing keys \['surplus'\]"),
        (["explicit"], {"box1": [0, 4]}, r"explicit: unknown or missing keys \['box2'\]"),
        (["explicit"], {"box1": [0, 2], "box2": [3, 4]}, r"explicit.box2: read \[3, 4\], expected \[2, end\]"),
        (["explicit"], {"box1": [0, 2], "box2": [2, 3]}, "ranges end at 3, the model has 4 layers"),
        (["explicit"], {"box1": [0, 2], "box2": "2-4"}, "explicit.box2: read '2-4'"),
        (["cost"], None, "pipelines.main.cost: read None, expected a mapping"),
        (["cost", "layers"], [], "cost.layers: read"),
        (["cost", "layers"], [{"held": 1, "read": 1}], r"cost.layers\[0\]: unknown or missing keys \['converting'\]"),
        (["cost", "head", "held"], -1, "cost.head.held: read -1"),
        (["cost", "head", "held"], 1.5, "cost.head.held: read 1.5"),
        (["cost", "tied"], 1, "cost.tied: read 1, expected true or false"),
        (["cost", "hidden_size"], 10**400, "cost.hidden_size: read 1000"),
    ],
)
def test_a_wrong_spec_is_refused_by_name(path: list[str], value: Any, message: str) -> None:
    data = decoded(SMALL)
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ValueError, match=message) as refusal:
        spec_from_json("main", data)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("key", "value"),
    [("bytes_per_second", 0), ("bytes_per_second", float("nan")), ("memory_bytes", 0), ("keep_free_bytes", -1)],
)
def test_a_wrong_box_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"boxes.box1.{key}: read"):
        box_from_json("box1", {**box_to_json(box("box1")), key: value})


def test_what_is_no_box_is_refused() -> None:
    with pytest.raises(ValueError, match=r"boxes\.box1: read 3, expected a mapping"):
        box_from_json("box1", 3)
    with pytest.raises(ValueError, match="expected a mapping with bytes_per_second"):
        box_from_json("box1", {"memory_bytes": None})


def test_planning_for_the_coordinator_needs_only_the_standard_library() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "import fleet.planning.heal, fleet.planning.spec, fleet.planning.forecast; "
        "print({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - {'__main__', 'fleet'}, "
        "'fleet.planning.site' in sys.modules)"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(INVENTORY.parents[1])]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set() False\n"
