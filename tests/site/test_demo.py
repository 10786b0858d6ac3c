"""`git clone … && make demo` as a stranger runs it: no root, the system's Python, an empty home, a very long path."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.site.commands import REPOSITORY

USER = "fleet-demo"
PATH_LENGTH = 150
DEMO_DEADLINE_SECONDS = 1200.0
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


class Stranger:
    """An unprivileged user with an empty home; the pip settings of the environment are kept."""

    def __init__(self, home: Path, account: pwd.struct_passwd) -> None:
        self.home = home
        self.account = account

    def run(self, argv: Sequence[str], directory: Path) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment |= {"HOME": str(self.home), "PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "USER": self.account.pw_name}
        as_root = os.geteuid() == 0
        return subprocess.run(
            argv,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEMO_DEADLINE_SECONDS,
            user=self.account.pw_uid if as_root else None,
            group=self.account.pw_gid if as_root else None,
            extra_groups=[] if as_root else None,
        )


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    """As root an account made for this test, else ourselves with another home."""
    if os.geteuid() == 0:
        subprocess.run(["userdel", USER], capture_output=True, check=False)  # left by a run that was killed
        subprocess.run(["useradd", "--system", "--no-create-home", USER], check=True)
        account = pwd.getpwnam(USER)
    else:
        account = pwd.getpwuid(os.getuid())
    home = Path("/var/tmp") / f"fleet-demo-{os.getpid()}"
    home.mkdir(mode=0o755)
    os.chown(home, account.pw_uid, account.pw_gid)
    yield Stranger(home, account)
    shutil.rmtree(home)
    if os.geteuid() == 0:
        subprocess.run(["userdel", USER], check=True)


def test_demo_from_a_fresh_clone_at_a_long_path_without_root(stranger: Stranger) -> None:
    filler = PATH_LENGTH - len(str(stranger.home)) - 1
    clone = stranger.home / ("a" * filler)
    assert len(str(clone)) == PATH_LENGTH
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    for path in (clone, *clone.rglob("*")):
        os.chown(path, stranger.account.pw_uid, stranger.account.pw_gid, follow_symlinks=False)
    try:
        demo = stranger.run(["make", "demo"], clone)
        assert demo.returncode == 0, demo.stdout + demo.stderr
        said = demo.stdout.splitlines()
        for announcement in (
            "installing the operator's tools",
            "gathering wheels",
            "bringing up",
            "asking the three stages",
        ):
            assert any(announcement in line for line in said), announcement
        rows = [line.split("\t") for line in said if line.startswith("box") and "\tready\t" in line]
        assert [row[0] for row in rows] == ["box1", "box2", "box3"]
        asked = next(number for number, line in enumerate(said) if "asking the three stages" in line)
        assert said[asked + 1].strip(), "an answer was streamed"
        assert "Traceback" not in demo.stdout + demo.stderr
        again = stranger.run(["build/venv/bin/fleet", "provision", "inventory/local.yaml"], clone)
        assert "4 boxes: 0 changed, 4 ok" in again.stdout, again.stdout + again.stderr
    finally:
        down = stranger.run(["make", "demo-down"], clone)
    assert down.returncode == 0, down.stdout + down.stderr
    assert not [line for line in _processes_of(stranger) if "stage_runtime" in line]


def _processes_of(stranger: Stranger) -> list[str]:
    listed = subprocess.run(
        ["ps", "-o", "args=", "-u", str(stranger.account.pw_uid)], capture_output=True, text=True, check=False
    )
    return [line for line in listed.stdout.splitlines() if str(stranger.home) in line]
