"""One connection to one box on Fabric: each part has its own deadline, and a watchdog enforces them from outside."""

from __future__ import annotations

import contextlib
import logging
import random
import shlex
import socket
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import fabric
import paramiko

from fleet.inventory.model import Box
from fleet.ssh.deadlines import Deadlines
from fleet.ssh.hostkeys import HostKeyStore, PinnedPolicy
from fleet.ssh.results import BoxError, BoxUnreachable
from fleet.ssh.site import SshSite
from fleet.ssh.watchdog import Watchdog

# a login that is not root's often lacks sbin, and tools would seem missing
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BANNER_ATTEMPTS = 4  # sshd (MaxStartups) and jump hosts drop logins at random when many come at once
BANNER_RETRY_SECONDS = 1.0  # wait before the second attempt, doubled each time, plus up to as much jitter
EXIT_STATUS_SECONDS = 5.0  # the exit status follows the end of output at once
STDERR_BYTES = 64 * 1024

# paramiko reports every failed login through logging as well, and logging prints it where nobody configured it
logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclass(frozen=True)
class SshTarget:
    """Where to log in.

    Attributes:
        box: its name in the inventory; host keys are pinned by it.
        address, port, user: of sshd.
        identity_file: private key; None: the agent's and ssh's default keys.
        gateway: a connection to reach it through; none in this version.
    """

    box: str
    address: str
    port: int
    user: str
    identity_file: str | None = None
    gateway: fabric.Connection | None = None

    @classmethod
    def of(cls, name: str, box: Box, identity_file: str | None) -> SshTarget:
        """From the inventory.

        Raises:
            BoxError: the box names a jump host.
        """
        if box.jump is not None and box.jump.lower() != "none":
            raise BoxError(
                name,
                "connect",
                f"its jump host {box.jump} is not supported in this version",
                hint="give the box an address that this machine reaches directly, and remove `jump`",
            )
        return cls(name, box.address, box.port, box.user, identity_file)


class SshChannel:
    """One command on a box and the bytes that go in and out. Use as a context manager.

    Attributes:
        watchdog: its deadlines end the connection; whoever waits arms them.
        shares_files: False: operator and box are two machines.
    """

    shares_files = False

    def __init__(self, box: str, connection: fabric.Connection, channel: paramiko.Channel, watchdog: Watchdog) -> None:
        self._box = box
        self._connection = connection
        self._channel = channel
        self.watchdog = watchdog

    def send(self, data: bytes) -> None:
        """Send all bytes; raises OSError once the connection is closed."""
        self._channel.sendall(data)

    def receive(self, maximum: int) -> bytes:
        """1..maximum bytes, b"" at the end."""
        return bytes(self._channel.recv(maximum))

    def finish(self) -> tuple[int | None, str]:
        """After the end of output: (exit status, last text on stderr); None if the connection broke."""
        if not self._channel.status_event.wait(EXIT_STATUS_SECONDS):
            return None, ""
        parts = []
        while self._channel.recv_stderr_ready():
            parts.append(self._channel.recv_stderr(STDERR_BYTES))
        status = int(self._channel.exit_status)
        return (None if status < 0 else status), b"".join(parts).decode(errors="replace")

    def close(self) -> None:
        """End command and connection."""
        self.watchdog.stop()
        _abort(self._connection)
        self._connection.close()

    def abort(self) -> None:
        """Close from another thread, without waiting for anything."""
        _abort(self._connection)

    def hang_up(self) -> None:
        """The same: the agent sees the end of its input, finishes what it has begun, and ends."""
        self.abort()

    def __enter__(self) -> SshChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _abort(connection: fabric.Connection) -> None:
    """Shut the socket down: every wait inside the library ends at once (its own close may block on a peer that no
    longer reads)."""
    sock = connection.connect_kwargs["sock"]
    with contextlib.suppress(OSError):  # already closed
        sock.shutdown(socket.SHUT_RDWR)


def open_channel(target: SshTarget, ssh: SshSite, argv: list[str]) -> SshChannel:
    """Log in and start one command, as root (through `sudo -n` for another user), with sbin on its PATH.

    Raises:
        BoxUnreachable: no TCP connection, no banner, no session within their deadlines.
        BoxError: host key changed, or the login was refused.
    """
    connection, watchdog = _connect_with_retries(target, ssh)
    try:
        return _start(target, connection, watchdog, ssh.deadlines, argv)
    except BaseException:
        watchdog.stop()
        _abort(connection)
        connection.close()
        raise


def _connect_with_retries(target: SshTarget, ssh: SshSite) -> tuple[fabric.Connection, Watchdog]:
    wait_seconds = BANNER_RETRY_SECONDS
    for attempt in range(1, BANNER_ATTEMPTS + 1):
        ssh.starts.wait(ssh.cancellation)
        began = time.monotonic()
        try:
            return _connect(target, ssh.host_keys, ssh.deadlines, ssh)
        except paramiko.SSHException as error:
            silent = time.monotonic() - began >= ssh.deadlines.banner_seconds
            if "banner" not in str(error) or silent or attempt == BANNER_ATTEMPTS or ssh.cancellation.cancelled:
                raise _login_error(target, error, ssh.deadlines, silent) from error
            ssh.cancellation.sleep(wait_seconds + random.uniform(0, wait_seconds))  # noqa: S311 - jitter, no secret
            wait_seconds *= 2
    raise AssertionError("the last attempt returns or raises")


