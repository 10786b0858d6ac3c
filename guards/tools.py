"""Other people's tools (chronyc, smartctl, vcgencmd …), run with a deadline and a cap, never through a shell."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from guards.roots import Roots

MOST_OUTPUT_BYTES = 1024 * 1024


class ToolMissing(Exception):
    """The tool is not on this box; the message names it."""


class ToolFailed(Exception):
    """It could not be started, or did not answer in time; the message is one line for people."""


@dataclass(frozen=True)
class ToolOutput:
    """What a tool answered.

    Attributes:
        code: exit code. A non-zero one is the caller's to judge: smartctl's is a bit mask.
        text: of stdout. error: first line of stderr.
    """

    code: int
    text: str
    error: str


def run_tool(roots: Roots, *argv: str, deadline_seconds: float) -> ToolOutput:
    """Run a tool in the C locale with nothing to read.

    Raises:
        ToolMissing: it is on none of the directories of `roots.path`.
        ToolFailed: it can't be started, or takes longer than the deadline: then it is killed.
    """
    program = shutil.which(argv[0], path=roots.path)
    if program is None:
        raise ToolMissing(argv[0])
    environment = {"PATH": roots.path, "LC_ALL": "C", "TZ": "UTC", "HOME": os.environ.get("HOME", "/")}
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=deadline_seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ToolFailed(f"{argv[0]} did not answer within {deadline_seconds:g} s") from None
    except OSError as error:
        raise ToolFailed(f"{argv[0]}: {error.strerror or error}") from None
    text = done.stdout[:MOST_OUTPUT_BYTES].decode("utf-8", "replace")
    complaint = done.stderr[:MOST_OUTPUT_BYTES].decode("utf-8", "replace").strip()
    return ToolOutput(done.returncode, text, complaint.splitlines()[0] if complaint else "")
