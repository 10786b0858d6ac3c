"""A real sshd on loopback as the current user."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from fleet.inventory.model import Site
from fleet.inventory.sitefile import SiteFile
from fleet.ssh.connection import SshTarget
from fleet.ssh.site import SshSite

USER = pwd.getpwuid(os.geteuid()).pw_name
SSHD = Path("/usr/sbin/sshd")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="commands of another user than root go through sudo")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class Sshd:
    """A running sshd and the client key that it accepts."""

    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def configuration(self) -> Path:
        return self.directory / "sshd_config"

    @property
    def identity(self) -> Path:
        return self.directory / "client"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def new_host_key(self) -> None:
        for file in self.directory.glob("host*"):
            file.unlink()
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
        subprocess.run([*keygen, str(self.directory / "host")], check=True)

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", self.configuration, "-p", str(self.port)], stderr=log
            )
        for _ in range(200):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError(f"sshd did not start: {self.log}")

    def stop(self) -> None:
        assert self.process is not None
        for child in self.children():
            with suppress(psutil.NoSuchProcess):  # a session that was just ending is gone by itself
                child.kill()
        self.process.terminate()
        self.process.wait()

    def children(self, name: str | None = None) -> list[psutil.Process]:
        """Its sessions' processes, or those of a name; one that ends meanwhile is left out."""
        assert self.process is not None
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if name is None or child.name() == name:
                    found.append(child)
        return found

    def target(self, **changes: object) -> SshTarget:
        target = SshTarget("box1", "127.0.0.1", self.port, USER, str(self.identity))
        return replace(target, **changes)  # type: ignore[arg-type]


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    if not SSHD.exists():
        if os.geteuid() == 0:
            pytest.fail("sshd is missing: apt-get install openssh-server")
        pytest.skip("sshd is not installed")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = Sshd(tmp_path / "sshd", free_port())
    server.directory.mkdir()
    server.new_host_key()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(server.identity)], check=True)
    server.configuration.write_text(
        f"ListenAddress 127.0.0.1\nHostKey {server.directory}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {server.identity}.pub\nPasswordAuthentication no\nPermitRootLogin yes\nLogLevel VERBOSE\n"
    )
    server.start()
    yield server
    server.stop()


@pytest.fixture
def lines() -> list[str]:
    """What was reported."""
    return []


@pytest.fixture
def make_site(tmp_path: Path, lines: list[str]) -> Callable[..., SshSite]:
    """An SshSite with quick deadlines."""

    def make(accept: tuple[str, ...] = (), remember: bool = True, **deadlines: float) -> SshSite:
        file = site_file(tmp_path, 22)
        site = SshSite.of(file, report=lines.append, accept_host_keys=accept, remember_host_keys=remember)
        return replace(site, deadlines=replace(site.deadlines, **deadlines))

    return make


def site_file(directory: Path, port: int, identity: Path | None = None) -> SiteFile:
    """A site of one ssh box on loopback."""
    site = Site.model_validate(
        {
            "site": "test",
            "prefix": str(directory / "prefix"),
            "device_profiles": {"this": {"architecture": "x86_64"}},
            "boxes": {
                "box1": {
                    "address": "127.0.0.1",
                    "port": port,
                    "user": USER,
                    "identity_file": None if identity is None else str(identity),
                    "profile": "this",
                }
            },
            "models": {"tiny": {"source": {"path": "tiny.gguf"}, "licence": "none"}},
            "pipelines": {"main": {"model": "tiny", "boxes": ("box1",)}},
        }
    )
    return SiteFile(site, directory / "site.yaml", {})
