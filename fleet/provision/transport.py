"""How the agent gets to a box: over an ssh channel, or as a process of this machine (`connection: local`). Both carry
the same program and the same messages."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import fleet.provision.agent
from fleet.inventory.sitefile import SiteFile
from fleet.ssh.site import SshSite
from fleet.ssh.watchdog import Watchdog

AGENT_PACKAGE = "fleet.provision.agent"
# Reads the length of the program, the program, and runs it: nothing is written to the box's disk.
BOOTSTRAP = (
    "import sys,zlib;i=sys.stdin.buffer;"
    "exec(compile(zlib.decompress(i.read(int(i.readline()))),'<fleet agent>','exec'))"
)
# Makes modules importable from memory and runs one's main(). `{sources!r}` maps module name to source.
LOADER = """
import importlib.abc, importlib.util, sys
SOURCES = {sources!r}
class Loader(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    def find_spec(self, name, path, target=None):
        if name in SOURCES:
            return importlib.util.spec_from_loader(name, self, is_package=self.is_package(name))
    def is_package(self, name):
        return any(other.startswith(name + ".") for other in SOURCES)
    def get_source(self, name):
        return SOURCES[name]
    def get_filename(self, name):
        return name.replace(".", "/") + ".py"
sys.meta_path.insert(0, Loader())
from {main} import main
main()
"""
AGENT_ARGUMENTS = ["-I", "-B", "-c", BOOTSTRAP]
END_SECONDS = 5.0  # a local agent ends by itself when its input ends
STDERR_BYTES = 64 * 1024


class Transport(AbstractContextManager["Transport"], Protocol):
    """Bytes to and from an agent that was started.

    Attributes:
        watchdog: ends the transport when an armed deadline passes.
        shares_files: operator and box are one machine; content may be named by its path.
    """

    watchdog: Watchdog
    shares_files: bool

    def send(self, data: bytes) -> None:
        """Send all; raises OSError when the transport is closed."""

    def receive(self, maximum: int) -> bytes:
        """1..maximum bytes; b"" at the end."""

    def finish(self) -> tuple[int | None, str]:
        """After the end: (exit status, stderr); status None if the connection broke."""

    def abort(self) -> None:
        """Close from another thread."""

    def hang_up(self) -> None:
        """Close from another thread because the operator gives the run up: the agent ends, but finishes an activation
        that it has begun, so that no box is left between two releases."""


@functools.cache
def agent_program() -> bytes:
    """The agent as one message."""
    directory = Path(fleet.provision.agent.__file__).parent
    sources = {"fleet": "", "fleet.provision": ""}
    for file in sorted(directory.glob("*.py")):
        name = AGENT_PACKAGE if file.stem == "__init__" else f"{AGENT_PACKAGE}.{file.stem}"
        sources[name] = file.read_text(encoding="utf-8")
    return packed(sources, f"{AGENT_PACKAGE}.main")


def packed(sources: Mapping[str, str], main: str) -> bytes:
    """A program as `BOOTSTRAP` takes it: its length in decimal, a newline, the compressed source.

    Args:
        sources: module name → source; packages too, with the source of their `__init__`.
        main: the module whose `main()` is called.
    """
    program = zlib.compress(LOADER.format(sources=dict(sources), main=main).encode(), 9)
    return b"%d\n" % len(program) + program


class LocalProcess:
    """An agent as a child process, in a session of its own, so that Ctrl-C reaches only the operator's side."""

    shares_files = True

    def __init__(self, argv: list[str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._socket, other = socket.socketpair()  # unlike a pipe, another thread can shut it down
        with other:
            self._process = subprocess.Popen(
                argv, stdin=other.fileno(), stdout=other.fileno(), stderr=self._stderr, start_new_session=True
            )
        self._hung_up = False
        self.watchdog = Watchdog(self.abort)

    def send(self, data: bytes) -> None:
        """See Transport."""
        self._socket.sendall(data)

    def receive(self, maximum: int) -> bytes:
        """See Transport."""
        return self._socket.recv(maximum)

    def finish(self) -> tuple[int | None, str]:
        """See Transport."""
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return None, ""
        self._stderr.seek(0)
        return status, self._stderr.read(STDERR_BYTES).decode(errors="replace")

    def abort(self) -> None:
        """Kill the agent; the kernel frees its locks, what arrived stays for the next run."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)

    def hang_up(self) -> None:
        """See Transport. The agent ignores SIGTERM while it activates."""
        self._hung_up = True
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(OSError):  # the agent has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> LocalProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.watchdog.stop()
        self._socket.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            if not self._hung_up:
                self.abort()
                self._process.wait()
        self._stderr.close()


def open_transport(site_file: SiteFile, name: str, ssh: SshSite) -> Transport:
    """Start an agent on a box; the program itself is sent by the session.

    Raises:
        BoxError, BoxUnreachable: see `fleet.ssh.connection.open_channel`.
    """
    box = site_file.site.boxes[name]
    if box.connection == "local":
        return LocalProcess([sys.executable, *AGENT_ARGUMENTS])
    from fleet.ssh.connection import SshTarget, open_channel

    identity_file = None if box.identity_file is None else str(site_file.resolve(box.identity_file))
    return open_channel(SshTarget.of(name, box, identity_file), ssh, ["python3", *AGENT_ARGUMENTS])
