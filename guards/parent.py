"""Main process of the box's systemd unit: starts supervisord in the foreground and tells systemd whether it answers.

    python -m guards.parent --socket /run/fleet/supervisor.sock -- python -m supervisor.supervisord --nodaemon -c FILE

supervisord watches the programs, but who watches supervisord? systemd, by `WatchdogSec`: this process calls
supervisord's XML-RPC every third of it and pings systemd only when an answer came in time. The ping does not come from
a guard, so guards that hang never cost a stage. It ends when supervisord ends, with its exit status.

In the same rounds it looks at the guards' sign of life (`guards/beat.py`), and has guards that hang killed, which
supervisord starts again (`guards/hung.py`). Where there is no sign, nothing is done.

The unit has `Type=notify`, `NotifyAccess=main` and `KillMode=control-group`. The latter kills supervisord and all
programs whenever this process ends, so no death signal (`PR_SET_PDEATHSIG`) is set: it would need code between fork and
exec. Without systemd it only supervises: it starts, forwards signals, waits.

The protocol of sd_notify(3) is one datagram of a few words, which is why no library is needed for it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
import xmlrpc.client
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet.provision.agent.errors import AgentError
from fleet.provision.agent.rpc import SupervisorRpc
from guards.beat import FILE_NAME as BEAT_FILE_NAME
from guards.hung import GuardsWatch

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR2)  # supervisord knows all
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # a child would inherit that
STOPPING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT})
# A call may take as long as the time between two of them, so systemd sees a ping within two thirds of its WatchdogSec.
CALLS_PER_WATCHDOG = 3
START_POLL_SECONDS = 0.2  # until supervisord answers for the first time
# systemd's own limit for a start ends a supervisord that never answers; without systemd nobody waits for the answer.
LONGEST_WAIT_SECONDS = 60.0
KILLED_EXIT_CODE = 128  # plus the signal's number, as shells have it
NOTIFY_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Tells systemd how things stand; tells nobody where there is no socket.

    Args:
        address: of `NOTIFY_SOCKET`: a path, or "@name" for an abstract socket; empty: not started by systemd.
    """

    def __init__(self, address: str) -> None:
        # "@" stands for the zero byte that begins an abstract address (unix(7))
        self._address = "\0" + address[1:] if address.startswith("@") else address

    @property
    def listened_to(self) -> bool:
        """Whether anybody wants to know."""
        return bool(self._address)

    def tell(self, *assignments: str) -> None:
        """Send "NAME=value" lines. What systemd does not take is lost: it will miss the pings and act."""
        if not self.listened_to:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(1.0)
                sender.sendto("\n".join(assignments).encode(), self._address)
        except OSError as error:
            print(f"systemd's socket {self._address!r}: {error}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Watchdog:
    """What systemd expects. seconds: it acts after so long without a ping; None: it expects none."""

    seconds: float | None

    @staticmethod
    def from_environment(environment: Mapping[str, str], pid: int) -> Watchdog:
        """By `WATCHDOG_USEC`, if that is meant for this process (sd_watchdog_enabled(3))."""
        if environment.get("WATCHDOG_PID", str(pid)) != str(pid):
            return Watchdog(None)
        try:
            seconds = int(environment.get("WATCHDOG_USEC", "")) / 1e6
        except ValueError:
            return Watchdog(None)
        return Watchdog(seconds if seconds > 0 else None)

    @property
    def interval_seconds(self) -> float:
        """From call to call, and the deadline of each."""
        return LONGEST_WAIT_SECONDS if self.seconds is None else self.seconds / CALLS_PER_WATCHDOG


class AnsweringRpc(SupervisorRpc):
    """supervisord, as the parent needs it."""

    def alive(self) -> bool:
        """Whether anything was answered; a refusal, as while it shuts down, is an answer too."""
        try:
            self._call("getState")
        except AgentError as error:
            return isinstance(error.__cause__, xmlrpc.client.Fault)
        return True

    def kill_group(self, group: str) -> None:
        """SIGKILL to its processes; AgentError if supervisord does not answer or refuses. It signals its own children,
        so no other process can be hit whose id is the same by now."""
        self._call("signalProcessGroup", group, "KILL")


class Asker:
    """Calls supervisord on threads of its own, one at a time, so that signals are forwarded meanwhile.

    Args:
        ask: whether it answers; may block for longer than the deadline.
        came: told, on the thread, whether an answer came within the deadline.
    """

    def __init__(self, ask: Callable[[], bool], came: Callable[[bool], None], deadline_seconds: float) -> None:
        self._ask, self._came, self._deadline_seconds = ask, came, deadline_seconds
        self._thread: threading.Thread | None = None

    def begin(self) -> bool:
        """Start a call; False if the last one has not come back yet."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread = threading.Thread(target=self._call, name="ask", daemon=True)
        self._thread.start()
        return True

    def _call(self) -> None:
        began = time.monotonic()
        self._came(self._ask() and time.monotonic() - began <= self._deadline_seconds)


class Parent:
    """Runs one supervisord.

    Args:
        argv: supervisord in the foreground. rpc: its XML-RPC.
        guards: looks at the guards.
    """

    def __init__(
        self, argv: Sequence[str], rpc: AnsweringRpc, notifier: Notifier, watchdog: Watchdog, guards: GuardsWatch
    ) -> None:
        self._argv, self._notifier, self._watchdog, self._guards = list(argv), notifier, watchdog, guards
        self._asker = Asker(rpc.alive, self._came, watchdog.interval_seconds)
        self._ready = threading.Event()
        self._stopping = False

    def run(self) -> int:
        """Until supervisord ends.

        Returns:
            Its exit code, or 128 plus the number of the signal that killed it.

        Raises:
            OSError: it can't be started.
        """
        waited = {signal.SIGCHLD, *FORWARDED}
        # blocked, and fetched one by one: nothing runs inside a handler, and none is lost before the child exists
        signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some shells leave it, no exit status would be kept
        environment = {name: value for name, value in os.environ.items() if name not in NOTIFY_VARIABLES}
        child = os.posix_spawnp(self._argv[0], self._argv, environment, setsigmask=(), setsigdef=IGNORED_BY_PYTHON)
        next_call = time.monotonic()
        while True:
            got = signal.sigtimedwait(waited, max(0.0, next_call - time.monotonic()))
            if got is None:
                self._look()
                next_call = time.monotonic() + self._pause_seconds
            elif got.si_signo == signal.SIGCHLD:
                code = reap(child)
                if code is not None:
                    self._notifier.tell("STOPPING=1", f"STATUS=supervisord ended with {code}")
                    return code
            else:
                self._forward(child, signal.Signals(got.si_signo))

    @property
    def _wanted(self) -> bool:
        """Whether supervisord is to be called."""
        if self._stopping or not self._notifier.listened_to:
            return False
        return not self._ready.is_set() or self._watchdog.seconds is not None

    @property
    def _pause_seconds(self) -> float:
        return START_POLL_SECONDS if self._wanted and not self._ready.is_set() else self._watchdog.interval_seconds

    def _look(self) -> None:
        """Call supervisord; a call that has not come back since the last look is no answer. Then the guards."""
        if not self._stopping and (self._ready.is_set() or not self._notifier.listened_to):
            self._guards.begin()
        if not self._wanted:
            return
        if not self._asker.begin():
            self._came(False)

    def _came(self, in_time: bool) -> None:
        """An answer came in time, or it did not."""
        if self._stopping:
            return
        if not in_time:
            if self._ready.is_set():
                self._notifier.tell("STATUS=supervisord does not answer")
        elif self._ready.is_set():
            self._notifier.tell("WATCHDOG=1", "STATUS=supervisord answers")
        else:
            self._notifier.tell("READY=1", "WATCHDOG=1", "STATUS=supervisord answers")
            self._ready.set()

    def _forward(self, child: int, number: signal.Signals) -> None:
        if number in STOPPING:
            # from here on systemd waits for the end, at most its TimeoutStopSec, and expects no pings
            self._stopping = True
            self._notifier.tell("STOPPING=1", "STATUS=supervisord stops its programs")
        os.kill(child, number)


def reap(child: int) -> int | None:
    """Take the exit statuses of all children that have ended. Others than supervisord are orphans that only process 1
    of a container gets.

    Returns:
        The child's exit code, or 128 plus the number of the signal that killed it; None while it lives.
    """
    code: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            plain = os.waitstatus_to_exitcode(status)
            code = plain if plain >= 0 else KILLED_EXIT_CODE - plain


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m guards.parent", description="Runs supervisord under systemd.")
    parser.add_argument("--socket", required=True, help="supervisord's XML-RPC unix socket")
    parser.add_argument(
        "--guards-beat",
        type=Path,
        metavar="FILE",
        help=f"the guards' sign of life (default: {BEAT_FILE_NAME} beside the socket); none is no fault",
    )
    parser.add_argument("argv", nargs="+", metavar="supervisord", help="its command line, after --, in the foreground")
    options = parser.parse_args(arguments)
    notifier = Notifier(os.environ.get("NOTIFY_SOCKET", ""))
    watchdog = Watchdog.from_environment(os.environ, os.getpid())
    try:
        beat = options.guards_beat or Path(options.socket).with_name(BEAT_FILE_NAME)
        guards = GuardsWatch(beat, AnsweringRpc(options.socket))
        return Parent(options.argv, AnsweringRpc(options.socket), notifier, watchdog, guards).run()
    except OSError as error:
        print(f"{options.argv[0]}: {error.strerror or error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
