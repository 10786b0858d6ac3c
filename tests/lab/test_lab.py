"""The lab's own tests: one case for each thing it can do to a box, on real boxes."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from datetime import datetime, timezone

import pytest

from tests.lab.errors import LabError
from tests.lab.fixtures import STAGE_BOXES
from tests.lab.lab import Lab, LabBox
from tests.lab.partition import HOST
from tests.lab.paths import CONTROL, NETWORK, LabPaths, standard_names
from tests.lab.power import SSH_PORT
from tests.lab.processes import ProcessRecord, run, wait_until
from tests.lab.settings import Shape
from tests.lab.tree import changed_paths, rewritten_paths

pytestmark = pytest.mark.lab

SKEW_SECONDS = 3600.0
SKEW_TOLERANCE_SECONDS = 60.0


def banner(box: LabBox) -> socket.socket:
    """An open connection to the box's sshd, banner read."""
    connection = socket.create_connection((box.address, SSH_PORT), timeout=5)
    assert connection.recv(4) == b"SSH-"
    return connection


def pings(box: LabBox, *words: str) -> str:
    """What ping's summary says, from another box."""
    return LabBox(box.lab, CONTROL).exec(["ping", "-n", "-q", *words, box.address], check=False).stdout


def test_boxes_boot_and_have_a_name_an_address_and_a_journal_of_their_own(lab: Lab) -> None:
    boxes = [lab.box(name) for name in standard_names(STAGE_BOXES)]
    assert [box.address for box in boxes] == [f"{NETWORK}.{number}" for number in (11, 12, 13, 14)]
    host_keys = set()
    for box in boxes:
        seen = box.ssh(["sh", "-c", "hostname; cat /proc/1/comm; ls /var/log/journal; ip -br addr show eth0"]).stdout
        hostname, init, machine, *device = seen.split()
        assert (hostname, init, len(machine)) == (box.name, "systemd", 32)
        assert f"{box.address}/24" in device
        assert box.exec(["cat", "/sys/class/net/eth0/address"]).stdout.strip() == box.paths.mac
        host_keys.add(box.exec(["cat", "/etc/ssh/ssh_host_ed25519_key.pub"]).stdout.split()[1])
    assert len(host_keys) == len(boxes)


def test_nothing_is_provisioned_on_a_new_box(lab: Lab) -> None:
    box = lab.box("control")
    pristine = box.tree_digest()
    box.exec(["mkdir", "/opt/fleet"])
    box.link_cut()
    lab.renew()
    assert box.exec(["getent", "passwd", "fleet"], check=False).exit_code != 0
    assert not box.inside("/opt/fleet").exists()
    machine_id_alone = {"/etc/machine-id": "changed"}
    assert changed_paths(pristine, box.tree_digest()) == machine_id_alone
    assert box.ssh(["hostname"]).stdout.strip() == box.name


def test_boxes_reach_no_registry_and_lab_traffic_never_leaves(lab: Lab) -> None:
    box = lab.box("box1")
    routes = box.exec(["ip", "route"]).stdout.splitlines()
    assert [route.split()[0] for route in routes] == [f"{NETWORK}.0/24"]
    assert "unreachable" in box.exec(["ping", "-c", "1", "198.51.100.1"], check=False).stderr
    refreshed = box.exec(["apt-get", "update", "-o", "Dir::State::lists=/tmp", "-o", "Acquire::Retries=0"], check=False)
    assert "resolving" in refreshed.stdout + refreshed.stderr
    assert "unreachable" in run(["ip", "route", "show", f"{NETWORK}.0/24", "metric", "9999"]).stdout


