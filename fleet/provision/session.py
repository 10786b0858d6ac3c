"""A conversation with the agent of one box: facts, then (perhaps) apply, in one connection and one command.

    ssh = SshSite.of(site_file, report=progress, accept_host_keys=())        # once a run
    def work(box: str) -> HostResult:
        with open_session(site_file, box, ssh, StepLines(lambda line: progress(f"{box}: {line}"))) as session:
            facts = session.facts(desired, texts=show_diff, hold_lock=not check)
            changes = diff(desired, facts)                                   # fleet.provision.diff
            if check or not changes:
                return HostResult(box, HostStatus.OK, changes=len(changes))
            session.apply(desired, changes, sign=lambda request_pem: certificate_pem)
            return HostResult(box, HostStatus.CHANGED, changes=len(changes))
    results = run_on_boxes(boxes, work, forks=site.rollout.forks, cancellation=ssh.cancellation)   # fleet.ssh.pool
    return exit_code(results)                                                # fleet.ssh.results

`run_on_boxes` turns `BoxError`, `BoxUnreachable` and bugs into results. All calls block; one thread a box.
"""

from __future__ import annotations

import getpass
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from fleet.errors import ExitCode
from fleet.inventory.sitefile import SiteFile
from fleet.provision.agent.wire import Message, Reader, WireError, encode
from fleet.provision.desired import Content, DesiredState
from fleet.provision.diff import Changes, texts_wanted
from fleet.provision.facts import Facts, facts_from_json
from fleet.provision.sending import chunks, contents_of, spec_json
from fleet.provision.step_lines import SENT_SECONDS, StepLines
from fleet.provision.transport import Transport, agent_program, open_transport
from fleet.ssh.deadlines import Deadlines
from fleet.ssh.results import BoxError, BoxUnreachable
from fleet.ssh.site import SshSite

Sign = Callable[[str], str]  # certificate request (PEM) → certificate (PEM), by the site CA
EXIT_CODES = {"failed": ExitCode.FAILED, "locked": ExitCode.LOCKED, "rolled-back": ExitCode.ROLLED_BACK}


@dataclass(frozen=True)
class ApplyResult:
    """What an apply that succeeded did.

    Attributes:
        changes: number of changes made.
        restarted: programs that were started or restarted.
        bytes_sent: payload bytes that travelled, after compression.
    """

    changes: int
    restarted: tuple[str, ...]
    bytes_sent: int


