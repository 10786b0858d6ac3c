"""Runs inside a box, in the stage's environment: start a stage beside the serving one, be its coordinator, and print
what it read and holds once its layers are loaded.

Arguments: release's etc/stage.json, a directory for the copy's files, and what to prepare as JSON of a `Plan`, or
`empty`: then the stage is told to keep nothing.
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
from fleet.planning.plan import PipelinePlan, Plan
from stage_runtime.link.connection import Link, LinkTiming
from stage_runtime.link.control import PROTOCOL, decode_control, encode_control
from stage_runtime.link.endpoints import LinkServer, LinkSettings
from stage_runtime.link.frames import Frame, FrameType
from stage_runtime.link.membership import Prepare, Register, Standby, Vote
from stage_runtime.link.messages import Hello
from stage_runtime.link.tasks import within
from stage_runtime.link.tls import TlsIdentity

LOADED_DEADLINE_SECONDS = 120.0
POLL_SECONDS = 0.1
RING_PORT, METRICS_PORT, COORDINATOR_PORT = 17401, 17403, 17402
LOOPBACK = "127.0.0.1"
NOBODY_LISTENS = "127.0.0.1:9"  # the copy must not take the serving ring's place


def changed_config(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """stage.json with ports, socket and state of its own, and this program as its coordinator."""
    state = directory / "state"
    shutil.rmtree(state, ignore_errors=True)
    shutil.copytree(config["state_directory"], state)  # it knows its plan, as after any restart
    return {
        **config,
        "ring": {"host": LOOPBACK, "port": RING_PORT},
        "metrics": {"host": LOOPBACK, "port": METRICS_PORT},
        "coordinator": {"box": config["box"], "host": LOOPBACK, "port": COORDINATOR_PORT},
        "admin_socket": str(directory / "stage.sock"),
        "state_directory": str(state),
    }


class OneStageCoordinator:
    """Tells the one stage that dials what to hold.

    Args:
        config: the stage's. plan: what it is to prepare; None: to keep nothing.

    Attributes:
        told: set once the stage has voted, or has been told to keep nothing.
    """

    def __init__(self, config: dict[str, Any], plan: PipelinePlan | None) -> None:
        self._config = config
        self._plan = plan
        self.told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        hello = Hello(PROTOCOL, "coordinator", config["box"], config["site"], "", "", 0, __version__)
        files = {name: Path(config["tls"][name]) for name in ("ca", "certificate", "key")}
        tls = TlsIdentity(files["ca"], files["certificate"], files["key"])
        settings = LinkSettings(hello, tls, LinkTiming.from_config(config["timing"]))
        self.server = LinkServer(settings, lambda hello: "", self._serve, self._refused)

    @staticmethod
    def _refused(address: str, reason: str) -> None:
        print(f"{address}: {reason}", file=sys.stderr)

    async def _serve(self, link: Link) -> None:
        register = decode_control(Register, (await link.receive()).body)
        if self._plan is None:
            await link.send(Frame(FrameType.STANDBY, encode_control(Standby((), head=False, embedding=False))))
            self._is_told()
        else:
            epoch = max(register.committed_epoch, register.prepared_epoch, register.serving_epoch) + 1
            boxes = [stage.box for stage in self._plan.stages]
            addresses = {**dict.fromkeys(boxes, NOBODY_LISTENS), self._config["box"]: f"{LOOPBACK}:{RING_PORT}"}
            prepare = Prepare(self._config["pipeline"], epoch, self._plan, addresses, planned=True)
            await link.send(Frame(FrameType.PREPARE, encode_control(prepare), epoch))
        while True:
            frame = await link.receive()
            if frame.type is FrameType.VOTE:
                vote = decode_control(Vote, frame.body)
                if not vote.yes:
                    sys.exit(f"the stage votes no: {vote.reason}")
                self._is_told()

    def _is_told(self) -> None:
        if not self.told.done():
            self.told.set_result(None)


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


async def loaded(config: dict[str, Any], plan: PipelinePlan | None, admin_socket: Path) -> dict[str, Any]:
    """The stage's health once it holds what it was told."""
    coordinator = OneStageCoordinator(config, plan)
    coordinator.server.start(LOOPBACK, COORDINATOR_PORT)
    try:
        await within(LOADED_DEADLINE_SECONDS, _result(coordinator))
        deadline = time.monotonic() + LOADED_DEADLINE_SECONDS
        while plan is None and health(admin_socket)["weight_bytes"]:
            if time.monotonic() > deadline:
                sys.exit("the stage was told to keep nothing, and still holds weights")
            await asyncio.sleep(POLL_SECONDS)
        return health(admin_socket)
    finally:
        await coordinator.server.close()


async def _result(coordinator: OneStageCoordinator) -> None:
    await coordinator.told


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
    config = changed_config(json.loads(etc.read_text()), directory)
    plan = None if wanted == "empty" else Plan.from_data(json.loads(wanted)).pipelines[config["pipeline"]]
    own = directory / "stage.json"
    own.write_text(json.dumps(config))
    with (directory / "stage.log").open("w") as log:
        argv = [sys.executable, "-m", "stage_runtime", "--config", str(own)]
        stage = subprocess.Popen(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=log, cwd="/")
    try:
        state = asyncio.run(loaded(config, plan, Path(config["admin_socket"])))
        print(json.dumps(measured(stage.pid, state)))
    except (OSError, asyncio.TimeoutError) as error:
        sys.exit(f"not loaded: {error!r}\n{(directory / 'stage.log').read_text()[-2000:]}")
    finally:
        stage.kill()  # told to stop, it would wait for others to take its layers
        stage.wait()


if __name__ == "__main__":
    main()