def test_power_cut_is_quiet_and_loses_what_was_not_synced(box: LabBox) -> None:
    box.exec(["mkdir", "-p", "/var/lib/lab-test"])
    box.exec(["sh", "-c", "echo kept >/var/lib/lab-test/synced; sync; echo lost >/var/lib/lab-test/unsynced"])
    with box.capture() as seen, banner(box) as first, banner(box) as second:
        ports = {name: end.getsockname()[1] for name, end in (("first", first), ("second", second))}
        box.exec(
            [
                "sh",
                "-c",
                f"kill $(ss -Htnp sport = :22 and dport = :{ports['first']} | grep -o 'pid=[0-9]*' | tr -dc '0-9\n')",
            ]
        )
        assert first.recv(4096)[:1] != b""  # the rest of sshd's banner
        assert first.recv(1) == b""
        box.power_cut()
        second.settimeout(1.0)
        second.recv(4096)
        with pytest.raises(TimeoutError):  # silence, not an end
            second.recv(1)
        seen.stop()
        said = [packet for packet in seen.tcp() if packet.source == box.address]
    assert any(packet.closes for packet in said if packet.destination_port == ports["first"])
    assert not any(packet.closes for packet in said if packet.destination_port == ports["second"])
    box.on()
    assert box.exec(["cat", "/var/lib/lab-test/synced"]).stdout == "kept\n"
    assert box.exec(["cat", "/var/lib/lab-test/unsynced"], check=False).stdout == ""
    assert box.exec(["hostname"]).stdout.strip() == box.name


def test_cut_link_has_no_carrier_and_stays_cut_over_a_power_cycle(box: LabBox) -> None:
    box.link_cut()
    assert "Link detected: no" in box.exec(["ethtool", "eth0"]).stdout
    assert " 0 received" in pings(box, "-c", "1", "-W", "1")
    box.off()
    box.on(wait=False)
    wait_until(lambda: box.inside("/sys/class/net/eth0/carrier").exists(), "boot", 10)
    assert box.exec(["cat", "/sys/class/net/eth0/carrier"]).stdout == "0\n"
    box.link_heal()
    box.wait_for_ssh()
    assert box.exec(["cat", "/sys/class/net/eth0/carrier"]).stdout == "1\n"


def test_shaped_cable_delays_drops_and_slows(box: LabBox) -> None:
    box.shape(Shape(delay_ms=40, jitter_ms=5))
    fastest_ms = float(pings(box, "-c", "3", "-i", "0.1").rpartition("= ")[2].split("/")[0])
    assert fastest_ms >= 2 * (40 - 5)
    box.shape(Shape(loss=0.3))
    received = int(pings(box, "-c", "100", "-i", "0.005", "-W", "1").split(" received")[0].split()[-1])
    assert 20 < received < 80  # 49 expected, standard deviation 5
    box.shape(Shape(rate_mbit=16))
    began = time.monotonic()
    box.ssh(["sh", "-c", "head -c 1000000 /dev/zero"])
    assert time.monotonic() - began > 0.4  # a megabyte at 16 Mbit/s takes half a second at least
    box.unshape()
    assert " 1 received" in pings(box, "-c", "1")


def test_partition_and_one_way_loss(lab: Lab) -> None:
    one, two, control = (lab.box(name) for name in ("box1", "box2", CONTROL))
    ping = ["ping", "-c", "1", "-W", "1"]
    lab.partition(["box1"], ["box2", HOST])
    assert one.exec([*ping, two.address], check=False).exit_code == 1
    assert one.exec([*ping, control.address]).exit_code == 0
    assert "Link detected: yes" in one.exec(["ethtool", "eth0"]).stdout
    with pytest.raises(OSError, match=r"timed out|unreachable|No route"):
        socket.create_connection((one.address, SSH_PORT), timeout=0.5)
    lab.lose_one_way("box1", "box2", 0.4)
    flood = ["ping", "-q", "-c", "100", "-i", "0.005", "-W", "1", two.address]
    received = int(one.exec(flood, check=False).stdout.split(" received")[0].split()[-1])
    assert 30 < received < 90  # 60 expected, standard deviation 5
    lab.heal()
    assert one.exec([*ping, two.address]).exit_code == 0
    one.wait_for_ssh()


def test_memory_limit_kills_and_the_box_sees_it_in_its_own_kernel_log(box: LabBox) -> None:
    kills = box.out_of_memory_kills
    box.memory_limit(box.memory_used_bytes + (64 << 20))
    greedy = box.exec(["python3", "-c", "held = bytearray(512 << 20)"], check=False)
    assert greedy.exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert box.out_of_memory_kills > kills
    assert any("Killed process" in line for line in box.show_out_of_memory_kills())
    assert "(python3)" in box.exec(["dmesg"]).stdout
    assert box.ssh(["true"]).exit_code == 0


