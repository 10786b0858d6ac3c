"""The systemd unit, judged by systemd where there is one."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.provision.unit import quote, render_unit


def unit(prefix: Path) -> str:
    return render_unit(
        python=sys.executable,
        prefix=str(prefix),
        config_path=f"{prefix}/current/etc/supervisord.conf",
        socket="/run/fleet/supervisor.sock",
        user="root",
        stop_seconds=45,
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_it(tmp_path: Path) -> None:
    file = tmp_path / "fleet-supervisord.service"
    file.write_text(unit(tmp_path))
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_box_lives_on(tmp_path: Path) -> None:
    lines = unit(tmp_path).splitlines()
    for line in (
        "Restart=always",
        "StartLimitIntervalSec=0",
        "OOMPolicy=continue",
        "KillMode=control-group",
        "Type=notify",
        "NotifyAccess=main",
        "WatchdogSec=60",
        "RuntimeDirectory=fleet",
        "RuntimeDirectoryMode=0700",
        "After=network.target",
        "WantedBy=multi-user.target",
        "TimeoutStopSec=45",
    ):
        assert line in lines
    waits = [line for line in lines if "network-online" in line or "time-sync" in line or line.startswith("Requires")]
    assert waits == []


def test_the_main_process_is_the_parent_that_starts_supervisord(tmp_path: Path) -> None:
    (line,) = [line for line in unit(tmp_path).splitlines() if line.startswith("ExecStart=")]
    argv = shlex.split(line.removeprefix("ExecStart="))
    cut = argv.index("--")
    assert argv[:cut] == [sys.executable, "-m", "guards.parent", "--socket", "/run/fleet/supervisor.sock"]
    config = f"{tmp_path}/current/etc/supervisord.conf"
    assert argv[cut + 1 :] == [
        *(sys.executable, "-m", "supervisor.supervisord"),
        *("--nodaemon", "--configuration", config),
    ]
    (environment,) = [line for line in unit(tmp_path).splitlines() if line.startswith("Environment=")]
    assert f'"PYTHONPATH={tmp_path}/current/lib"' in environment


def test_words_are_taken_literally() -> None:
    assert quote('a "b" $HOME %n \\') == '"a \\"b\\" $$HOME %%n \\\\"'
    with pytest.raises(ValueError, match="control character"):
        quote("a\nb")
