"""Breaks a box for a while, and heals it again even if nobody is left to ask for it. Standard library only.

Runs on the box (`fleet.drill.breaking` sends it). stdin: one line with the order as JSON, later the line `go`; anything
else, or the end of the input, and nothing is broken. stdout: one JSON object a line, `ready`, `broken` or `error`. What
is laid on the box for its guards (`fleet.drill.strains`) ends with the next line, or the end of the input: `healed`.
What lasts is undone by a watchdog, a process of its own that runs before anything breaks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import syslog
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fleet.drill.strains import Strain, strain_of
from fleet.provision.agent.errors import AgentError
from fleet.provision.agent.rpc import SupervisorRpc

STEP = "drill"
PROGRAM = "stage"
ORDER_MAX_BYTES = 1 << 20
IP_SECONDS = 10.0  # one call of ip
HEAL_ATTEMPTS = 30  # a second apart
HEAL_PAUSE_SECONDS = 1.0
LONGEST_SECONDS = 3600.0
STRAINS = ("heat", "disk-full", "clock")
END_SECONDS = 20.0  # of a watchdog that was told to heal
HANGUP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
Heal = Callable[[], None]


class Stage:
    """The stage's process, held by a pidfd: a later process of the same number is never touched."""

    def __init__(self, supervisor_socket: str) -> None:
        info = SupervisorRpc(supervisor_socket).programs().get(PROGRAM)
        if info is None or info["statename"] != "RUNNING":
            state = "not one of its programs" if info is None else info["statename"]
            raise AgentError(STEP, f"no stage to break: in supervisord it is {state}", hint="fleet status")
        self.process_id = int(info["pid"])
        self._descriptor = os.pidfd_open(self.process_id)

    def send(self, number: int) -> None:
        """Send a signal; a process that has ended is left in peace."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)


class Cut:
    """The box's traffic to its peers goes nowhere: blackhole routes, which answer nobody."""

    def __init__(self, peers: list[str]) -> None:
        if shutil.which("ip") is None:
            raise AgentError(STEP, "there is no ip command on the box", hint="apt-get install iproute2  (on the box)")
        self.addresses = sorted({address for peer in peers for address in _resolve(peer)})
        operator = operator_address()
        if operator in self.addresses:
            message = f"you are logged in from {operator}, which is a box of this site: the cut would cut you off too"
            raise AgentError(STEP, message, hint="run the drill from a machine that is no box of the site")
        taken = [address for address in self.addresses if _ip("show", address).stdout.strip()]
        if taken:
            message = f"there are blackhole routes to {', '.join(taken)} already"
            raise AgentError(STEP, message, hint=f"ip route del blackhole {taken[0]}  (on the box)")

    def make(self) -> None:
        """Add the routes; whatever fails, none is left."""
        for address in self.addresses:
            done = _ip("add", address)
            if done.returncode != 0:
                self.undo()
                raise AgentError(STEP, f"ip route add blackhole {address}: {done.stderr.strip()}")

    def undo(self) -> None:
        """Remove them; one that is gone already counts as removed."""
        left = list(self.addresses)
        for _ in range(HEAL_ATTEMPTS):
            for address in left:
                _ip("del", address)
            left = [address for address in left if _ip("show", address).stdout.strip()]
            if not left:
                return
            time.sleep(HEAL_PAUSE_SECONDS)
        syslog.syslog(syslog.LOG_ERR, f"fleet drill: blackhole routes to {', '.join(left)} can't be removed")


def _ip(what: str, address: str) -> subprocess.CompletedProcess[str]:
    family = f"-{ipaddress.ip_address(address).version}"
    where = ["type", "blackhole", "exact", address] if what == "show" else ["blackhole", address]
    return subprocess.run(
        ["ip", family, "route", what, *where], capture_output=True, text=True, timeout=IP_SECONDS, check=False
    )


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise AgentError(STEP, f"the name {host} is unknown on the box ({error.strerror})") from error
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def operator_address() -> str | None:
    """Where the ssh login came from; None without one. sudo hides the variable, but not its parents' environment."""
    process = os.getpid()
    while process > 1:
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            process = int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            return None
        for variable in variables:
            name, _, value = variable.partition(b"=")
            if name == b"SSH_CONNECTION" and value:
                address = ipaddress.ip_address(value.split()[0].decode().partition("%")[0])
                return str(getattr(address, "ipv4_mapped", None) or address)
    return None