def test_cpu_quota_throttles(box: LabBox) -> None:
    before = box.throttled_seconds
    box.cpu_quota(0.2)
    box.exec(["python3", "-c", "import time\nwhile time.process_time() < 0.2: pass"])
    assert box.throttled_seconds - before > 0.2
    with pytest.raises(LabError, match="minimum"):
        box.cpu_quota(0.01)


def test_frozen_box_answers_ping_and_nothing_else(box: LabBox) -> None:
    box.freeze()
    assert " 1 received" in pings(box, "-c", "1")
    with socket.create_connection((box.address, SSH_PORT), timeout=1) as connection, pytest.raises(TimeoutError):
        connection.recv(1)
    assert "frozen" in box.summary()
    box.thaw()
    box.wait_for_ssh()
    assert box.ssh(["hostname"]).stdout.strip() == box.name


def test_clock_of_one_box_is_shifted_and_can_be_set_from_inside(box: LabBox) -> None:
    read = ["python3", "-c", "import json, time; print(json.dumps([time.time(), time.monotonic()]))"]
    box.clock_skew(SKEW_SECONDS)
    wall, monotonic = json.loads(box.ssh(read).stdout)
    assert abs(wall - time.time() - SKEW_SECONDS) < SKEW_TOLERANCE_SECONDS
    assert abs(monotonic - time.monotonic()) < SKEW_TOLERANCE_SECONDS
    box.exec(["date", "--utc", "--set", "2001-02-03 04:05:06"])
    inside = datetime.fromtimestamp(float(box.ssh(["date", "+%s"]).stdout), timezone.utc)
    assert (inside.year, inside.month, inside.day) == (2001, 2, 3)
    assert datetime.now(timezone.utc).year > 2001
    box.clock_skew(0)
    assert abs(float(box.ssh(["date", "+%s"]).stdout) - time.time()) < SKEW_TOLERANCE_SECONDS


def test_only_a_stage_leaks_and_at_the_rate_that_was_set(box: LabBox) -> None:
    """Two seconds at 100 MB/s in a program that is called like the stage, and in one that is not."""
    box.leak(100_000_000)
    read = (
        "import re, time; time.sleep(2); print(re.findall(r'RssAnon:\\s+(\\d+)', open('/proc/self/status').read())[0])"
    )
    try:
        leaking, plain = (
            int(box.exec(["python3", "-c", read, *words]).stdout) for words in (["stage_runtime"], ["stage"])
        )
    finally:
        box.leak(0)
    assert plain < 50_000
    assert 100_000 < leaking < 2_000_000


def test_fake_heat_is_live(box: LabBox) -> None:
    box.set_temperature("cpu-thermal", 93.5)
    box.set_temperature("gpu-thermal", 40)
    read = ["sh", "-c", "cat /sys/class/thermal/thermal_zone*/type /sys/class/thermal/thermal_zone*/temp"]
    assert box.ssh(read).stdout.split() == ["cpu-thermal", "gpu-thermal", "93500", "40000"]
    box.set_temperature("cpu-thermal", 61)
    assert box.ssh(read).stdout.split()[2:] == ["61000", "40000"]


def test_fake_gpu_is_seen_through_nvml_and_nvidia_smi(box: LabBox) -> None:
    query = ["nvidia-smi", "--query-gpu=temperature.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]
    box.fake_gpu(temperature_celsius=93, used_mib=700)
    assert box.ssh(query).stdout == "93, 700, 8192\n"
    assert "GPU 0:" in box.ssh(["nvidia-smi", "-L"]).stdout
    box.fake_gpu(init_error=999)
    assert "nvmlInit_v2" in box.ssh(query, check=False).stderr
    with pytest.raises(LabError, match="colour"):
        box.fake_gpu(colour=1)


def test_full_disk_refuses_writes_until_space_is_back(box: LabBox) -> None:
    write = ["dd", "if=/dev/zero", "of=/var/lib/lab-more", "bs=1M", "count=4"]
    box.disk_fill()
    assert "No space left on device" in box.exec(write, check=False).stderr
    box.disk_unfill()
    assert box.exec(write).exit_code == 0
    box.exec(["rm", "/var/lib/lab-more"])


def test_box_reboots_itself(box: LabBox) -> None:
    box.exec(["sh", "-c", "echo here >/run/lab-mark; echo here >/var/lib/lab-mark"])
    boot = box.exec(["cat", "/proc/sys/kernel/random/boot_id"]).stdout
    box.reboot()
    assert box.exec(["cat", "/proc/sys/kernel/random/boot_id"]).stdout != boot
    assert not box.inside("/run/lab-mark").exists()
    assert box.exec(["cat", "/var/lib/lab-mark"]).stdout == "here\n"


def test_box_whose_launcher_dies_is_off_and_starts_again(box: LabBox) -> None:
    launcher = ProcessRecord.load(box.paths.launcher_record)
    assert launcher is not None
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not box.is_on, "end of the box", 5)
    with pytest.raises(LabError, match="is off"):
        box.exec(["true"])
    box.on()
    assert box.ssh(["hostname"]).stdout.strip() == box.name


