"""Plans of whole sites: the shipped inventories with the real model's sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet.bundle.model_info import ModelInfo, read_model_json
from fleet.errors import FleetError
from fleet.inventory.loader import load_site
from fleet.inventory.model import Site
from fleet.planning.explain import stage_row, summary
from fleet.planning.site import forecast, plan_site
from tests.models import smollm2_directory

INVENTORIES = Path(__file__).parents[2] / "inventory"


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    return read_model_json(smollm2_directory())


@pytest.fixture
def site() -> Site:
    return load_site(INVENTORIES / "lab.yaml").site


def changed(site: Site, **pipeline: object) -> Site:
    main = site.pipelines["main"].model_copy(update=pipeline)
    return site.model_copy(update={"pipelines": {"main": main}})


def test_plan_of_the_lab_is_complete_and_survives_json(site: Site, info: ModelInfo) -> None:
    plan = plan_site(site, {"smollm2-135m": info})
    stages = plan.pipelines["main"].stages
    assert [stage.box for stage in stages] == ["box1", "box2", "box3"]
    assert (stages[0].start, stages[-1].end) == (0, 30)
    assert [(stage.embedding, stage.head) for stage in stages] == [(True, True), (False, False), (False, False)]
    printed = json.loads(plan.to_json())
    assert printed["schema"] == 1
    assert [stage["box"] for stage in printed["pipelines"]["main"]["stages"]] == ["box1", "box2", "box3"]


def test_explicit_ranges_are_taken_as_they_are(site: Site, info: ModelInfo) -> None:
    explicit = changed(site, layers={"box1": "0-9", "box2": "10-19", "box3": "20-29"})
    stages = plan_site(explicit, {"smollm2-135m": info}).pipelines["main"].stages
    assert [(stage.start, stage.end) for stage in stages] == [(0, 10), (10, 20), (20, 30)]


def test_explicit_ranges_of_another_model_are_refused(site: Site, info: ModelInfo) -> None:
    explicit = changed(site, layers={"box1": "0-9", "box2": "10-19", "box3": "20-27"})
    with pytest.raises(FleetError, match="end at 27, model smollm2-135m has layers 0-29"):
        plan_site(explicit, {"smollm2-135m": info})


def test_context_longer_than_the_model_knows_is_refused(site: Site, info: ModelInfo) -> None:
    with pytest.raises(FleetError, match="max_tokens_per_sequence 100000, model smollm2-135m knows 8192"):
        plan_site(changed(site, max_tokens_per_sequence=100000), {"smollm2-135m": info})


def test_plan_that_does_not_fit_names_what_each_box_lacks(site: Site, info: ModelInfo) -> None:
    profiles = {name: profile.model_copy(update={"memory_mib": 1024}) for name, profile in site.device_profiles.items()}
    small = changed(site.model_copy(update={"device_profiles": profiles}), max_sequences=64)
    with pytest.raises(FleetError, match=r"pipeline main does not fit: box\d lacks \d+ MiB") as refusal:
        plan_site(small, {"smollm2-135m": info})
    assert refusal.value.exit_code == 1


def test_explanation_names_bottleneck_and_unknown_memory(site: Site, info: ModelInfo) -> None:
    predicted = forecast(site, "main", info)
    plan = plan_site(site, {"smollm2-135m": info}).pipelines["main"]
    rows = [stage_row(plan, stage) for stage in predicted.stages]
    assert rows[0][2] == "embedding, head" and rows[0][5] == "unknown"
    assert f"{predicted.bottleneck} is the bottleneck" in summary("main", plan, predicted)
    assert predicted.tokens_per_second_full > predicted.tokens_per_second_single


def test_policy_that_the_stages_do_not_know_is_refused_in_the_office(site: Site, info: ModelInfo) -> None:
    with pytest.raises(FleetError, match="policy int4 is not in this version"):
        plan_site(changed(site, policy="int4"), {"smollm2-135m": info})
