"""Connections against a real sshd, and against servers that misbehave as reported from the field."""

from __future__ import annotations

import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.errors import ExitCode
from fleet.inventory.model import Box
from fleet.ssh.connection import SshTarget, command_line, open_channel
from fleet.ssh.results import BoxError, BoxUnreachable
from fleet.ssh.site import SshSite

from .conftest import SSHD, Sshd, free_port, needs_root

MakeSite = Callable[..., SshSite]


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Run a TCP server that hands every connection to a function; gives its port."""
    servers: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(handle: Callable[[socket.socket], None]) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                handle(connection)

        threads.append(threading.Thread(target=accept))
        threads[-1].start()
        return int(server.getsockname()[1])

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
    for thread in threads:
        thread.join()


@needs_root
def test_command_runs_with_sbin_on_its_path(sshd: Sshd, make_site: MakeSite) -> None:
    with open_channel(sshd.target(), make_site(), ["sh", "-c", "echo $PATH; echo trouble >&2; exit 3"]) as channel:
        output = b""
        while part := channel.receive(1000):
            output += part
        assert output.startswith(b"/usr/local/sbin:")
        assert channel.finish() == (3, "trouble\n")


def test_first_use_is_pinned_and_reported(sshd: Sshd, make_site: MakeSite, lines: list[str], tmp_path: Path) -> None:
    store = tmp_path / ".fleet" / "test" / "known_hosts"
    with open_channel(sshd.target(), make_site(remember=False), ["true"]):
        assert not store.exists()
    assert "host key of box1" in lines.pop()
    with open_channel(sshd.target(), make_site(), ["true"]):
        pass
    keygen = ["ssh-keygen", "-l", "-f", str(sshd.directory / "host.pub")]
    shown = subprocess.run(keygen, capture_output=True, text=True, check=True).stdout.split()[1]
    assert lines == [f"host key of box1 pinned: {shown}"]
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    with open_channel(sshd.target(), make_site(), ["true"]):
        pass
    assert len(lines) == 1


def test_changed_host_key_is_refused_until_accepted(sshd: Sshd, make_site: MakeSite, lines: list[str]) -> None:
    with open_channel(sshd.target(), make_site(), ["true"]):
        pass
    sshd.stop()
    sshd.new_host_key()
    sshd.start()
    with pytest.raises(BoxError) as caught:
        open_channel(sshd.target(), make_site(), ["true"])
    error = caught.value
    assert error.exit_code is ExitCode.FAILED
    assert error.message.startswith("box1: host key: ")
    assert error.message.count("SHA256:") == 2
    assert "--accept-host-key box1" in error.hint
    with open_channel(sshd.target(), make_site(accept=("box1",)), ["true"]):
        pass
    assert "host key of box1 replaced (SHA256:" in lines[-1]
    with open_channel(sshd.target(), make_site(), ["true"]):
        pass


def test_refused_key_names_what_to_do(sshd: Sshd, make_site: MakeSite) -> None:
    other = sshd.directory / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    with pytest.raises(BoxError) as caught:
        open_channel(sshd.target(identity_file=str(other)), make_site(), ["true"])
    assert caught.value.exit_code is ExitCode.FAILED
    assert "authentication" in caught.value.message
    assert "ssh-copy-id" in caught.value.hint


def test_server_without_a_banner_is_unreachable(
    serve: Callable[[Callable[[socket.socket], None]], int], make_site: MakeSite
) -> None:
    held: list[socket.socket] = []
    target = SshTarget("box1", "127.0.0.1", serve(held.append), "root", "/nonexistent")
    with pytest.raises(BoxUnreachable, match=r"no SSH banner from root@127\.0\.0\.1 port \d+ within 0\.4 s"):
        open_channel(target, make_site(banner_seconds=0.4), ["true"])
    assert len(held) == 1  # silence is not retried: the box is given up once its deadline has passed
    held[0].close()


def test_server_that_hangs_after_its_banner_is_closed_from_outside(
    serve: Callable[[Callable[[socket.socket], None]], int], make_site: MakeSite
) -> None:
    held: list[socket.socket] = []

    def greet(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-Zombie\r\n")
        held.append(connection)

    target = SshTarget("box1", "127.0.0.1", serve(greet), "root", "/nonexistent")
    with pytest.raises(BoxUnreachable, match="box1: "):
        open_channel(target, make_site(banner_seconds=0.3, auth_seconds=0.3), ["true"])
    held[0].close()


def test_dropped_logins_are_retried(
    sshd: Sshd, serve: Callable[[Callable[[socket.socket], None]], int], make_site: MakeSite
) -> None:
    seen: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def drop_the_first(connection: socket.socket) -> None:
        seen.append(len(seen))
        if len(seen) > 1:  # what MaxStartups does to a burst, then a real login
            processes.append(
                subprocess.Popen([SSHD, "-i", "-f", sshd.configuration], stdin=connection, stdout=connection)
            )
        connection.close()

    target = sshd.target(port=serve(drop_the_first))
    with open_channel(target, make_site(), ["true"]):
        assert len(seen) == 2
    for process in processes:
        process.wait()


def test_closed_port_and_unknown_name_are_unreachable(make_site: MakeSite) -> None:
    with pytest.raises(BoxUnreachable, match="refused") as caught:
        open_channel(SshTarget("box1", "127.0.0.1", free_port(), "root"), make_site(), ["true"])
    assert caught.value.exit_code is ExitCode.UNREACHABLE
    with pytest.raises(BoxUnreachable, match=r"name box\.invalid is unknown"):
        open_channel(SshTarget("box1", "box.invalid", 22, "root"), make_site(), ["true"])


def test_unreadable_store_names_the_line(tmp_path: Path, make_site: MakeSite) -> None:
    store = tmp_path / ".fleet" / "test" / "known_hosts"
    store.parent.mkdir(parents=True)
    store.write_text("box1 ssh-ed25519\n")
    with pytest.raises(Exception, match=r"known_hosts:1: host key can't be read"):
        make_site()


def test_jump_hosts_are_refused_clearly() -> None:
    box = Box(address="10.0.0.1", profile="pi", jump="gate")
    with pytest.raises(BoxError, match="jump host gate is not supported in this version"):
        SshTarget.of("box1", box, None)
    assert SshTarget.of("box1", Box(address="10.0.0.1", profile="pi", jump="none"), None).gateway is None


def test_sudo_never_asks() -> None:
    assert command_line("root", ["python3", "-c", "a b"]).endswith("python3 -c 'a b'")
    assert command_line("pi", ["true"]).startswith("sudo -n env PATH=/usr/local/sbin:")
