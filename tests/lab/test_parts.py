"""Parts of the lab that need no boxes."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab import cgroups, packages
from tests.lab.__main__ import main
from tests.lab.capture import ACK, FIN, RST, SYN, TcpPacket, tcp_packet
from tests.lab.errors import LabError
from tests.lab.faults import out_of_memory_lines
from tests.lab.partition import HOST, drop_rule, partition_rules
from tests.lab.paths import LARGEST_NUMBER, BoxPaths, LabPaths, number_of, standard_names
from tests.lab.processes import ProcessRecord, wait_until
from tests.lab.settings import BoxSettings, Shape
from tests.lab.tree import changed_paths, read_tree, rewritten_paths
from tests.lab.views import count_sshd
from tests.lab.wire import QUEUE_FRAMES, Direction

NOBODY = 65534
KERNEL_LOG = "\n".join(
    f"[ {second}.0] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
    f"oom_memcg=/a/fleet-lab/{box},task_memcg=/a/fleet-lab/{box}/system.slice,task={task},pid={pid},uid=0\n"
    f"[ {second}.1] Memory cgroup out of memory: Killed process {pid} ({task}) total-vm:539836kB, anon-rss:64000kB"
    for second, box, task, pid in ((10, "box1", "python3", 77), (11, "box12", "java", 78))
)
SSHD_LOG = [
    'Connection from 10.77.0.1 port 51234 on 10.77.0.11 port 22 rdomain ""',
    "Accepted key ED25519 SHA256:abc found at /root/.ssh/authorized_keys:1",
    "Accepted publickey for root from 10.77.0.1 port 51234 ssh2: ED25519 SHA256:abc",
    "Starting session: command for root from 10.77.0.1 port 51234 id 0",
    "Starting session: subsystem 'sftp' for root from 10.77.0.1 port 51234 id 1",
    "Starting session: shell on pts/0 for root from 10.77.0.1 port 51234 id 2",
    "Connection closed by 10.77.0.1 port 40000 [preauth]",
]


def test_every_box_has_a_number_of_its_own_and_control_has_four() -> None:
    names = [*(f"box{number}" for number in range(1, LARGEST_NUMBER)), "control"]
    assert len({number_of(name) for name in names}) == len(names)
    assert [number_of(name) for name in ("box1", "box3", "control", "box4")] == [1, 3, 4, 5]
    assert standard_names(2) == ["box1", "box2", "control"]
    assert BoxPaths("control", Path()).mac == "02:77:00:00:00:04"
    assert len(BoxPaths("box98", Path()).port) < 16  # IFNAMSIZ


@pytest.mark.parametrize("name", ["", "box0", "box99", "box01", "Box1", "box1\n", "../x", "control2"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(LabError, match="no box is called"):
        LabPaths().box(name)


def test_own_cgroup_paths() -> None:
    text = "9:name=systemd:/x\n4:memory:/caller/a:b\n2:cpu,cpuacct:/\n0::/unified\n"
    assert cgroups.own_paths(text) == {
        "name=systemd": "/x", "memory": "/caller/a:b", "cpu": "/", "cpuacct": "/", "": "/unified",
    }  # fmt: skip


def test_out_of_memory_lines_are_those_of_one_cgroup() -> None:
    assert out_of_memory_lines(KERNEL_LOG, "/a/fleet-lab/box1") == KERNEL_LOG.splitlines()[:2]
    assert out_of_memory_lines(KERNEL_LOG, "/a/fleet-lab/box2") == []


def test_sshd_lines_are_counted() -> None:
    counts = count_sshd(SSHD_LOG)
    assert counts.connections == 1
    assert counts.accepted == ("root",)
    assert counts.sessions == ("command", "subsystem 'sftp'", "shell on pts/0")


def ethernet_tcp(flags: int) -> bytes:
    """A frame from 10.77.0.11:22 to 10.77.0.1:4000 by the header layouts of RFC 791 and RFC 9293."""
    ip = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 40, 1, 0x4000, 64, 6, 0, socket.inet_aton("10.77.0.11"), socket.inet_aton("10.77.0.1")
    )
    tcp = struct.pack("!HHIIBBHHH", 22, 4000, 1, 1, 5 << 4, flags, 1000, 0, 0)
    return b"\x02" * 12 + b"\x08\x00" + ip + tcp


@pytest.mark.parametrize(("flags", "closes"), [(SYN, False), (ACK, False), (FIN | ACK, True), (RST, True)])
def test_tcp_is_decoded(flags: int, closes: bool) -> None:
    packet = tcp_packet(1.5, ethernet_tcp(flags))
    assert packet == TcpPacket(1.5, "10.77.0.11", 22, "10.77.0.1", 4000, flags)
    assert packet.closes is closes


@given(st.binary(max_size=80))
def test_any_frame_is_decoded_or_none(frame: bytes) -> None:
    packet = tcp_packet(0.0, frame)
    assert packet is None or frame[12:14] == b"\x08\x00"


@given(
    delay_ms=st.floats(0, 1000),
    jitter_ms=st.floats(0, 1000),
    rate_mbit=st.floats(0.1, 1000),
    sizes=st.lists(st.integers(60, 1514), min_size=1, max_size=30),
)
def test_wire_keeps_delay_and_rate(delay_ms: float, jitter_ms: float, rate_mbit: float, sizes: list[int]) -> None:
    with socket.socket() as first, socket.socket() as second:
        direction = Direction(Shape(delay_ms=delay_ms, jitter_ms=jitter_ms, rate_mbit=rate_mbit), first, second)
        sent = 0
        for size in sizes:
            leaves = direction.leaves_at(100.0, size)
            sent += size
            assert leaves is not None
            on_the_cable = sent * 8 / (rate_mbit * 1e6)
            earliest, latest = (max(0.0, delay_ms + sign * jitter_ms) / 1e3 for sign in (-1, 1))
            assert 100 + on_the_cable + earliest - 1e-6 <= leaves <= 100 + on_the_cable + latest + 1e-6


def test_wire_loses_all_or_what_its_queue_cannot_hold() -> None:
    with socket.socket() as first, socket.socket() as second:
        assert Direction(Shape(loss=1.0), first, second).leaves_at(0.0, 100) is None
        full = Direction(Shape(), first, second)
        full.in_flight = QUEUE_FRAMES
        assert full.leaves_at(0.0, 100) is None


@pytest.mark.parametrize("values", [{"loss": 1.5}, {"loss": -0.1}, {"delay_ms": -1.0}, {"rate_mbit": -1.0}])
def test_impossible_shapes_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(LabError, match="probability"):
        Shape(**values)


def test_partition_rules_join_only_different_groups() -> None:
    rules = partition_rules([["box1"], ["box2", HOST]])
    assert len(rules) == 4
    assert 'iifname { "p-box1", "x-box1" } oifname { "uplink" } drop' in rules
    assert "mod 1000 < 100 drop" in drop_rule("box1", "box2", 0.1)
    with pytest.raises(LabError, match="named twice"):
        partition_rules([["box1"], ["box1"]])
    with pytest.raises(LabError, match="probability"):
        drop_rule("box1", "box2", 2)


def test_settings_survive_and_damage_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    settings = BoxSettings(disk_mib=64, tree="/t", layers=["/a"], link_cut=True, shape=Shape(loss=0.5))
    settings.save(file)
    assert BoxSettings.load(file) == settings
    file.write_text(file.read_text(encoding="utf-8")[:-5], encoding="utf-8")
    with pytest.raises(LabError, match=r"settings\.json is damaged"):
        BoxSettings.load(file)


def test_tree_changes_are_told_apart(tmp_path: Path) -> None:
    for name in ("kept", "edited", "touched", "gone"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "scratch").write_text("x", encoding="utf-8")
    before = read_tree(tmp_path)
    (tmp_path / "edited").write_text("y", encoding="utf-8")
    (tmp_path / "touched").chmod(0o600)
    (tmp_path / "touched").chmod((before["/touched"].mode) & 0o7777)
    (tmp_path / "gone").unlink()
    (tmp_path / "new").write_text("x", encoding="utf-8")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("edited")
    (tmp_path / "tmp" / "more").write_text("x", encoding="utf-8")
    after = read_tree(tmp_path)
    assert changed_paths(before, after) == {
        "/edited": "changed", "/gone": "removed", "/new": "added", "/link": "changed",
    }  # fmt: skip
    assert {"/edited", "/touched"} <= rewritten_paths(before, after)
    assert "/kept" not in rewritten_paths(before, after)


def test_record_of_another_process_kills_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mine = ProcessRecord.of(process.pid)
        ProcessRecord(mine.pid, mine.started_ticks + 1).kill()
        assert mine.alive
        mine.kill(signal.SIGTERM)
        wait_until(lambda: not mine.alive, "end of the process", 5)
        assert process.wait() == -signal.SIGTERM


def test_package_list_is_read() -> None:
    names = packages.wanted(packages.PACKAGE_LIST.read_text(encoding="utf-8"))
    assert {"systemd-container", "mmdebstrap", "openssh-client", "gcc"} <= set(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("earlier", [None, "#!/bin/sh\nexit 0\n"])
@pytest.mark.parametrize("trouble", [None, KeyboardInterrupt, LabError])
def test_earlier_policy_is_put_back(tmp_path: Path, earlier: str | None, trouble: type[BaseException] | None) -> None:
    policy = tmp_path / "policy-rc.d"
    if earlier:
        policy.write_text(earlier, encoding="utf-8")
        policy.chmod(0o750)
    try:
        with packages.no_server_starts(policy):
            assert subprocess.run([str(policy)], check=False).returncode == 101
            if trouble:
                raise trouble("in between")
    except (KeyboardInterrupt, LabError):
        assert trouble is not None
    if earlier:
        assert policy.read_text(encoding="utf-8") == earlier
        assert policy.stat().st_mode & 0o777 == 0o750
    assert [path.name for path in tmp_path.iterdir()] == (["policy-rc.d"] if earlier else [])


def test_policy_of_a_killed_run_is_put_back_by_the_next(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text(packages.FORBID_ALL, encoding="utf-8")
    policy.with_name(policy.name + packages.POLICY_ASIDE_SUFFIX).write_text("the user's", encoding="utf-8")
    with packages.no_server_starts(policy):
        pass
    assert policy.read_text(encoding="utf-8") == "the user's"


def test_without_root_one_line_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    child = os.fork()
    if child == 0:  # a process of its own, because root cannot be taken back
        if os.geteuid() == 0:
            os.setuid(NOBODY)
        os._exit(main(["status"]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    said = capfd.readouterr().err
    assert "needs root" in said
    assert "sudo" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "verb", ["up", "down", "status", "on", "off", "cut", "heal", "ssh", "exec", "shape", "skew", "mem"]
)
def test_every_verb_has_help_with_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert "python -m tests.lab up 3" in capsys.readouterr().out
