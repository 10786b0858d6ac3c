"""`etc/guards.json`: parsed strictly, every complaint names the file and the key."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from guards.settings import GuardSettings
from stage_runtime.link.configuration import Address, address, read_configuration, tls_identity
from stage_runtime.link.section import Section
from stage_runtime.link.tls import TlsIdentity

SCHEMA = 1
MAX_CONFIG_BYTES = 2**20
MOST_PROGRAMS = 64
LEAST_PERIOD_SECONDS = 0.1  # a guard without a pause would take a whole core
LARGEST_NUMBER = 1e12  # beyond any second since 1970, byte rate or temperature

T = TypeVar("T")


@dataclass(frozen=True)
class StageAccess:
    """The stage of this box.

    Attributes:
        admin_socket: where it takes orders. pipeline: that it belongs to.
    """

    admin_socket: Path
    pipeline: str


@dataclass(frozen=True)
class Watched:
    """A program of this box, and how it is asked whether it lives.

    Attributes:
        name: supervisord's. admin_socket: its unix socket. https, http: where it answers /livez. At most one of them;
            none: it can't be asked.
    """

    name: str
    admin_socket: Path | None = None
    https: Address | None = None
    http: Address | None = None


@dataclass(frozen=True)
class CoordinatorAddress:
    """Where leases are asked for, over HTTPS."""

    box: str
    host: str
    port: int


@dataclass(frozen=True)
class GuardsConfig:
    """Everything the guards of a box are told.

    Attributes:
        listen: of their port.
        state_directory: of what must outlive a reboot.
        supervisor_socket: of the box's supervisord. programs: that they watch there.
        stage: None on a box without one. coordinator: None where there is none to ask.
        log_directory: of our programs. directories: whose file systems are watched.
        time_servers: of the site.
        build_unix_seconds: of this release; no clock is right that is before it.
        link_mbit_per_second: nominal speed of the data link. mac: of its NIC, None if the inventory does not say.
        stop_seconds: supervisord kills a program that has not stopped by then.
        ready_seconds: a started program must be healthy by then.
        observe: say what would be done, and do nothing.
    """

    site: str
    box: str
    listen: Address
    tls: TlsIdentity
    state_directory: Path
    supervisor_socket: Path
    programs: tuple[Watched, ...]
    stage: StageAccess | None
    coordinator: CoordinatorAddress | None
    log_directory: Path
    directories: tuple[Path, ...]
    time_servers: tuple[str, ...]
    build_unix_seconds: float
    link_mbit_per_second: float
    mac: str | None
    stop_seconds: float
    ready_seconds: float
    observe: bool
    settings: GuardSettings

    @property
    def run_directory(self) -> Path:
        """Of what need not outlive a reboot: where supervisord's socket is; a tmpfs under systemd."""
        return self.supervisor_socket.parent


def load_config(path: Path) -> GuardsConfig:
    """Read the guards' configuration.

    Raises:
        FleetError: unreadable, no JSON, or a key is wrong; exit code 78.
    """
    return read_configuration(path, _parse, schema=SCHEMA, most_bytes=MAX_CONFIG_BYTES)


def _parse(whole: Section) -> GuardsConfig:
    names = (field.name for field in dataclasses.fields(GuardsConfig))
    whole.only(*names, "schema", "clock_synchronised_file")
    programs = whole.sections("programs")
    if len(programs) > MOST_PROGRAMS:
        raise ValueError(f"programs: read {len(programs)}, expected at most {MOST_PROGRAMS}")
    return GuardsConfig(
        site=whole.text("site"),
        box=whole.text("box"),
        listen=address(whole.section("listen"), low=0),
        tls=tls_identity(whole),
        state_directory=whole.path("state_directory"),
        supervisor_socket=whole.path("supervisor_socket"),
        programs=tuple(_watched(program) for program in programs),
        stage=_stage(whole),
        coordinator=_coordinator(whole),
        log_directory=whole.path("log_directory"),
        directories=tuple(Path(each) for each in whole.texts("directories")),
        time_servers=tuple(whole.texts("time_servers")),
        build_unix_seconds=_number(whole, "build_unix_seconds", "build_unix_seconds"),
        link_mbit_per_second=_number(whole, "link_mbit_per_second", "link_mbit_per_second"),
        mac=whole.text("mac") if whole.optional("mac") else None,
        stop_seconds=whole.seconds("stop_seconds"),
        ready_seconds=whole.seconds("ready_seconds"),
        observe=whole.boolean("observe"),
        settings=parse_settings(whole.section("settings")),
    )


def parse_settings(section: Section) -> GuardSettings:
    """All settings, none missing and none beyond what this version knows; ValueError otherwise."""
    parts = {field.name: field for field in dataclasses.fields(GuardSettings)}
    section.only(*parts)
    made: dict[str, Any] = {}
    for name in parts:
        kind = type(getattr(GuardSettings(), name))
        made[name] = _settings_of(kind, section.section(name), f"settings.{name}")
    return GuardSettings(**made)


def _settings_of(kind: type[T], section: Section, where: str) -> T:
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    section.only(*names)
    settings = {name: _number(section, name, f"{where}.{name}") for name in names}
    if settings["period_seconds"] < LEAST_PERIOD_SECONDS:
        read = settings["period_seconds"]
        raise ValueError(f"{where}.period_seconds: read {read:g}, expected at least {LEAST_PERIOD_SECONDS:g}")
    return kind(**settings)


def _number(section: Section, key: str, where: str) -> float:
    """A number that is not negative. where: dotted path of the key, for the complaint."""
    value = section.value(key)
    if type(value) not in (int, float) or not 0 <= value <= LARGEST_NUMBER:  # NaN is in no interval
        raise ValueError(f"{where}: read {str(value)[:80]!r}, expected a number from 0 on")
    return float(value)


def _watched(program: Section) -> Watched:
    program.only("name", "admin_socket", "https", "http")
    ways = [way for way in ("admin_socket", "https", "http") if program.optional(way)]
    if len(ways) > 1:
        raise ValueError(
            f"program {program.text('name')[:80]}: read {' and '.join(ways)}, expected one of them at most"
        )
    return Watched(
        program.text("name"),
        program.optional_path("admin_socket"),
        address(program.section("https"), low=1) if "https" in ways else None,
        address(program.section("http"), low=1) if "http" in ways else None,
    )


def _stage(whole: Section) -> StageAccess | None:
    if not whole.optional("stage"):
        return None
    stage = whole.section("stage").only("admin_socket", "pipeline")
    return StageAccess(stage.path("admin_socket"), stage.text("pipeline"))


def _coordinator(whole: Section) -> CoordinatorAddress | None:
    if not whole.optional("coordinator"):
        return None
    coordinator = whole.section("coordinator").only("box", "host", "port")
    return CoordinatorAddress(coordinator.text("box"), coordinator.text("host"), coordinator.port("port"))