def test_saved_image_is_restored(lab: Lab) -> None:
    box = lab.box("box2")
    box.exec(["sh", "-c", "mkdir -p /opt/thing && echo saved >/opt/thing/file"])
    lab.save("test-image")
    saved = box.tree_digest()
    assert box.exec(["cat", "/opt/thing/file"]).stdout == "saved\n"
    box.exec(["sh", "-c", "echo other >/opt/thing/file; mv /opt/thing /opt/moved; rm /etc/hosts; touch /opt/new"])
    lab.restore("test-image")
    assert changed_paths(saved, box.tree_digest()) == {}
    with pytest.raises(LabError, match="test-image"):
        lab.restore("no-such-image")


def test_sshd_counts_connections_and_sessions(box: LabBox) -> None:
    since = box.journal_cursor()
    box.exec(["true"])  # not over SSH
    box.ssh(["true"])
    box.ssh(["cat"], input_text="words")
    banner(box).close()  # never logs in
    counts = box.sshd_counts(since)
    assert counts.accepted == ("root", "root")
    assert counts.sessions == ("command", "command")
    assert counts.connections == 3


def test_tree_digest_shows_what_was_touched_and_no_more(box: LabBox) -> None:
    box.exec(["sh", "-c", "echo one >/etc/lab-file; echo same >/etc/lab-same"])
    before = box.tree_digest()
    box.ssh(["true"])
    assert changed_paths(before, box.tree_digest()) == {}
    box.exec(
        ["sh", "-c", "echo two >/etc/lab-file; touch /etc/lab-same; chmod 600 /etc/lab-same; chmod 644 /etc/lab-same"]
    )
    after = box.tree_digest()
    assert changed_paths(before, after) == {"/etc/lab-file": "changed"}
    assert rewritten_paths(before, after) == {"/etc/lab-file", "/etc/lab-same"}
    assert "/etc/passwd" in after
    assert not any(path.startswith(("/proc/", "/var/log/")) for path in after)


def test_dropped_page_cache_is_read_from_the_disk_again(box: LabBox) -> None:
    program = "import os; open('/opt/lab-big', 'rb').read(); print(open('/proc/self/io').read())"
    box.exec(["sh", "-c", "head -c 20000000 /dev/urandom >/opt/lab-big"])
    box.drop_page_cache()
    counters = dict(line.split(": ") for line in box.exec(["python3", "-c", program]).stdout.splitlines() if line)
    assert int(counters["read_bytes"]) >= 20_000_000


def test_small_disk_is_small(lab: Lab) -> None:
    (small,) = lab.up(["box9"], disk_mib=64)
    try:
        blocks, block = small.exec(["stat", "-f", "--format=%b %S", "/"]).stdout.split()
        assert int(blocks) * int(block) < 64 << 20
        assert small.address == f"{NETWORK}.20"
    finally:
        small.kill()
        lab.remove("box9")
    assert "box9" not in [box.name for box in lab.boxes]


def test_a_second_lab_on_the_machine_is_refused(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = Lab(LabPaths(tmp_path_factory.mktemp("other")))
    with pytest.raises(LabError, match="another lab runs"):
        other.up(["box1"])
    assert lab.box("box1").ssh(["true"]).exit_code == 0
