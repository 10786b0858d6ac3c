"""Runs inside a box, in the stage's environment: start a stage beside the serving one, be its coordinator, and print
what it read and holds once its layers are loaded.

Arguments: release's etc/stage.json, a directory for the copy's files, and `own` (it knows its plan, as after any
restart) or `empty` (it knows none, and is told to keep nothing).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fleet import __version__
from stage_runtime.link.connection import Link, LinkTiming
from stage_runtime.link.control import PROTOCOL, decode_control, encode_control
from stage_runtime.link.endpoints import LinkServer, LinkSettings
from stage_runtime.link.frames import Frame, FrameType
from stage_runtime.link.membership import Register, Standby
from stage_runtime.link.messages import Hello
from stage_runtime.link.tasks import within
from stage_runtime.link.tls import TlsIdentity

LOADED_DEADLINE_SECONDS = 120.0
POLL_SECONDS = 0.1
STEADY_SECONDS = 3.0
"""Nothing was loaded for so long: everything is there."""
RING_PORT, METRICS_PORT, COORDINATOR_PORT = 17401, 17403, 17402
LOOPBACK = "127.0.0.1"


def changed_config(config: dict[str, Any], directory: Path, *, knows_plan: bool) -> dict[str, Any]:
    """stage.json with ports, socket and state of its own, and this program as its coordinator."""
    state = directory / "state"
    shutil.rmtree(state, ignore_errors=True)
    if knows_plan:
        shutil.copytree(config["state_directory"], state)
    else:
        state.mkdir()
    return {
        **config,
        "ring": {"host": LOOPBACK, "port": RING_PORT},
        "metrics": {"host": LOOPBACK, "port": METRICS_PORT},
        "coordinator": {"box": config["box"], "host": LOOPBACK, "port": COORDINATOR_PORT},
        "admin_socket": str(directory / "stage.sock"),
        "state_directory": str(state),
    }


class OneStageCoordinator:
    """Takes the one stage that dials in, and tells it to keep nothing beside its plan.

    Attributes:
        told: set once it has registered and been told.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.told = asyncio.Event()
        hello = Hello(PROTOCOL, "coordinator", config["box"], config["site"], "", "", 0, __version__)
        files = {name: Path(config["tls"][name]) for name in ("ca", "certificate", "key")}
        tls = TlsIdentity(files["ca"], files["certificate"], files["key"])
        settings = LinkSettings(hello, tls, LinkTiming.from_config(config["timing"]))
        self.server = LinkServer(settings, lambda hello: "", self._serve, self._refused)

    @staticmethod
    def _refused(address: str, reason: str) -> None:
        print(f"{address}: {reason}", file=sys.stderr)

    async def _serve(self, link: Link) -> None:
        decode_control(Register, (await link.receive()).body)
        await link.send(Frame(FrameType.STANDBY, encode_control(Standby((), head=False, embedding=False))))
        self.told.set()
        while True:
            await link.receive()


def health(path: Path) -> dict[str, Any]:
    """The stage's answer on its admin socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b'{"op": "health"}\n')
        return dict(json.loads(connection.makefile().readline()))


def numbers(text: str, unit: int = 1) -> dict[str, int]:
    """`Name: 123 kB` lines of a /proc file as numbers."""
    pairs = (line.split(":") for line in text.splitlines() if ":" in line)
    return {
        name: int(value.split()[0]) * unit for name, value in pairs if value.split()[:1] and value.split()[0].isdigit()
    }


async def loaded(config: dict[str, Any]) -> dict[str, Any]:
    """The stage's health once it holds what it is to hold."""
    coordinator = OneStageCoordinator(config)
    coordinator.server.start(LOOPBACK, COORDINATOR_PORT)
    try:
        return await within(LOADED_DEADLINE_SECONDS, _steady(coordinator, Path(config["admin_socket"])))
    finally:
        await coordinator.server.close()


async def _steady(coordinator: OneStageCoordinator, admin_socket: Path) -> dict[str, Any]:
    await coordinator.told.wait()
    state, since = health(admin_socket), time.monotonic()
    while time.monotonic() - since < STEADY_SECONDS:
        await asyncio.sleep(POLL_SECONDS)
        before, state = state, health(admin_socket)
        if state["weight_bytes"] != before["weight_bytes"]:
            since = time.monotonic()
    return state


def measured(pid: int, state: dict[str, Any]) -> dict[str, Any]:
    """What the kernel says of the process."""
    process = Path(f"/proc/{pid}")
    maps = (process / "maps").read_text().splitlines()
    return {
        "read_bytes": numbers((process / "io").read_text())["read_bytes"],
        "pss_bytes": numbers((process / "smaps_rollup").read_text(), 1024)["Pss"],
        "peak_rss_bytes": numbers((process / "status").read_text(), 1024)["VmHWM"],
        "weight_bytes": state["weight_bytes"],
        "kernel": state["kernel"],
        "mapped_shards": sorted({Path(line.split()[-1]).name for line in maps if line.endswith(".safetensors")}),
    }


def main() -> None:
    """Print one JSON object."""
    etc, directory, wanted = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    config = changed_config(json.loads(etc.read_text()), directory, knows_plan=wanted == "own")
    own = directory / "stage.json"
    own.write_text(json.dumps(config))
    with (directory / "stage.log").open("w") as log:
        argv = [sys.executable, "-m", "stage_runtime", "--config", str(own)]
        stage = subprocess.Popen(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=log, cwd="/")
    try:
        state = asyncio.run(loaded(config))
        print(json.dumps(measured(stage.pid, state)))
    except (OSError, asyncio.TimeoutError) as error:
        sys.exit(f"not loaded: {error!r}\n{(directory / 'stage.log').read_text()[-2000:]}")
    finally:
        stage.kill()  # told to stop, it would wait for others to take its layers
        stage.wait()


if __name__ == "__main__":
    main()
