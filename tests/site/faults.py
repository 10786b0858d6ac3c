"""Faults of lab boxes and of the programs on them. Each returns when it happened (monotonic seconds)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.lab import cgroups
from tests.lab.lab import LabBox
from tests.lab.processes import wait_until

RING_PORT, COORDINATOR_PORT = 7401, 7402
CAPTURE_WARM_SECONDS = 0.3
"""Links ping every 0.1 s on the lab's site, so a capture of this length has seen them alive."""
START_DEADLINE_SECONDS = 30.0
STOP_DEADLINE_SECONDS = 30.0

SUPERVISOR_SOCKET = "/run/fleet/supervisor.sock"
_ACTIVE_ETC = b"/opt/fleet/current/etc/"
ProgramName = Literal["stage", "coordinator", "gateway", "guards"]
_WORDS: dict[ProgramName, list[bytes]] = {
    "stage": [b"-m", b"stage_runtime"],
    "coordinator": [b"-m", b"fleet.cli.main", b"coordinator"],
    "gateway": [b"-m", b"fleet.cli.main", b"gateway"],
    "guards": [b"-m", b"guards"],
}


def program_pid(box: LabBox, program: ProgramName) -> int | None:
    """Pid, on the host, of a program that the box's supervisord runs; None while it does not run."""
    words = _WORDS[program]
    for pid in sorted(cgroups.members(box.settings.cgroups)):
        arguments = _arguments(pid)
        if arguments[1 : len(words) + 1] == words and any(word.startswith(_ACTIVE_ETC) for word in arguments):
            return pid
    return None


def end_with_argument(box: LabBox, argument: str) -> None:
    """SIGKILL to the box's processes that have been started with this argument, e.g. a path of the test's own."""
    for pid in cgroups.members(box.settings.cgroups):
        if argument.encode() in _arguments(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def need_pid(box: LabBox, program: ProgramName) -> int:
    """The same of a program that runs, or will in a moment."""
    found: list[int] = []  # asked a second time, one that is just dying may be gone

    def runs() -> bool:
        found[:] = [pid for pid in (program_pid(box, program),) if pid is not None]
        return bool(found)

    wait_until(runs, f"{box.name}: {program} runs", START_DEADLINE_SECONDS)
    return found[0]


def send_signal(box: LabBox, program: ProgramName, number: signal.Signals) -> float:
    """Send a signal to a program from outside the box."""
    pid = need_pid(box, program)
    moment = time.monotonic()
    os.kill(pid, number)
    return moment


def kill(box: LabBox, program: ProgramName = "stage") -> float:
    """SIGKILL: the kernel closes its connections at once; supervisord starts it again."""
    return send_signal(box, program, signal.SIGKILL)


def stop(box: LabBox) -> float:
    """SIGSTOP to the stage: its connections stay open and silent."""
    return send_signal(box, "stage", signal.SIGSTOP)


def go_on(box: LabBox) -> float:
    """SIGCONT to the stage, if it still runs: its supervisor may have been told to restart it."""
    pid, moment = program_pid(box, "stage"), time.monotonic()
    if pid is not None:
        with suppress(ProcessLookupError):  # ended between the look and the signal
            os.kill(pid, signal.SIGCONT)
    return moment


def cut_link(box: LabBox) -> float:
    """Unplug the cable."""
    moment = time.monotonic()
    box.link_cut()
    return moment


def cut_power(box: LabBox) -> float:
    """Cut the power without a word to anybody."""
    moment = time.monotonic()
    box.power_cut()
    return moment


@contextmanager
def silent_death(box: LabBox) -> Iterator[None]:
    """What happens inside must look silent on the wire: the box sent, and closed nothing that it had open.

    Raises:
        AssertionError: a FIN or RST of it left for the ring or the coordinator, or it never sent anything.
    """
    with box.capture() as seen:
        time.sleep(CAPTURE_WARM_SECONDS)
        yield
        seen.stop()
        ports = {RING_PORT, COORDINATOR_PORT}
        sent = [
            packet
            for packet in seen.tcp()
            if packet.source == box.address and {packet.source_port, packet.destination_port} & ports
        ]
    assert sent, f"{box.name}: its links were alive"
    assert not [packet for packet in sent if packet.closes], f"{box.name} went without a word"


def cut_power_silently(box: LabBox) -> float:
    """The same power cut, with a capture that shows that no FIN and no RST left the box."""
    with silent_death(box):
        return cut_power(box)


def supervisor(box: LabBox, *words: str) -> str:
    """`supervisorctl` in the box, e.g. `stop coordinator`; returns what it printed.

    Raises:
        LabError: it failed.
    """
    socket = box.inside(SUPERVISOR_SOCKET)
    wait_until(socket.exists, f"{box.name}: its supervisord listens", START_DEADLINE_SECONDS)
    python = box.exec(["sh", "-c", "ls -d /opt/fleet/envs/*/bin/python | head -n 1"]).stdout.strip()
    config = "/opt/fleet/current/etc/supervisord.conf"
    argv = [python, "-m", "supervisor.supervisorctl", "-c", config, *words]
    return box.exec(argv, deadline_seconds=STOP_DEADLINE_SECONDS).stdout


def pss_bytes(box: LabBox, program: ProgramName) -> int:
    """Proportional set size of a program: what it adds to the machine's memory."""
    lines = Path(f"/proc/{need_pid(box, program)}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@dataclass(frozen=True)
class Kind:
    """A way for a box to fail, and how it comes back.

    Attributes:
        silent: nobody is told; its neighbours must notice the silence.
        put: the fault; returns when it happened.
        take_back: what ends it.
    """

    name: str
    silent: bool
    put: Callable[[LabBox], float]
    take_back: Callable[[LabBox], object]


KILL = Kind("kill", False, kill, lambda box: need_pid(box, "stage"))
POWER_CUT = Kind("power-cut", True, cut_power, lambda box: box.on(wait=False))
SILENT_POWER_CUT = Kind("power-cut", True, cut_power_silently, lambda box: box.on(wait=False))
LINK_CUT = Kind("link-cut", True, cut_link, lambda box: box.link_heal())
STOP = Kind("stop", True, stop, go_on)
