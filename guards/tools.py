"""Other people's tools (chronyc, smartctl, vcgencmd …), run with a deadline and a cap, never through a shell."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import time
from dataclasses import dataclass

from guards.roots import Roots

MOST_OUTPUT_BYTES = 1024 * 1024
KILL_SECONDS = 1.0  # a process that SIGKILL has not ended by then waits inside the kernel

_left_behind: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}


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
        ToolFailed: it can't be started, or takes longer than the deadline: then it is killed. One that hangs in the
            kernel even so (a drive in trouble) is left behind, and the same command isn't begun again before it ends.
    """
    program = shutil.which(argv[0], path=roots.path)
    if program is None:
        raise ToolMissing(argv[0])
    if (before := _left_behind.get(argv)) is not None:
        if before.poll() is None:
            raise ToolFailed(f"{argv[0]} still hangs from the last time, as process {before.pid}")
        del _left_behind[argv]
    environment = {"PATH": roots.path, "LC_ALL": "C", "TZ": "UTC", "HOME": os.environ.get("HOME", "/")}
    try:
        process = subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
    except OSError as error:
        raise ToolFailed(f"{argv[0]}: {error.strerror or error}") from None
    try:
        output, complaint = _collect(process, argv[0], time.monotonic() + deadline_seconds, deadline_seconds)
    finally:
        _end(process, argv)
    errors = complaint.decode("utf-8", "replace").strip().splitlines()
    return ToolOutput(process.returncode, output.decode("utf-8", "replace"), errors[0] if errors else "")


def _collect(
    process: subprocess.Popen[bytes], name: str, end_seconds: float, deadline_seconds: float
) -> tuple[bytes, bytes]:
    """What it says until it has ended, the first `MOST_OUTPUT_BYTES` of each."""
    output, complaint = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        for stream, part in ((process.stdout, output), (process.stderr, complaint)):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, part)
        while selector.get_map():
            for key, _ in selector.select(max(0.0, end_seconds - time.monotonic())):
                data = os.read(key.fd, 65536)
                kept: bytearray = key.data
                kept += data[: MOST_OUTPUT_BYTES - len(kept)]
                if not data:
                    selector.unregister(key.fileobj)
            if time.monotonic() >= end_seconds:
                raise ToolFailed(f"{name} did not answer within {deadline_seconds:g} s")
    try:
        process.wait(max(0.0, end_seconds - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ToolFailed(f"{name} did not answer within {deadline_seconds:g} s") from None
    return bytes(output), bytes(complaint)


def _end(process: subprocess.Popen[bytes], argv: tuple[str, ...]) -> None:
    """Nothing of it is left, unless it hangs in the kernel."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    if process.poll() is not None:
        return
    process.kill()
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        _left_behind[argv] = process
