"""A site's directory on the operator's side, and the verbs as processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.site import KEY, Pki, make_pki, write_model

INVENTORY = """
site: demo
prefix: prefix
device_profiles:
  pc: {architecture: x86_64, torch: {version: "2.13.0"}}
box_defaults: {connection: local, address: 127.0.0.1, profile: pc}
boxes:
  box1: {roles: [stage]}
  box2: {roles: [stage]}
  box3: {roles: [stage]}
  control: {roles: [coordinator, gateway]}
models:
  tiny: {source: {path: tiny.gguf}, licence: Apache-2.0}
pipelines:
  main: {model: tiny, boxes: [box1, box2, box3]}
"""


@dataclass(frozen=True)
class Site:
    """A site's directory on the operator's side."""

    directory: Path
    pki: Pki

    @property
    def inventory(self) -> Path:
        """Its file."""
        return self.directory / "site.yaml"

    def write_endpoints(self, *, gateway_port: int = 1, stage_port: int = 1, coordinator_port: int = 1) -> None:
        """As provisioning writes them; every process here shows the certificate of `control`."""

        def entry(box: str, port: int) -> dict[str, Any]:
            return {"host": "127.0.0.1", "port": port, "server_name": f"{box}.demo.fleet.internal"}

        document = {
            "schema": 1,
            "gateway": entry("control", gateway_port),
            "gateway_loopback": None,
            "coordinator": entry("control", coordinator_port),
            "stages": {"box1": entry("control", stage_port)},
        }
        (self.directory / ".fleet" / "demo" / "endpoints.json").write_text(json.dumps(document))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A provisioned site, as far as the verbs look."""
    (tmp_path / "site.yaml").write_text(INVENTORY)
    state = tmp_path / ".fleet" / "demo"
    pki = make_pki(state)
    (state / "api_key").write_text(KEY + "\n")
    write_model(tmp_path / "model")
    return Site(tmp_path, pki)


async def start(*arguments: str) -> asyncio.subprocess.Process:
    """A verb as a process."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fleet.cli.main",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


async def fleet(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a verb."""
    process = await start(*arguments)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()
