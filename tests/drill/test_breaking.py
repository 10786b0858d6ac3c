"""Breaking a real process under a real supervisord, and what heals it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleet.drill.breaking import Breaker, order_of, program, strain_order
from fleet.inventory.sitefile import SiteFile
from fleet.provision.agent.rpc import SupervisorRpc
from fleet.provision.render_layout import layout_of
from fleet.provision.transport import AGENT_ARGUMENTS
from fleet.ssh.results import BoxError
from fleet.ssh.site import SshSite
from tests.drill.conftest import process_state, until


def ssh(site_file: SiteFile) -> SshSite:
    return SshSite.of(site_file, report=lambda line: None)


def stage_id(supervisor: SupervisorRpc) -> int:
    return int(supervisor.programs()["stage"]["pid"])


def order(site_file: SiteFile, kind: Any, seconds: float = 0.0) -> dict[str, Any]:
    return order_of(site_file, "box1", kind, seconds)


def test_kill_kills_the_stage_and_supervisord_starts_it_again(site_file: SiteFile, supervisor: SupervisorRpc) -> None:
    before = stage_id(supervisor)
    with Breaker(site_file, "box1", ssh(site_file), order(site_file, "kill")) as breaker:
        assert breaker.strike() == f"killed the stage (process {before})"
    until(lambda: stage_id(supervisor) not in {0, before}, "another process of the stage")


def test_nothing_breaks_without_a_strike(site_file: SiteFile, supervisor: SupervisorRpc) -> None:
    before = stage_id(supervisor)
    with Breaker(site_file, "box1", ssh(site_file), order(site_file, "kill")):
        pass
    assert (stage_id(supervisor), process_state(before)) == (before, "S")


def test_a_hang_ends_by_itself_although_the_operator_is_gone(site_file: SiteFile, supervisor: SupervisorRpc) -> None:
    process_id = stage_id(supervisor)
    operator = subprocess.Popen([sys.executable, *AGENT_ARGUMENTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert operator.stdin is not None
    assert operator.stdout is not None
    operator.stdin.write(program() + json.dumps(order(site_file, "hang", 2.0)).encode() + b"\ngo\n")
    operator.stdin.flush()
    answers = [json.loads(operator.stdout.readline()) for _ in range(2)]
    assert [answer["op"] for answer in answers] == ["ready", "broken"]
    until(lambda: process_state(process_id) == "T", "the stage is stopped")
    operator.kill()  # as when the connection to the box breaks
    operator.communicate()
    until(lambda: process_state(process_id) == "S", "the stage goes on")
    assert stage_id(supervisor) == process_id


def test_one_drill_at_a_time_on_a_box(site_file: SiteFile, supervisor: SupervisorRpc) -> None:
    process_id = stage_id(supervisor)
    with Breaker(site_file, "box1", ssh(site_file), order(site_file, "hang", 2.0)) as breaker:
        assert breaker.strike() == f"stopped the stage (process {process_id}) for 2 s"
    with pytest.raises(BoxError, match="another drill runs on this box"):
        Breaker(site_file, "box1", ssh(site_file), order(site_file, "kill"))
    until(lambda: process_state(process_id) == "S", "the stage goes on")

    def free() -> bool:
        try:
            with Breaker(site_file, "box1", ssh(site_file), order(site_file, "kill")):
                return True
        except BoxError:
            return False

    until(free, "the box can be drilled again")


def test_heat_ends_when_it_is_told_to(site_file: SiteFile, supervisor: SupervisorRpc) -> None:
    zone = Path(layout_of(site_file, "box1", os.getuid()).run_directory) / "drill/thermal/thermal_zone0"
    wanted = strain_order(site_file, "box1", "heat", 600.0)
    with Breaker(site_file, "box1", ssh(site_file), wanted) as breaker:
        assert breaker.strike() == "its guards read 86 °C"
        assert (zone / "temp").read_text() == "86000"
        breaker.heal()
        assert not zone.exists()


def test_heat_ends_although_the_operator_is_gone(site_file: SiteFile, supervisor: SupervisorRpc) -> None:
    zone = Path(layout_of(site_file, "box1", os.getuid()).run_directory) / "drill/thermal/thermal_zone0"
    with Breaker(site_file, "box1", ssh(site_file), strain_order(site_file, "box1", "heat", 600.0)) as breaker:
        breaker.strike()
    until(lambda: not zone.exists(), "the zone is gone")


def test_a_box_without_a_running_stage_is_refused(site_file: SiteFile, supervisor: SupervisorRpc) -> None:
    supervisor.stop_group("stage")
    until(lambda: supervisor.programs()["stage"]["statename"] == "STOPPED", "the stage is stopped")
    with pytest.raises(BoxError, match="no stage to break: in supervisord it is STOPPED"):
        Breaker(site_file, "box1", ssh(site_file), order(site_file, "kill"))


def test_a_box_without_supervisord_is_refused(site_file: SiteFile) -> None:
    with pytest.raises(BoxError, match="did not answer"):
        Breaker(site_file, "box1", ssh(site_file), order(site_file, "kill"))


def test_the_order_names_the_other_boxes_and_no_secret(site_file: SiteFile) -> None:
    wanted = order(site_file, "link-cut", 5.0)
    assert wanted["peers"] == ["127.0.0.12", "127.0.0.13", "127.0.0.14"]
    assert set(wanted) == {"kind", "seconds", "supervisor_socket", "peers", "lock"}
    assert wanted["lock"] != order_of(site_file, "box2", "kill", 0.0)["lock"]


CUT = """
import json, subprocess, sys, time
from fleet.drill.box_side import Cut, start_watchdog
from fleet.provision.agent.errors import AgentError

