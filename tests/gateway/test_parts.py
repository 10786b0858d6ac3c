"""Configuration, keys, places: the parts of the gateway that need no network."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ExitCode, FleetError
from fleet.gateway.admission import AdmissionQueue, QueueFullError, Ticket
from fleet.gateway.auth import ApiKeys, load_api_keys
from fleet.gateway.backend import Backend, admit, health
from fleet.gateway.config import load_config, parse_config
from fleet.gateway.errors import ApiError
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.vocabulary import Vocabulary
from stage_runtime.link.messages import PipelineStatus
from tests.gateway.site import Pki, ScriptedPipeline, config_data, heal, route

KEYS = ApiKeys({"a": hashlib.sha256(b"alpha").hexdigest(), "b": hashlib.sha256(b"beta").hexdigest()})


def test_keys_name_their_client() -> None:
    assert KEYS.client("Bearer alpha") == "a"
    assert KEYS.client("bearer  beta ") == "b"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic alpha", "Bearer gamma", "Bearer " + "x" * 600]
)
def test_anything_else_is_401(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        KEYS.client(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"schema":2,"keys":[]}', '{"schema":1,"keys":[{"name":"a","sha256":"plain-key"}]}']
)
def test_a_damaged_key_file_is_named_and_shows_no_key(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(FleetError, match=r"keys\.json") as caught:
        load_api_keys(file)
    assert "plain-key" not in caught.value.message


def test_the_configuration_is_read(tmp_path: Path, pki: Pki) -> None:
    file = tmp_path / "gateway.json"
    file.write_text(json.dumps(config_data(tmp_path, pki)))
    config = load_config(file)
    assert (config.site, config.listen.host, config.coordinator.box) == ("demo", "127.0.0.1", "control")
    assert (config.replan_wait_seconds, config.resume_max_streams) == (20.0, 4)
    assert config.pipelines[0].max_sequences == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 9}, "schema: read 9, this version knows 2"),
        ({"loopback": {"host": "192.0.2.1", "port": 1}}, "127.0.0.1 or ::1 only"),
        ({"listen": {"host": "x"}}, "'listen.port' is missing"),
        ({"pipelines": {"p": {}}}, "is missing"),
        ({"timing": {}}, "key 'timing.ring_connect_seconds' is missing"),
        ({"coordinator": {"box": "control", "host": "h"}}, "'coordinator.port' is missing"),
        ({"resume_max_streams": -1}, "resume_max_streams: read -1"),
        ({"timing": {"ring_ping_seconds": "soon"}}, "timing.ring_ping_seconds: read 'soon', expected seconds"),
        ({"tls": None}, "tls: read None, expected a mapping"),
    ],
)
def test_a_wrong_configuration_names_file_and_field(
    tmp_path: Path, pki: Pki, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "gateway.json"
    file.write_text(json.dumps(config_data(tmp_path, pki, **change)))
    with pytest.raises(FleetError, match=message) as caught:
        load_config(file)
    assert str(file) in caught.value.message
    assert caught.value.exit_code == ExitCode.INVALID_INVENTORY


@pytest.mark.parametrize("raw", ["", "[]", "nonsense", "null"])
def test_no_object_is_no_configuration(tmp_path: Path, raw: str) -> None:
    file = tmp_path / "gateway.json"
    file.write_text(raw)
    with pytest.raises(FleetError, match=r"gateway\.json"):
        load_config(file)


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=40),
)
def test_places_are_never_oversold_and_served_in_order(
    places: int, max_waiting: int, steps: list[tuple[bool, int]]
) -> None:
    """Enter and release in any order: the counts stay within their bounds, and nobody overtakes."""
    queue = AdmissionQueue(places, max_waiting)
    tickets: list[Ticket] = []
    for enter, number in steps:
        if enter:
            room = places - queue.active + max_waiting - queue.waiting
            try:
                tickets += queue.enter(number)
            except QueueFullError:
                assert number > room
            else:
                assert number <= room
        elif tickets:
            ticket = tickets.pop(number % len(tickets))
            ticket.release()
            ticket.release()
        granted = [ticket.granted.is_set() for ticket in tickets]
        assert granted == sorted(granted, reverse=True)
        assert queue.active == sum(granted) <= places
        assert queue.waiting == len(granted) - sum(granted) <= max_waiting
        assert queue.active == places or queue.waiting == 0


def backend(pki: Pki, directory: Path, name: str, *, ready: bool, context: int = 100) -> Backend:
    """A pipeline with a route, whose first stage is ready or not."""
    pipeline = {**config_data(directory, pki)["pipelines"]["main"], "max_tokens_per_sequence": context}
    config = parse_config(config_data(directory, pki, pipelines={name: {**pipeline, "max_sequences": 2}}))
    status = PipelineStatus(ready=ready, reason="" if ready else f"{name} down")
    healing = heal(config, {name: ScriptedPipeline(lambda _: [], status=status)}, GatewayMetrics([name]))[name]
    healing.apply(route(pipeline=name))
    return Backend(config.pipelines[0], healing, Vocabulary(directory / "model"), AdmissionQueue(2, 1))


async def test_the_least_busy_ready_pipeline_that_fits_is_taken(pki: Pki, directory: Path) -> None:
    backends = [
        backend(pki, directory, "a", ready=True),
        backend(pki, directory, "b", ready=True),
        backend(pki, directory, "c", ready=False),
        backend(pki, directory, "d", ready=True, context=10),
    ]
    taken = [admit(backends, 10, 1).backend.config.name for _ in range(4)]
    assert sorted(taken) == ["a", "a", "b", "b"]
    assert admit(backends, 9, 1).backend.config.name == "d"
    admit(backends, 10, 1)
    admit(backends, 10, 1)
    with pytest.raises(ApiError, match="2 answers are being computed") as caught:
        admit(backends, 10, 2)
    assert caught.value.status == 429
    with pytest.raises(ApiError, match="the prompt has 100 tokens") as caught:
        admit(backends, 100, 1)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


async def test_one_that_waits_for_a_plan_is_taken_before_none(pki: Pki, directory: Path) -> None:
    waiting, refused = (backend(pki, directory, name, ready=False) for name in ("waiting", "refused"))
    waiting.pipeline.apply(route(pipeline="waiting", state="replanning"))
    refused.pipeline.apply(
        route(
            pipeline="refused",
            state="refused",
            reason="box2 is dead",
            missing_mebibytes={"box1": "40", "box3": "7"},
            retry_after_seconds=12.5,
        )
    )
    assert admit([refused, waiting], 10, 1).backend is waiting
    with pytest.raises(ApiError) as caught:
        admit([refused], 10, 1)
    assert (caught.value.status, caught.value.headers()) == (503, {"Retry-After": "13"})
    assert "box2 is dead; box1 lacks 40 MiB, box3 lacks 7 MiB" in caught.value.message


async def test_a_model_is_ready_if_one_of_its_pipelines_is(pki: Pki, directory: Path) -> None:
    up, down = backend(pki, directory, "up", ready=True), backend(pki, directory, "down", ready=False)
    assert health([up, down], site="s", box="b", version="1")["state"] == "ready"
    document = health([down], site="s", box="b", version="1")
    assert (document["state"], document["reason"]) == ("unavailable", "pipeline down: down down")
    up.pipeline.apply(route(9, pipeline="up", degraded="box2 is out"))
    shown = health([up], site="s", box="b", version="1")["pipelines"]["up"]
    assert (shown["state"], shown["degraded"], shown["first_stage"]) == ("serving", "box2 is out", "box1")


def test_a_missing_or_broken_tokenizer_is_named(directory: Path) -> None:
    (directory / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(FleetError, match=r"tokenizer\.json"):
        Vocabulary(directory / "model")
    (directory / "model" / "model.json").write_text('{"schema": 1}')
    with pytest.raises(FleetError, match=r"(tokenizer|model)\.json"):
        Vocabulary(directory / "model")
