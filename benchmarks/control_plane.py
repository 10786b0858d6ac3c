"""What the coordinator costs: CPU with 60 stages at 4 heartbeats a second, and the time to make a plan for 60 boxes.

    python -m benchmarks.control_plane [--rounds N] [--stages N] [--seconds S] [--fresh] [--quick]

The coordinator is a process of its own, and so are the simulated stages, which keep real TLS links to it and speak the
membership messages, with the default times of an inventory. It is measured once the site has settled, when nothing is
left to plan. What asyncio and TLS take for the same frames is measured in the same round (benchmarks.tls_sink). Plans
are for 128 layers. Everything is shown as a share of its goal: 3 % of one core, 100 ms a plan.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.measure import Rounds, Spread, Values, machine_lines, table
from benchmarks.tls_sink import beating, sink_process
from fleet.coordinator.config import CoordinatorConfig, parse_config
from fleet.inventory.model import Timing
from fleet.planning import heal
from fleet.planning.plan import PipelinePlan
from stage_runtime.link.tls import server_name
from tests.coordinator.site import SITE, ScriptedStage, config_data
from tests.stage_runtime.pki import SiteCa

ROUNDS = 5
STAGES = 60
LAYERS = 128
SECONDS = 20.0
QUICK_SECONDS = 1.0
START_SECONDS = 120.0
HANDSHAKES_AT_ONCE = 4  # more would only queue up at the coordinator
PROBE_SECONDS = 0.25
SETTLED_SECONDS = Timing().settle_seconds + 3  # it then looks for a better split, once
PROCESS_CPU_CLOCK = 2  # CPUCLOCK_SCHED of Linux, as clock_getcpuclockid(3) makes its answer
GOAL_CPU_PERCENT = 3.0
GOAL_PLAN_MILLISECONDS = 100.0

ROWS = {
    "cpu": ("coordinator, % of one core", GOAL_CPU_PERCENT),
    "sink": ("asyncio TLS sink of the same frames, % of one core", GOAL_CPU_PERCENT),
    "whole": ("whole plan, ms", GOAL_PLAN_MILLISECONDS),
    "merge": ("merge after the loss of a middle box, ms", GOAL_PLAN_MILLISECONDS),
    "merge_first": ("merge after the loss of the first box, ms", GOAL_PLAN_MILLISECONDS),
    "known": ("merge worked out beforehand, ms", GOAL_PLAN_MILLISECONDS),
}


def large_site(directory: Path, ca: SiteCa, stages: int) -> dict[str, Any]:
    """coordinator.json of one pipeline over so many boxes, of three kinds, with 128 layers."""
    boxes = tuple(f"box{number}" for number in range(1, stages + 1))
    data = config_data(directory, ca, boxes, timing=Timing().model_dump())
    cost = data["pipelines"]["main"]["cost"]
    cost["layers"] = cost["layers"][:1] * LAYERS
    for number, box in enumerate(data["boxes"].values()):
        box["bytes_per_second"] = 5.9e9 * (1 + number % 3)
        box["memory_bytes"] = (2 + 2 * (number % 3)) * 2**30 * max(1, STAGES // stages)
    return data


# -- plans ------------------------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def plan_times(config: CoordinatorConfig) -> Values:
    """Each plan once."""
    spec = config.pipelines["main"]
    costs = {name: box.cost for name, box in config.boxes.items()}
    alive = frozenset(costs)
    plan = heal.whole_plan(spec, costs, alive)
    assert isinstance(plan, PipelinePlan), plan
    first, middle = plan.stages[0].box, plan.stages[len(plan.stages) // 2].box
    known = {alive - {middle}: heal.merge(spec, plan, costs, alive - {middle})}
    return {
        "whole": milliseconds(lambda: heal.whole_plan(spec, costs, alive)),
        "merge": milliseconds(lambda: heal.merge(spec, plan, costs, alive - {middle})),
        "merge_first": milliseconds(lambda: heal.merge(spec, plan, costs, alive - {first})),
        "known": milliseconds(lambda: known[alive - {middle}]),
    }


# -- CPU --------------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def coordinator_process(directory: Path, data: dict[str, Any]) -> Iterator[int]:
    """`fleet coordinator` on this configuration; gives its process id."""
    file = directory / "coordinator.json"
    file.write_text(json.dumps(data))
    command = [sys.executable, "-m", "fleet.cli.main", "coordinator", "--config", str(file)]
    with (
        (directory / "log").open("ab") as log,
        subprocess.Popen(command, stderr=log, cwd=Path(__file__).resolve().parents[1]) as process,
    ):
        try:
            yield process.pid
        finally:
            process.terminate()


@asynccontextmanager
async def connected(ca: SiteCa, port: int, boxes: dict[str, dict[str, Any]]) -> AsyncIterator[None]:
    """Simulated stages on these boxes of coordinator.json, with the times of an inventory, in this process."""
    stages = [ScriptedStage(ca, box) for box in boxes]
    slots = asyncio.Semaphore(HANDSHAKES_AT_ONCE)

    async def connect(stage: ScriptedStage) -> None:
        stage.timing, stage.memory_bytes = Timing().model_dump(), boxes[stage.box]["memory_bytes"]
        async with slots:
            await stage.connect(port)

    try:
        await asyncio.gather(*(connect(stage) for stage in stages))
        yield
    finally:
        for stage in stages:
            await stage.close()


async def until_serving(ca: SiteCa, port: int, stages: int) -> None:
    """Until a plan serves and every box is there.

    Raises:
        TimeoutError: it does not come to that.
    """
    context, deadline = ca.issue("operator").client_context(), time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            try:
                url = f"https://127.0.0.1:{port}/v1/site"
                async with session.get(url, ssl=context, server_hostname=server_name("control", SITE)) as response:
                    document = await response.json()
            except aiohttp.ClientError:
                document = {"pipelines": {}, "boxes": {}}
            there = sum(box["heartbeat"] is not None for box in document["boxes"].values())
            states = {pipeline["state"] for pipeline in document["pipelines"].values()}
            if (there, states) == (stages, {"serving"}):
                return
            await asyncio.sleep(PROBE_SECONDS)
    raise TimeoutError(f"no plan serves {stages} stages within {START_SECONDS:g} s")


async def cpu_percent(directory: Path, stages: int, seconds: float) -> float:
    """Share of one core that the coordinator takes while nothing happens but heartbeats."""
    ca = SiteCa(directory / "pki", SITE)
    data = large_site(directory, ca, stages)
    data["listen"]["port"], data["http"]["port"] = free_port(), free_port()
    with coordinator_process(directory, data) as pid:
        async with connected(ca, data["listen"]["port"], data["boxes"]):
            await until_serving(ca, data["http"]["port"], stages)
            await asyncio.sleep(SETTLED_SECONDS)
            return await share_of_core(pid, seconds)


async def sink_percent(directory: Path, stages: int, seconds: float) -> float:
    """Share of one core that asyncio and TLS alone take for the same frames."""
    ca, port = SiteCa(directory / "pki", SITE), free_port()
    with sink_process(ca, port) as pid:
        async with beating(ca, port, [f"box{number}" for number in range(1, stages + 1)]):
            await asyncio.sleep(PROBE_SECONDS)
            return await share_of_core(pid, seconds)


async def share_of_core(pid: int, seconds: float) -> float:
    """Percent of one core that a process takes for so long."""
    before, begin = cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - begin)


def cpu_seconds(pid: int) -> float:
    """CPU time of another process so far; /proc tells it in hundredths of a second only."""
    clock = (~pid << 3) | PROCESS_CPU_CLOCK
    return time.clock_gettime(clock)


# -- rounds -----------------------------------------------------------------------------------------------------------


def run_rounds(rounds: Rounds, wanted: int, stages: int, seconds: float) -> None:
    """Measure what is missing."""
    while len(rounds.finished) < wanted:
        print(f"round {len(rounds.finished) + 1} of {wanted} …", file=sys.stderr, flush=True)
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            values = {"cpu": asyncio.run(cpu_percent(directory, stages, seconds))}
            values["sink"] = asyncio.run(sink_percent(directory / "sink", stages, seconds))
            values |= plan_times(parse_config(large_site(directory, SiteCa(directory / "plans", SITE), stages)))
        rounds.add(values, load)


def report(rounds: Rounds) -> str:
    """The rounds as a table, with each value's share of its goal."""
    rows = []
    for name, (text, goal) in ROWS.items():
        spread = rounds.spread(name)
        shares = Spread.of([round_[name] / goal for round_ in rounds.finished])
        rows.append([text, str(spread), f"{goal:g}", str(shares)])
    note = f"n = {len(rounds.finished)} rounds; median [quartiles]; at most 1 ÷ goal is the goal"
    peer = f"coordinator ÷ sink: {rounds.ratio('cpu', 'sink')}"
    return f"{table(['', 'measured', 'goal', 'measured ÷ goal'], rows)}\n{peer}\n{note}\nrounds: {rounds.path}"


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument("--stages", type=int, default=STAGES, help=f"default {STAGES}, at least 3")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of heartbeats a round, default {SECONDS:g}")
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier run has finished")
    parser.add_argument("--quick", action="store_true", help="one short round: whether it runs, not how fast")
    arguments = parser.parse_args(argv)
    wanted, seconds = (1, QUICK_SECONDS) if arguments.quick else (arguments.rounds, arguments.seconds)
    if wanted < 1 or arguments.stages < 3 or seconds <= 0:
        parser.error("at least one round, three stages and some time")
    print(f"{arguments.stages} stages, {LAYERS} layers, {1 / Timing().heartbeat_seconds:g} heartbeats a second each")
    print("\n".join(machine_lines()), flush=True)
    settings = {"stages": arguments.stages, "layers": LAYERS, "seconds": seconds}
    rounds = Rounds("control-plane", settings, fresh=arguments.fresh)
    run_rounds(rounds, wanted, arguments.stages, seconds)
    print(report(rounds))


if __name__ == "__main__":
    main()
