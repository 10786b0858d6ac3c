"""A local box with a real supervisord that runs a harmless `stage`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.inventory.sitefile import SiteFile
from fleet.provision.agent.rpc import SupervisorRpc
from fleet.provision.render_layout import layout_of
from fleet.provision.supervisor_config import Program, render_supervisor_config
from tests.provision.sites import write_site

WAIT_SECONDS = 20.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"not within {WAIT_SECONDS:g} s: {what}"
        time.sleep(0.05)


def process_state(process_id: int) -> str:
    """Letter of proc(5): S sleeps, T is stopped; empty if there is no such process."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.fixture
def site_file(tmp_path: Path) -> SiteFile:
    """A local site; box1 has a supervisord."""
    return write_site(tmp_path, connection="local")


@pytest.fixture
def supervisor(site_file: SiteFile) -> Iterator[SupervisorRpc]:
    """supervisord of box1 with a stage that sleeps."""
    layout = layout_of(site_file, "box1", os.getuid())
    run, log = Path(layout.run_directory), Path(layout.log)
    for directory in (run, log):
        directory.mkdir(parents=True, exist_ok=True)
    sleeper = Program(
        "stage", (sys.executable, "-c", "import time; time.sleep(600)"), {}, f"{log}/stage.log", None, 1, 5
    )
    text = render_supervisor_config(
        socket=layout.supervisor_socket,
        pid_file=f"{run}/supervisord.pid",
        log_file=f"{log}/supervisord.log",
        programs=[sleeper],
    )
    config = run / "supervisord.conf"
    config.write_text(text)
    process = subprocess.Popen([sys.executable, "-m", "supervisor.supervisord", "--nodaemon", "-c", str(config)])
    rpc = SupervisorRpc(layout.supervisor_socket)
    try:
        until(rpc.answers, "supervisord answers")
        until(lambda: rpc.programs()["stage"]["statename"] == "RUNNING", "the stage runs")
        yield rpc
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)
        shutil.rmtree(run.parent)