def routes():
    shown = [subprocess.run(["ip", family, "route", "show", "type", "blackhole"], capture_output=True, text=True).stdout
             for family in ("-4", "-6")]
    return sorted(line.split()[1] for text in shown for line in text.splitlines())

def until(wanted):
    end = time.monotonic() + 20
    while routes() != wanted and time.monotonic() < end:
        time.sleep(0.05)
    return routes()

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
cut = Cut(["198.51.100.7", "198.51.100.8", "2001:db8::7"])
before = routes()
start_watchdog(float(sys.argv[1]), cut.undo, "a test")
cut.make()
made = routes()
try:
    Cut(["198.51.100.7"])
    twice = ""
except AgentError as error:
    twice = error.message
print(json.dumps([before, made, until([]), twice]))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_a_cut_is_undone_by_its_watchdog(tmp_path: Path) -> None:
    """In a network of its own: no route of this machine is touched."""
    script = tmp_path / "cut.py"
    script.write_text(CUT)
    done = subprocess.run(
        ["unshare", "--net", sys.executable, str(script), "2"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode != 0 and "unshare" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    before, made, after, twice = json.loads(done.stdout)
    assert (before, after) == ([], [])
    assert made == ["198.51.100.7", "198.51.100.8", "2001:db8::7"]
    assert twice == "there are blackhole routes to 198.51.100.7 already"


WATCHDOG = """
import os, sys
from pathlib import Path
from fleet.drill.box_side import start_watchdog

start_watchdog(600.0, lambda: Path(sys.argv[1]).write_text("yes"), "a test")

def is_it(process):
    try:
        variables = (process / "environ").read_bytes()
    except OSError:
        return False
    return os.environ["MARK"].encode() in variables and int(process.name) != os.getpid()

print(" ".join(path.name for path in Path("/proc").iterdir() if path.name.isdigit() and is_it(path)))
"""


def test_the_watchdog_heals_at_once_when_it_is_told_to_end(tmp_path: Path) -> None:
    """As when the box shuts down: every signal of an ending session heals first."""
    healed, mark = tmp_path / "healed", f"watchdog of {tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", WATCHDOG, str(healed)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "MARK": mark},
    )
    watchdog = int(done.stdout)  # one process, and it outlives the one that started it
    assert not healed.exists()
    os.kill(watchdog, signal.SIGTERM)
    until(healed.exists, "healed")
    until(lambda: process_state(watchdog) in {"", "Z"}, "the watchdog has ended")