class BoxSession:
    """One agent on one box. Use as a context manager; leaving it ends the agent and closes the connection.

    Args:
        closing: what ends with the session; closed here already when the agent does not even take its program.
    """

    def __init__(
        self, box: str, transport: Transport, deadlines: Deadlines, lines: StepLines, closing: ExitStack
    ) -> None:
        self._box = box
        self._transport = transport
        self._deadlines = deadlines
        self._lines = lines
        self._closing = closing
        self._reader = Reader(transport.receive)
        self._step = "start"
        self._bytes_sent = 0
        try:
            self._send(agent_program())
        except BaseException:
            closing.close()
            raise

    def facts(self, desired: DesiredState, *, texts: bool = False, hold_lock: bool = True) -> Facts:
        """Ask what the box has of what is managed. Writes nothing on the box, but the run lock below /run.

        Args:
            texts: bring small text files too, for unified diffs.
            hold_lock: take the box's run lock until the session ends; False for `--check`.

        Raises:
            BoxError: locked by another run (exit code 4), or the agent failed. BoxUnreachable: silence.
        """
        self._lines.shorten(desired.prefix)
        self._request(
            {
                "op": "facts",
                "spec": spec_json(desired),
                "texts": texts_wanted(desired) if texts else [],
                "lock": hold_lock,
                "holder": _holder(),
            }
        )
        return facts_from_json(self._answer("facts")["facts"])

    def apply(
        self, desired: DesiredState, changes: Changes, *, sign: Sign, begin: Callable[[], None] = lambda: None
    ) -> ApplyResult:
        """Make the changes, activate, and wait for the health gate. `facts` of the same desired state came before.

        Args:
            begin: called when everything has arrived and links, supervisord or programs are next; it may wait. What it
                raises ends the session, and the box keeps running what it runs.

        Raises:
            BoxError: a step failed; exit code 5 if the health gate failed and the previous release is active again
                (`detail` holds the failed programs' logs).
        """
        self._bytes_sent = 0
        items = [{"kind": change.kind, "path": change.path, "why": change.why} for change in changes]
        self._request({"op": "apply", "changes": items})
        contents = contents_of(desired)
        while True:
            message = self._next()
            if message["op"] == "want":
                self._send_contents([contents[item["sha256"]] for item in message["contents"]])
            elif message["op"] == "certificate-request":
                self._request({"op": "certificate", "certificate": sign(message["request"])})
            elif message["op"] == "arrived":
                begin()
                self._request({"op": "activate"})
            elif message["op"] == "applied":
                return ApplyResult(len(changes), tuple(message["started"]), self._bytes_sent)
            else:
                raise WireError(f"unexpected {message['op']} while applying")

    def stop(self, desired: DesiredState) -> tuple[str, ...]:
        """Shut supervisord and its programs down, and wait until their processes are gone.

        Returns:
            Names of the programs that were stopped; empty if nothing ran.
        """
        self._request({"op": "stop", "spec": spec_json(desired), "holder": _holder()})
        return tuple(self._answer("stopped")["programs"])

    def __enter__(self) -> BoxSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def _request(self, message: Message) -> None:
        self._send(encode(message))

    def _answer(self, operation: str) -> Message:
        message = self._next()
        if message["op"] != operation:
            raise WireError(f"expected {operation}, got {message['op']}")
        return message

    def _send(self, data: bytes) -> None:
        """Send under the deadlines of silence and step. A box that closed first has said why: that is raised."""
        watchdog = self._transport.watchdog
        watchdog.arm("quiet", self._deadlines.quiet_seconds)
        watchdog.arm("step", self._deadlines.step_seconds)
        try:
            self._transport.send(data)
        except OSError:
            while True:  # ends by raising the agent's error, or the broken connection
                self._next()
        finally:
            watchdog.disarm("quiet")
            watchdog.disarm("step")

    def _next(self) -> Message:
        """The next message that is no progress, waiting under the deadlines of silence and step."""
        watchdog = self._transport.watchdog
        watchdog.arm("step", self._deadlines.step_seconds)
        try:
            while True:
                watchdog.arm("quiet", self._deadlines.quiet_seconds)
                try:
                    message, _ = self._reader.next()
                except (EOFError, OSError) as error:
                    self._broken(error)
                except WireError as error:
                    raise BoxError(
                        self._box,
                        self._step,
                        f"something else than the agent answers ({error})",
                        hint="log in with ssh and run `true`: it must print nothing (look at ~/.bashrc on the box)",
                    ) from error
                if message["op"] == "step":
                    self._step = message["text"]
                    self._lines.step(self._step)
                    watchdog.arm("step", self._deadlines.step_seconds)
                elif message["op"] == "waiting":
                    self._lines.waiting(message["step"], message["text"], message["seconds"])
                elif message["op"] == "error":
                    self._raise(message)
                elif message["op"] != "alive":
                    return message
        finally:
            watchdog.disarm("quiet")
            watchdog.disarm("step")

    def _broken(self, error: BaseException) -> NoReturn:
        """The connection ended without an answer: say which deadline passed, or what the box printed."""
        watchdog = self._transport.watchdog
        again = "check power and cable, then provision again"
        if watchdog.expired:
            text = {"quiet": "the box was silent", "step": "the step did not end"}[watchdog.expired]
            message = f"{text} for {watchdog.expired_seconds:g} s; the connection was closed"
            raise BoxUnreachable(self._box, self._step, message, hint=again) from error
        status, printed = self._transport.finish()
        if status is not None and status < 0:  # a local process; ssh tells no signal
            message = f"the agent was killed by signal {-status}"
            raise BoxError(
                self._box, self._step, message, hint="out of memory? dmesg | tail; provision again"
            ) from error
        if status is None:
            raise BoxUnreachable(self._box, self._step, "the connection broke", hint=again) from error
        raise _start_error(self._box, self._step, status, printed.strip()) from error

    def _raise(self, message: Message) -> NoReturn:
        if message["kind"] == "bug":
            with tempfile.NamedTemporaryFile(
                "w", prefix=f"fleet-bug-{self._box}-", suffix=".txt", delete=False
            ) as file:
                file.write(message["detail"])
            raise BoxError(
                self._box,
                message["step"],
                f"a bug in fleet's agent: {message['message']}",
                hint=f"send {file.name} to the maintainers with the command you typed",
            )
        raise BoxError(
            self._box,
            message["step"],
            message["message"],
            hint=message["hint"],
            exit_code=EXIT_CODES[message["kind"]],
            detail=message["detail"],
        )

    def _send_contents(self, contents: list[Content]) -> None:
        """One stream: a header and chunks a content, each chunk compressed where that pays."""
        total = sum(content.size_bytes for content in contents)
        done, told = 0, time.monotonic()
        for content in contents:
            shared = self._transport.shares_files and content.file is not None
            header = {"op": "content", "sha256": content.sha256} | ({"file": str(content.file)} if shared else {})
            self._request(header)
            for message, chunk in [] if shared else chunks(content):
                data = encode(message, chunk)
                self._send(data)
                self._bytes_sent += len(data)
                done += message["bytes"]
                if time.monotonic() - told >= SENT_SECONDS:
                    told = time.monotonic()
                    self._lines.sent(self._step, done, total)


def _holder() -> str:
    return f"{getpass.getuser()} on {socket.gethostname()}"


def _start_error(box: str, step: str, status: int, printed: str) -> BoxError:
    """Why the agent did not start, from what sudo, the shell or Python printed."""
    last = printed.splitlines()[-1] if printed else "nothing printed"
    if "sudo:" in printed and ("password" in printed or "terminal" in printed or "tty" in printed):
        return BoxError(
            box,
            "sudo",
            f"sudo asks for a password ({last}), expected NOPASSWD",
            hint="allow it in /etc/sudoers.d on the box (NOPASSWD: ALL), or set user: root",
        )
    if status == 127:
        return BoxError(box, step, f"no python3 on the box ({last})", hint="apt-get install python3  (on the box)")
    return BoxError(box, step, f"the agent ended with {status}: {last}", detail=printed)


def open_session(site_file: SiteFile, box: str, ssh: SshSite, lines: StepLines) -> BoxSession:
    """Start the agent on a box: over ssh, or as a local process for `connection: local`.

    Raises:
        BoxUnreachable: no connection within its deadlines. BoxError: host key changed, sudo asks for a password,
            no usable Python.
    """
    with ExitStack() as stack:
        transport = stack.enter_context(open_transport(site_file, box, ssh))
        stack.enter_context(ssh.cancellation.closing(transport.hang_up))
        return BoxSession(box, transport, ssh.deadlines, lines, stack.pop_all())
