"""How long a pipeline has taken no sequences: time that counts against the wait for a plan, not against its speed."""

from __future__ import annotations


class WaitingClock:
    """Adds up the time during which a pipeline was not ready. It begins as not ready.

    Args:
        now: monotonic seconds, as in all calls.
    """

    def __init__(self, now: float) -> None:
        self._seconds = 0.0
        self._since: float | None = now

    def note(self, ready: bool, now: float) -> None:
        """What the pipeline is from now on."""
        if self._since is not None:
            self._seconds += now - self._since
        self._since = None if ready else now

    def seconds(self, now: float) -> float:
        """All time so far during which it was not ready."""
        return self._seconds + (0.0 if self._since is None else now - self._since)
