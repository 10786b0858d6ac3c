"""All guards of a box, and what they work with, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet.provision.agent.rpc import SupervisorRpc
from guards.beat import FILE_NAME as BEAT_FILE_NAME
from guards.beat import Beating
from guards.board import Board
from guards.budgets import Budget
from guards.clock.guard import ClockGuard
from guards.clock.guard import budgets as clock_budgets
from guards.config import GuardsConfig, Watched
from guards.guard import Guard
from guards.keeper import Keeper
from guards.leases import CoordinatorLeases
from guards.liveness.guard import LivenessGuard
from guards.liveness.guard import budgets as liveness_budgets
from guards.liveness.looks import Probe
from guards.liveness.probes import AdminSocketProbe, HttpProbe
from guards.memory.guard import MemoryGuard
from guards.memory.guard import budgets as memory_budgets
from guards.performer import Performer, ProgramRepairs
from guards.post import Post
from guards.restarts import LeaseRefused, Leases, Restarts, RestartTiming
from guards.roots import Roots
from guards.runner import Helper, Runner
from guards.settings import GuardSettings
from guards.stage_client import NoStage, StageClient
from guards.store import Store
from guards.surroundings.guard import SurroundingsGuard
from guards.surroundings.guard import budgets as surroundings_budgets
from guards.surroundings.links import Nominal
from guards.telling import Telling
from guards.thermal.guard import ThermalGuard

HEALTHY_STATES = ("loaded", "ready")  # of a stage: "ready" needs a plan, which is the coordinator's to give


@dataclass(frozen=True)
class House:
    """The guards of a box.

    Attributes:
        settings: of them. observe: nothing is done, only said.
        helpers: that run beside the guards: the sign of life, and who tells the stage, which is told in any case.
    """

    settings: GuardSettings
    observe: bool
    keeper: Keeper
    board: Board
    runner: Runner
    helpers: tuple[Helper, ...] = ()


class NoLeases:
    """Where there is no coordinator: what still serves is never taken out."""

    def take(self, because: str) -> AbstractContextManager[None]:
        """LeaseRefused."""
        raise LeaseRefused(f"no coordinator is configured that could allow it ({because})")


def house_of(config: GuardsConfig, roots: Roots) -> House:
    """The guards as they run under supervisord."""
    settings, names = config.settings, [program.name for program in config.programs]
    supervisor = SupervisorRpc(str(config.supervisor_socket))
    stage = NoStage() if config.stage is None else StageClient(config.stage.admin_socket)
    probes = {program.name: probe for program in config.programs if (probe := _probe(program, settings)) is not None}
    guards: list[Guard[Any, Any]] = [
        ThermalGuard(roots, settings.thermal, stage, config.run_directory),
        MemoryGuard(settings.memory, roots, stage),
        ClockGuard(
            settings,
            roots,
            servers=config.time_servers,
            build_unix_seconds=config.build_unix_seconds,
            box=config.box,
            in_pipeline=config.stage is not None,
        ),
        LivenessGuard(settings.liveness, roots, programs=names, supervisor=supervisor, probes=probes),
        SurroundingsGuard(
            settings.surroundings,
            roots,
            directories=config.directories,
            log_directory=config.log_directory,
            data_link=Nominal(config.link_mbit_per_second, config.mac),
        ),
    ]
    keeper = Keeper(Store(config.state_directory), _budgets(settings, names))
    board = Board([guard.name for guard in guards], keeper.clock.now_seconds)
    restarts = Restarts(
        supervisor,
        _leases(config),
        keeper,
        board,
        timing=RestartTiming(config.stop_seconds, config.ready_seconds),
        healthy=lambda name: _healthy(name, supervisor, probes),
    )
    house = _house(settings, guards, keeper, board, None if config.observe else restarts)
    path, runner = config.run_directory / BEAT_FILE_NAME, house.runner
    helpers: list[Helper] = [Beating(path, lambda: runner.round_seconds, runner.allowed_seconds)]
    if isinstance(stage, StageClient):
        helpers.append(Telling(stage, board))
    return replace(house, helpers=tuple(helpers))


def house_without_configuration(roots: Roots) -> House:
    """What guards can see of any Linux machine, with the default settings; nothing is done, and nothing kept."""
    settings = GuardSettings()
    guards: list[Guard[Any, Any]] = [
        ThermalGuard(roots, settings.thermal, NoStage()),
        MemoryGuard(settings.memory, roots, NoStage()),
        ClockGuard(
            settings,
            roots,
            servers=(),
            build_unix_seconds=Path(__file__).stat().st_mtime,  # no clock is right that is before it
            box="this machine",
            in_pipeline=False,
        ),
        SurroundingsGuard(
            settings.surroundings,
            roots,
            directories=[Path("/")],
            log_directory=Path("/var/log"),
            data_link=Nominal(0.0),
        ),
    ]
    keeper = Keeper(None, _budgets(settings, []))
    board = Board([guard.name for guard in guards], keeper.clock.now_seconds)
    return _house(settings, guards, keeper, board, None)


def _house(
    settings: GuardSettings,
    guards: Sequence[Guard[Any, Any]],
    keeper: Keeper,
    board: Board,
    programs: ProgramRepairs | None,
) -> House:
    performer = Performer(keeper, board, programs)
    posts = [Post(guard, keeper, board, performer.perform) for guard in guards]
    return House(settings, programs is None, keeper, board, Runner(posts, keeper, board))


def _budgets(settings: GuardSettings, programs: Sequence[str]) -> dict[str, Budget]:
    return {
        **memory_budgets(settings.memory),
        **clock_budgets(settings),
        **liveness_budgets(settings.liveness, programs),
        **surroundings_budgets(settings.surroundings),
    }


def _leases(config: GuardsConfig) -> Leases:
    if config.coordinator is None:
        return NoLeases()
    return CoordinatorLeases(
        config.site,
        config.box,
        config.tls,
        coordinator_box=config.coordinator.box,
        host=config.coordinator.host,
        port=config.coordinator.port,
        lease_seconds=config.stop_seconds + config.ready_seconds,
    )


def _probe(program: Watched, settings: GuardSettings) -> Probe | None:
    seconds, where = settings.liveness.answer_seconds, program.https or program.http
    if program.admin_socket is not None:
        return AdminSocketProbe(program.admin_socket, seconds)
    if where is None:
        return None
    return HttpProbe(where.host, where.port, tls=program.https is not None, answer_seconds=seconds)


def _healthy(name: str, supervisor: SupervisorRpc, probes: Mapping[str, Probe]) -> bool:
    """Whether a program runs and answers; a stage only once it has loaded."""
    info = supervisor.programs()[name]
    if info["statename"] != "RUNNING":
        return False
    if name not in probes:
        return True
    answer = probes[name].ask(int(info["pid"]))
    return "error" not in answer and answer.get("state", "ready") in HEALTHY_STATES
