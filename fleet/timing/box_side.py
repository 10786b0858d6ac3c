"""Reads and sets a box's clock for the operator. Standard library only.

Runs on the box (`fleet.timing.session` sends it). stdin: one JSON object a line, stdout: one answer a line.
`{"op": "facts"}` → what else keeps the clock; `{"op": "time"}` → the clock, read as late as can be;
`{"op": "set", "ahead_nanoseconds": N}` → takes N off the clock. A correction by a difference needs no knowledge of how
long the order travelled.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import syslog
import time
from pathlib import Path
from typing import Any

LINE_MAX_BYTES = 1 << 16
TOOL_SECONDS = 10.0  # one call of chronyc, systemctl or hwclock
CHRONY = ["chronyc", "-c", "-n", "-m", "tracking", "sources"]
TIMESYNCD_DONE = Path("/run/systemd/timesync/synchronized")  # systemd-timesyncd.service(8): made once the clock is set
HARDWARE_CLOCKS = (Path("/dev/rtc"), Path("/dev/rtc0"))


def run(argv: list[str]) -> tuple[int | None, str]:
    """(exit status, output) of a tool; status None if it is absent or hangs, with the reason as output."""
    if shutil.which(argv[0]) is None:
        return None, f"no {argv[0]} on the box"
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None, f"{argv[0]} did not end within {TOOL_SECONDS:g} s"
    return done.returncode, (done.stdout if done.returncode == 0 else done.stderr or done.stdout)[:LINE_MAX_BYTES]


def facts() -> dict[str, Any]:
    """chronyc's own words (None: it does not answer), and whether timesyncd runs and has set the clock."""
    status, text = run(CHRONY)
    active = TIMESYNCD_DONE.exists() and run(["systemctl", "is-active", "--quiet", "systemd-timesyncd"])[0] == 0
    return {"chrony": text if status == 0 else None, "timesyncd": active}


def set_clock(ahead_nanoseconds: int) -> dict[str, Any]:
    """Take so much off the clock, then give the hardware clock the same time.

    Raises:
        OSError: the kernel refuses: no privilege, or an impossible time.
    """
    time.clock_settime_ns(time.CLOCK_REALTIME, time.clock_gettime_ns(time.CLOCK_REALTIME) - ahead_nanoseconds)
    syslog.syslog(f"fleet time push: clock set by {-ahead_nanoseconds / 1e9:+.6f} s from the operator's machine")
    if not any(path.exists() for path in HARDWARE_CLOCKS):
        return {"hardware_clock": "none"}
    status, text = run(["hwclock", "--systohc"])
    return {"hardware_clock": "set" if status == 0 else f"not set: {text.strip()[:200]}"}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """One request."""
    if request["op"] == "facts":
        return {"op": "facts", **facts()}
    if request["op"] == "set":
        return {"op": "set", **set_clock(int(request["ahead_nanoseconds"]))}
    return {"op": "time", "unix_nanoseconds": time.time_ns()}


def main() -> None:
    """Until the operator is gone."""
    while line := sys.stdin.buffer.readline(LINE_MAX_BYTES):
        try:
            said = answer(json.loads(line))
        except OSError as error:
            said = {"op": "error", "message": f"the clock can't be set: {error.strerror}", "hint": "log in as root"}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