def start_watchdog(seconds: float, heal: Heal, note: str) -> int:
    """A process of its own session that heals after `seconds`, or at once when it is told to end.

    Returns its process id when it runs. The operator's connection, and this process, may end at any time after that.
    """
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                _watch(seconds, heal, note, tell)
        finally:
            os._exit(0)  # never back into the caller's code, whatever was raised
    os.close(tell)
    os.waitpid(child, 0)
    said = os.read(told, 20)
    os.close(told)
    if not said:
        raise AgentError(STEP, "the watchdog did not start; nothing was broken")
    return int(said)


def _watch(seconds: float, heal: Heal, note: str, tell: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    signal.pthread_sigmask(signal.SIG_BLOCK, HANGUP_SIGNALS)
    os.write(tell, b"%d" % os.getpid())
    signal.sigtimedwait(HANGUP_SIGNALS, seconds)
    heal()
    syslog.syslog(f"fleet drill: {note}: undone")


def take_lock(name: str) -> socket.socket:
    """One drill at a time on a box: an abstract socket, which ends with its last process and leaves no file."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0{name}")
    except OSError as error:
        lock.close()
        raise AgentError(STEP, "another drill runs on this box", hint="wait for its end") from error
    return lock


def prepare(order: dict[str, Any]) -> tuple[int, Callable[[], str]]:
    """Look at everything that could stand in the way.

    Args:
        order: {"kind", "seconds", "supervisor_socket", "peers"}.

    Returns:
        The stage's process, and what breaks it; that returns what it did, in words.
    """
    kind, seconds = order["kind"], min(float(order["seconds"]), LONGEST_SECONDS)
    stage = Stage(order["supervisor_socket"])
    who = f"the stage (process {stage.process_id})"

    def kill() -> str:
        stage.send(signal.SIGKILL)
        return f"killed {who}"

    def hang() -> str:
        start_watchdog(seconds, lambda: stage.send(signal.SIGCONT), f"stopped {who}")
        stage.send(signal.SIGSTOP)
        return f"stopped {who} for {seconds:g} s"

    if kind in ("kill", "hang"):
        return stage.process_id, kill if kind == "kill" else hang
    cut = Cut(order["peers"])
    peers = ", ".join(cut.addresses)

    def link_cut() -> str:
        start_watchdog(seconds, cut.undo, f"cut the traffic to {peers}")
        cut.make()
        return f"cut the traffic to {peers} for {seconds:g} s"

    def power_cut() -> str:
        done = link_cut()
        stage.send(signal.SIGKILL)  # its FIN and RST go nowhere
        return f"{done}, then killed {who}"

    return stage.process_id, link_cut if kind == "link-cut" else power_cut


def lay(strain: Strain, kind: str, seconds: float) -> Iterator[str]:
    """Lay a strain on the box, yield what was done, and take it off when the next is asked for.

    Raises:
        AgentError: it can't be laid on the box, and is not; or its watchdog does not end.
    """
    watchdog = os.pidfd_open(start_watchdog(min(seconds, LONGEST_SECONDS), strain.undo, kind))
    try:
        yield strain.make()
    finally:
        with contextlib.suppress(ProcessLookupError):  # its time was over
            signal.pidfd_send_signal(watchdog, signal.SIGTERM)
        ended, _, _ = select.select([watchdog], [], [], END_SECONDS)
        os.close(watchdog)
        if not ended:
            raise AgentError(STEP, f"the watchdog has not undone {kind} yet", hint="look at the box's syslog")


def strain(order: dict[str, Any]) -> None:
    """One order for the guards."""
    wanted = strain_of(order)
    say("ready", process_id=os.getpid())
    if sys.stdin.buffer.readline(ORDER_MAX_BYTES).strip() != b"go":
        return
    syslog.syslog(f"fleet drill: {order['kind']}")
    for done in lay(wanted, order["kind"], float(order["seconds"])):
        say("broken", text=done)
        sys.stdin.buffer.readline(ORDER_MAX_BYTES)
    say("healed")


def say(op: str, **more: object) -> None:
    """One line to the operator."""
    sys.stdout.write(json.dumps({"op": op, **more}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """One order."""
    try:
        order = json.loads(sys.stdin.buffer.readline(ORDER_MAX_BYTES))
        with take_lock(order["lock"]):
            if order["kind"] in STRAINS:
                strain(order)
                return
            process_id, strike = prepare(order)
            say("ready", process_id=process_id)
            if sys.stdin.buffer.readline(ORDER_MAX_BYTES).strip() == b"go":
                syslog.syslog(f"fleet drill: {order['kind']}")
                say("broken", text=strike())
    except AgentError as error:
        say("error", message=error.message, hint=error.hint)
    except (OSError, subprocess.SubprocessError) as error:
        say("error", message=f"{type(error).__name__}: {error}", hint="")
