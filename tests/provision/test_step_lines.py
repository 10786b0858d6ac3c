"""What a person reads of a box's steps."""

from __future__ import annotations

from fleet.provision.step_lines import FIRST_WAIT_SECONDS, StepLines


def told(*, every_step: bool) -> list[str]:
    lines: list[str] = []
    steps = StepLines(lines.append, every_step=every_step)
    steps.shorten("/opt/fleet")
    steps.step("facts")
    steps.step("tree /opt/fleet/models/0011")
    steps.step("environment /opt/fleet/envs/2233")
    for seconds in range(5, 50, 5):
        steps.waiting("environment /opt/fleet/envs/2233", "uv to install 24 wheels", seconds)
    steps.step("health gate")
    steps.waiting("health gate", "", FIRST_WAIT_SECONDS)
    return lines


def test_long_steps_are_told_and_waits_ever_more_seldom_with_paths_below_the_prefix() -> None:
    assert told(every_step=False) == [
        "environment envs/2233",
        "environment envs/2233: waits for uv to install 24 wheels (5 s)",
        "environment envs/2233: waits for uv to install 24 wheels (10 s)",
        "environment envs/2233: waits for uv to install 24 wheels (20 s)",
        "environment envs/2233: waits for uv to install 24 wheels (40 s)",
        "health gate",
        "health gate: waits for it to end (5 s)",
    ]


def test_every_step_and_wait_on_demand() -> None:
    lines = told(every_step=True)
    assert lines[:3] == ["facts", "tree models/0011", "environment envs/2233"]
    assert len(lines) == 3 + 9 + 2


def test_the_next_step_waits_from_the_start_again() -> None:
    lines: list[str] = []
    steps = StepLines(lines.append)
    for step in ("tree /a", "tree /b"):
        steps.step(step)
        steps.waiting(step, "34 files", FIRST_WAIT_SECONDS)
    assert lines == ["tree /a: waits for 34 files (5 s)", "tree /b: waits for 34 files (5 s)"]
