"""Which of a box's steps a person is told about: the long ones when they start, any that takes long while it lasts.

Forty boxes report side by side, so a line has to be worth reading. What is left out shows with `-v`, and every step is
named in errors.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_WAIT_SECONDS = 5
"""A step that lasts so long says what it waits for; then at twice the time, and so on."""
SENT_SECONDS = 10.0
"""Between two lines about how much of a stream was sent."""
SILENT_STEPS = ("turn",)
"""Steps whose waiting the operator's side tells itself, as only it knows what for."""
LONG_STEPS = ("environment", "mend", "health gate", "roll back")
"""First words of steps that usually take seconds; the agent names them (`fleet.provision.agent`)."""


class StepLines:
    """Turns what an agent says into lines of progress.

    Args:
        report: takes a line.
        every_step: tell every step and every sign of waiting.
    """

    def __init__(self, report: Callable[[str], None], *, every_step: bool = False) -> None:
        self._report = report
        self._every_step = every_step
        self._prefix = ""
        self._next_wait_seconds = FIRST_WAIT_SECONDS

    def shorten(self, prefix: str) -> None:
        """From now on paths below a box's prefix are shown relative to it."""
        self._prefix = f"{prefix.rstrip('/')}/"

    def step(self, step: str) -> None:
        """A step begins."""
        self._next_wait_seconds = FIRST_WAIT_SECONDS
        if self._every_step or step.startswith(LONG_STEPS):
            self._tell(step)

    def waiting(self, step: str, for_what: str, seconds: int) -> None:
        """A step goes on."""
        if not self._every_step and (step in SILENT_STEPS or seconds < self._next_wait_seconds):
            return
        self._next_wait_seconds = 2 * seconds
        self._tell(f"{step}: waits for {for_what or 'it to end'} ({seconds} s)")

    def sent(self, step: str, done_bytes: int, total_bytes: int) -> None:
        """A stream goes on."""
        self._tell(f"{step}: sent {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB")

    def _tell(self, line: str) -> None:
        self._report(line.replace(self._prefix, "") if self._prefix else line)