def _login_error(target: SshTarget, error: paramiko.SSHException, deadlines: Deadlines, silent: bool) -> BoxError:
    place = f"{target.user}@{target.address} port {target.port}"
    by_hand = f"ssh -p {target.port} {target.user}@{target.address} true"
    if isinstance(error, paramiko.AuthenticationException):
        keys = target.identity_file or "the ssh agent's and the default keys"
        return BoxError(
            target.box,
            "authentication",
            f"{place} does not accept {keys} ({error})",
            hint=f"ssh-copy-id -p {target.port} {target.user}@{target.address}, or set identity_file in the inventory",
        )
    if "banner" in str(error):
        message = f"no SSH banner from {place} within {deadlines.banner_seconds:g} s"
        if not silent:
            message = f"{place} closed {BANNER_ATTEMPTS} connections before its SSH banner"
        return BoxUnreachable(target.box, "banner", message, hint=by_hand)
    return BoxUnreachable(target.box, "key exchange", f"{place}: {error}", hint=by_hand)


def _connect(
    target: SshTarget, store: HostKeyStore, deadlines: Deadlines, ssh: SshSite
) -> tuple[fabric.Connection, Watchdog]:
    """TCP, banner, key exchange, host key, login.

    Raises:
        BoxError, and paramiko.SSHException for what a retry may mend.
    """
    sock = _tcp(target, deadlines.connect_seconds)
    connection = fabric.Connection(
        target.address,
        user=target.user,
        port=target.port,
        gateway=target.gateway,
        # all a connection needs stands in the inventory: neither ssh's nor fabric's own files can redirect it
        config=fabric.Config(overrides={"load_ssh_configs": False}, lazy=True),
        connect_kwargs=_connect_arguments(target, deadlines, sock),
    )
    connection.client.set_missing_host_key_policy(PinnedPolicy(store, target.box))
    expected = store.expected(target.box)
    if expected is not None:
        name = target.address if target.port == 22 else f"[{target.address}]:{target.port}"
        connection.client.get_host_keys().add(name, expected.get_name(), expected)
    watchdog = Watchdog(lambda: _abort(connection))
    watchdog.arm("login", deadlines.banner_seconds + deadlines.auth_seconds)
    try:
        with ssh.cancellation.closing(lambda: _abort(connection)):
            connection.open()
        watchdog.disarm("login")
    except paramiko.BadHostKeyException as error:
        raise store.changed(target.box, error.expected_key, error.key) from error
    except (EOFError, OSError) as error:
        message = f"{target.address} port {target.port} closed the connection: {error or 'end of data'}"
        raise BoxUnreachable(target.box, "login", message) from error
    finally:
        if not connection.is_connected or watchdog.expired:
            watchdog.stop()
            _abort(connection)
            connection.close()
    return connection, watchdog


def _connect_arguments(target: SshTarget, deadlines: Deadlines, sock: socket.socket) -> dict[str, Any]:
    return {
        "sock": sock,
        "banner_timeout": deadlines.banner_seconds,
        "auth_timeout": deadlines.auth_seconds,
        "channel_timeout": deadlines.channel_seconds,
        "key_filename": [target.identity_file] if target.identity_file else None,
        "allow_agent": target.identity_file is None,
        "look_for_keys": target.identity_file is None,
    }


def _tcp(target: SshTarget, connect_seconds: float) -> socket.socket:
    try:
        return socket.create_connection((target.address, target.port), timeout=connect_seconds)
    except socket.gaierror as error:
        message = f"the name {target.address} is unknown ({error.strerror})"
        raise BoxUnreachable(target.box, "connect", message, hint=f"getent hosts {target.address}") from error
    except TimeoutError as error:
        message = f"no answer from {target.address} port {target.port} within {connect_seconds:g} s"
        raise BoxUnreachable(target.box, "connect", message, hint=f"ping {target.address}") from error
    except OSError as error:
        message = f"{target.address} port {target.port}: {error.strerror or error}"
        raise BoxUnreachable(target.box, "connect", message, hint=f"ping {target.address}") from error


def _start(
    target: SshTarget, connection: fabric.Connection, watchdog: Watchdog, deadlines: Deadlines, argv: list[str]
) -> SshChannel:
    transport = connection.transport
    transport.set_keepalive(deadlines.keepalive_seconds)
    watchdog.arm("channel", deadlines.channel_seconds)
    try:
        channel = transport.open_session(timeout=deadlines.channel_seconds)
        channel.exec_command(command_line(target.user, argv))
    except (paramiko.SSHException, EOFError, OSError) as error:
        message = f"sshd opened no session within {deadlines.channel_seconds:g} s ({error or 'end of data'})"
        raise BoxUnreachable(target.box, "channel", message) from error
    watchdog.disarm("channel")
    return SshChannel(target.box, connection, channel, watchdog)


def command_line(user: str, argv: list[str]) -> str:
    """The command as the box's shell gets it: sbin on PATH, and `sudo -n` (never a prompt) unless the user is root."""
    words = ["env", f"PATH={PATH}", *argv]
    return shlex.join(words if user == "root" else ["sudo", "-n", *words])
