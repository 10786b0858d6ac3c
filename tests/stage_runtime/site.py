"""A pipeline of real stage processes on loopback, with real TLS, driven as the gateway does it; also for benchmarks."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.planning.plan import PipelinePlan, Plan, StagePlan
from stage_runtime.link.client import PipelineClient
from stage_runtime.link.connection import LinkTiming
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, SamplingParameters, TokenEvent
from tests.stage_runtime.pki import SiteCa
from tests.stage_runtime.plan_giver import PlanGiver

SITE = "lab"
TIMING = {
    "ring_connect_seconds": 3.0,
    "ring_handshake_seconds": 5.0,
    "ring_reconnect_seconds": 0.05,
    "ring_reconnect_max_seconds": 0.5,
    "ring_ping_seconds": 0.5,
    "ring_silence_least_seconds": 20.0,  # tests compute references on the event loop that also serves a link
    "ring_silence_seconds": 20.0,
    "heartbeat_seconds": 0.1,
    "drain_seconds": 10.0,
}
START_SECONDS = 60.0
_sequence_ids = itertools.count(1)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def split_layers(boxes: list[str], layers: int, *, tied: bool) -> tuple[StagePlan, ...]:
    """Equal shares; the head as design §2 places it."""
    bounds = [round(i * layers / len(boxes)) for i in range(len(boxes) + 1)]
    last = len(boxes) - 1
    return tuple(
        StagePlan(box, bounds[i], bounds[i + 1], embedding=i == 0, head=i == (0 if tied else last))
        for i, box in enumerate(boxes)
    )


class StageSite:
    """Stage processes of one pipeline. Boxes are box1, box2 …; spares are no part of the plan.

    `giver` takes the coordinator's part, from the first `start` on. With `gives_plan` it makes `plan` serve by itself;
    `plan` may be replaced before the first start.
    """

    def __init__(
        self,
        directory: Path,
        model_directory: Path,
        model_digest: str,
        *,
        layers: int,
        tied: bool,
        stages: int = 3,
        spares: int = 0,
        max_sequences: int = 8,
        max_tokens_per_sequence: int = 256,
        gives_plan: bool = True,
        **overrides: Any,
    ) -> None:
        self.directory = directory
        self.ca = SiteCa(directory / "pki", SITE)
        self.boxes = [f"box{i + 1}" for i in range(stages)]
        self.all_boxes = self.boxes + [f"spare{i + 1}" for i in range(spares)]
        self.model_directory = model_directory
        self.model_digest = model_digest
        self.tied = tied
        plan = PipelinePlan(
            "tiny",
            model_digest,
            layers,
            "exact",
            max_sequences,
            max_tokens_per_sequence,
            split_layers(self.boxes, layers, tied=tied),
        )
        self.plan = Plan(1, {"main": plan})
        ports = free_ports(2 * len(self.all_boxes))
        self.ring_ports = dict(zip(self.all_boxes, ports, strict=False))
        self.metrics_ports = dict(zip(self.all_boxes, ports[len(self.all_boxes) :], strict=True))
        self.overrides = overrides
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.gateway_tls = self.ca.issue("control")
        self.gives_plan = gives_plan
        self.coordinator_port = free_ports(1)[0]
        self._giver: PlanGiver | None = None

    @property
    def giver(self) -> PlanGiver:
        """The coordinator's part; it listens from its first use on."""
        if self._giver is None:
            pipeline = self.plan.pipelines["main"] if self.gives_plan else None
            self._giver = PlanGiver(
                self.gateway_tls,
                SITE,
                timing=LinkTiming.from_config(TIMING),
                port=self.coordinator_port,
                plan=pipeline,
                epoch=self.plan.epoch,
            )
        return self._giver

    def pipeline_plan(self, *boxes: str) -> PipelinePlan:
        """The site's plan over other boxes, in equal shares."""
        plan = self.plan.pipelines["main"]
        return replace(plan, stages=split_layers(list(boxes), plan.layers, tied=self.tied))

    def config(self, box: str) -> dict[str, Any]:
        """The box's stage.json."""
        tls = self.ca.issue(box)
        return {
            "schema": 2,
            "site": SITE,
            "box": box,
            "pipeline": "main",
            "policy": "exact",
            "model_directory": str(self.model_directory),
            "model_digest": self.model_digest,
            "ring": {"host": "127.0.0.1", "port": self.ring_ports[box]},
            "metrics": {"host": "127.0.0.1", "port": self.metrics_ports[box]},
            "coordinator": {"box": "control", "host": "127.0.0.1", "port": self.coordinator_port},
            "state_directory": str(self.state_directory(box)),
            "admin_socket": str(self.admin_socket(box)),
            "tls": {"ca": str(tls.ca), "certificate": str(tls.certificate), "key": str(tls.key)},
            "clock_synchronised_file": None,
            "threads": 1,
            "kernel": "auto",
            "max_batch_sequences": 8,
            "prefill_chunk_tokens": 64,
            "kv_block_tokens": 32,
            "memory_keep_free_bytes": 0,
            "timing": TIMING,
        } | self.overrides

    def admin_socket(self, box: str) -> Path:
        """Where the box's admin socket is."""
        return self.directory / f"{box}.sock"

    def state_directory(self, box: str) -> Path:
        """Where the box keeps its plan log."""
        directory = self.directory / f"{box}-state"
        directory.mkdir(exist_ok=True)
        return directory

    def log(self, box: str) -> str:
        """What the box wrote to stderr."""
        return (self.directory / f"{box}.log").read_text()

    def start(self, box: str, **changes: Any) -> None:
        """Start a box's stage process; `changes` replace keys of its stage.json."""
        _ = self.giver
        path = self.directory / f"{box}.json"
        path.write_text(json.dumps(self.config(box) | changes))
        with (self.directory / f"{box}.log").open("ab") as log:
            self.processes[box] = subprocess.Popen(
                [sys.executable, "-m", "stage_runtime", "--config", str(path)],
                stderr=log,
                stdout=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def kill(self, box: str) -> None:
        """SIGKILL, and wait for the end."""
        self.processes[box].kill()
        self.processes[box].wait()

    def terminate(self, box: str) -> int:
        """SIGTERM; the exit code."""
        self.processes[box].send_signal(signal.SIGTERM)
        return self.processes[box].wait(timeout=30)

    async def admin(self, box: str, request: dict[str, Any]) -> dict[str, Any]:
        """One question to the admin socket."""
        reader, writer = await asyncio.open_unix_connection(str(self.admin_socket(box)))
        writer.write(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await reader.readline())
        writer.close()
        return answer

    async def health(self, box: str) -> dict[str, Any]:
        """The box's health through its admin socket."""
        return await self.admin(box, {"op": "health"})

    async def wait_state(self, box: str, *states: str) -> dict[str, Any]:
        """Wait until the box is in one of the states."""
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        health: dict[str, Any] = {}
        while asyncio.get_running_loop().time() < deadline:
            try:
                health = await self.health(box)
            except (OSError, ValueError):
                health = {"state": "no answer"}
            if self.processes[box].poll() is not None:
                break
            if health["state"] in states:
                return health
            await asyncio.sleep(0.05)
        raise AssertionError(f"{box} is not {states} but {health}; its log:\n{self.log(box)}")

    async def wait_kv_empty(self) -> None:
        """Wait until no running stage holds a KV cache."""
        deadline = asyncio.get_running_loop().time() + 10
        while asyncio.get_running_loop().time() < deadline:
            healths = [await self.health(box) for box, process in self.processes.items() if process.poll() is None]
            if all(health["kv_bytes"] == 0 and health["open_sequences"] == 0 for health in healths):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"KV caches are left: {healths}")

    def client(self, epoch: int | None = None, **changes: Any) -> PipelineClient:
        """A gateway's client of the pipeline, of an epoch that was given; without one, of the site's plan."""
        first = self.boxes[0]
        if epoch is not None:
            first = self.giver.plans[epoch].plan.stages[0].box
            changes = {"epoch": epoch, **changes}
        arguments: dict[str, Any] = {
            "site": SITE,
            "box": "control",
            "first_stage_box": first,
            "host": "127.0.0.1",
            "port": self.ring_ports[first],
            "model_digest": self.model_digest,
            "policy": "exact",
            "epoch": self.plan.epoch,
            "runtime_version": "test",
            "tls": self.gateway_tls,
            "timing": LinkTiming.from_config(TIMING),
        }
        return PipelineClient(**arguments | changes)

    def stop(self) -> None:
        """End every process that runs."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        if self._giver is not None:
            self._giver.close()


@asynccontextmanager
async def connected(client: PipelineClient) -> AsyncIterator[PipelineClient]:
    """Run a client and wait until its pipeline is ready."""
    task = asyncio.ensure_future(client.run())
    try:
        await wait_ready(client)
        yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(condition: Callable[[], bool], describe: Callable[[], object] = str) -> None:
    """Wait until a condition holds."""
    for _ in range(int(START_SECONDS / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it did not happen: {describe()}")


async def wait_ready(client: PipelineClient) -> None:
    """Wait until the pipeline serves."""
    await eventually(lambda: client.status.ready, lambda: client.status)


def request(prompt: list[int], count: int, *, stop: tuple[int, ...] = (), **sampling: Any) -> GenerateRequest:
    """A request with a fresh sequence id."""
    sequence_id = next(_sequence_ids)
    return GenerateRequest(
        sequence_id, f"request-{sequence_id}", tuple(prompt), count, stop, SamplingParameters(**sampling)
    )


async def answer(client: PipelineClient, wanted: GenerateRequest) -> tuple[list[int], FinishedEvent]:
    """All tokens and the end of a sequence."""
    tokens: list[int] = []
    async for event in client.generate(wanted):
        if isinstance(event, FinishedEvent):
            return tokens, event
        assert isinstance(event, TokenEvent)
        assert event.index == len(tokens)
        tokens.append(event.token_id)
    raise AssertionError("no FinishedEvent")
