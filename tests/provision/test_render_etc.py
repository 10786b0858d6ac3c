"""The configurations of the programs are what docs/architecture.md says, key by key."""

from __future__ import annotations

from pathlib import Path

from fleet.inventory.model import Timing
from fleet.planning.cost import NOMINAL_BYTES_PER_SECOND_PER_THREAD
from fleet.planning.site import CORES_WHEN_UNKNOWN
from fleet.provision.render import RenderInputs, render
from tests.provision.sites import MODEL_DIGEST, etc

TLS = {"ca": "/opt/fleet/pki/ca.crt", "certificate": "/opt/fleet/pki/box.crt", "key": "/opt/fleet/pki/box.key"}


def test_stage_json_has_exactly_what_the_contract_says(inputs: RenderInputs) -> None:
    config = etc(render(inputs, "box2"), "stage.json")
    assert config == {
        "schema": 2,
        "site": "small",
        "box": "box2",
        "pipeline": "main",
        "policy": "exact",
        "model_directory": f"/opt/fleet/models/{MODEL_DIGEST[:16]}",
        "model_digest": MODEL_DIGEST,
        "ring": {"host": "0.0.0.0", "port": 7401},  # noqa: S104 - expected text
        "metrics": {"host": "0.0.0.0", "port": 7403},  # noqa: S104
        "coordinator": {"box": "control", "host": "10.77.0.14", "port": 7402},
        "state_directory": "/opt/fleet/state/stage",
        "admin_socket": "/run/fleet/stage.sock",
        "tls": TLS,
        "clock_synchronised_file": None,
        "threads": 4,
        "kernel": "auto",
        "max_batch_sequences": 4,
        "prefill_chunk_tokens": 128,
        "kv_block_tokens": 64,
        "memory_keep_free_bytes": 512 << 20,
        "timing": {
            "ring_connect_seconds": 3.0,
            "ring_handshake_seconds": 5.0,
            "ring_reconnect_seconds": 0.25,
            "ring_reconnect_max_seconds": 3.0,
            "ring_ping_seconds": 0.3,
            "ring_silence_least_seconds": 0.8,
            "ring_silence_seconds": 3.0,
            "ring_trouble_seconds": 2.0,
            "drain_seconds": 30.0,
            "heartbeat_seconds": 0.25,
        },
    }


def test_coordinator_json_has_exactly_what_the_contract_says(inputs: RenderInputs) -> None:
    config = etc(render(inputs, "control"), "coordinator.json")
    timing = config.pop("timing")
    layer = {"held": 100, "read": 90, "converting": 50}
    cost = {"layers": [layer] * 6, "head": layer, "tied": True, "trial_bytes": 200, "kv_bytes_per_token": 8}
    figures = {"memory_bytes": None, "keep_free_bytes": 512 << 20, "link_bytes_per_second": 125e6}
    assert config == {
        "schema": 1,
        "site": "small",
        "box": "control",
        "listen": {"host": "0.0.0.0", "port": 7402},  # noqa: S104
        "http": {"host": "0.0.0.0", "port": 7405},  # noqa: S104
        "tls": TLS,
        "clock_synchronised_file": None,
        "state_directory": "/opt/fleet/state/coordinator",
        "pipelines": {
            "main": {
                "model": "small",
                "model_digest": MODEL_DIGEST,
                "policy": "exact",
                "max_sequences": 4,
                "max_tokens_per_sequence": 256,
                "boxes": ["box1", "box2", "box3"],
                "explicit": None,
                "cost": {**cost, "hidden_size": 4},
            }
        },
        "boxes": {
            f"box{number}": {
                "host": f"10.77.0.1{number}",
                "ring_port": 7401,
                "bytes_per_second": cores * NOMINAL_BYTES_PER_SECOND_PER_THREAD,
                **figures,
            }
            for number, cores in ((1, CORES_WHEN_UNKNOWN), (2, CORES_WHEN_UNKNOWN), (3, 3))
        },
        "gateways": ["control"],
    }
    assert isinstance(timing, dict)
    wanted = {name for name in Timing.model_fields if not name.startswith("ssh_") and "_gate_" not in name}
    assert set(timing) == wanted
    assert {"prepare_seconds", "hold_down_forget_seconds", "ring_ping_seconds", "drain_seconds"} <= wanted


def test_gateway_json_has_exactly_what_the_contract_says(inputs: RenderInputs) -> None:
    state = render(inputs, "control")
    config = etc(state, "gateway.json")
    timing = config.pop("timing")
    assert config == {
        "schema": 2,
        "site": "small",
        "box": "control",
        "pipelines": {
            "main": {
                "model": "small",
                "model_directory": f"/opt/fleet/models/{MODEL_DIGEST[:16]}",
                "model_digest": MODEL_DIGEST,
                "policy": "exact",
                "max_tokens_per_sequence": 256,
                "max_sequences": 4,
            }
        },
        "coordinator": {"box": "control", "host": "10.77.0.14", "port": 7402},
        "listen": {"host": "0.0.0.0", "port": 8443},  # noqa: S104
        "loopback": {"host": "127.0.0.1", "port": 8080},
        "tls": TLS,
        "clock_synchronised_file": None,
        "api_keys_file": "/opt/fleet/secrets/api_keys.json",
        "journal_directory": "/opt/fleet/state/journal",
        "max_queued_requests": 64,
        "request_timeout_seconds": 600.0,
        "first_token_timeout_seconds": 120.0,
        "replan_wait_seconds": 120.0,
        "keep_alive_seconds": 5.0,
        "resume_max_seconds": 3600.0,
        "resume_max_streams": 256,
    }
    assert timing == {name: seconds for name, seconds in Timing().model_dump().items() if name.startswith("ring_")}
    assert "/opt/fleet/secrets/api_keys.json" in {file.path for file in state.files}


def test_no_release_holds_a_plan(inputs: RenderInputs) -> None:
    for box in inputs.site_file.site.boxes:
        state = render(inputs, box)
        names = {Path(file.path).name for tree in state.trees for file in tree.files}
        assert not {name for name in names if "plan" in name}
        assert all("plan" not in etc(state, f"{program.name}.json") for program in state.programs)
