"""When is a link dead? An adaptive deadline on silence. Pure: the caller tells the time of its own monotonic clock.

The peer sends something at least every ping period, from an event loop that never computes. How late that has come in
the last minute is how late it may come again, so a link over a good network is given up quickly and one over a bad
network is not given up wrongly. Time during which the listener itself did not run is no silence of the peer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# A late ping raises the deadline for so long.
MEMORY_SECONDS = 60.0
# The deadline lies so many times the worst lateness above the least one.
LATENESS_FACTOR = 3.0
# A ping period has so many moments at which pings go out: those of many links share one, for a process that wakes up
# for each of them spends more on waking up than on pings.
MOMENTS = 8


@dataclass(frozen=True)
class _Late:
    """Something came `seconds` later than a ping period after what came before it."""

    at: float
    seconds: float


def ping_due(last_sent: float, ping_seconds: float) -> float:
    """When a ping must go out if nothing else does: at the last shared moment within a ping period of what was sent."""
    moment = ping_seconds / MOMENTS
    return (last_sent + ping_seconds) // moment * moment


class Silence:
    """What one side of a link knows about how regularly the other speaks.

    Args:
        least_seconds: the deadline where everything comes on time.
        most_seconds: no deadline is longer; where it is shorter than `least_seconds`, it counts.
        ping_seconds: the peer sends at least so often, and `ran` is called at least so often.
        now: the time.
    """

    def __init__(self, least_seconds: float, most_seconds: float, ping_seconds: float, now: float) -> None:
        self._least = least_seconds
        self._most = most_seconds
        self._ping = ping_seconds
        self._heard_at = now
        self._ran_at = now
        self._stalled = 0.0  # since something was heard
        self._late: deque[_Late] = deque()  # falling seconds, rising times: the first is the worst of the last minute

    def ran(self, now: float) -> None:
        """The listener is running; a longer pause than a ping period between two calls was its own."""
        self._stalled += max(0.0, now - self._ran_at - self._ping)
        self._ran_at = now

    def heard(self, now: float) -> None:
        """Bytes of the peer came in."""
        self.ran(now)
        late = self.silent_seconds(now) - self._ping
        self._heard_at = now
        self._stalled = 0.0
        if late > 0:
            while self._late and self._late[-1].seconds <= late:
                self._late.pop()
            self._late.append(_Late(now, late))

    def silent_seconds(self, now: float) -> float:
        """How long nothing has come in, as far as the listener could tell."""
        stalled = self._stalled + max(0.0, now - self._ran_at - self._ping)
        return max(0.0, now - self._heard_at - stalled)

    def deadline_seconds(self, now: float) -> float:
        """How long nothing may come in."""
        while self._late and now - self._late[0].at > MEMORY_SECONDS:
            self._late.popleft()
        worst = self._late[0].seconds if self._late else 0.0
        return min(self._least + LATENESS_FACTOR * worst, self._most)

    def left_seconds(self, now: float) -> float:
        """How long until the link is dead, if nothing comes in; not above 0 once it is."""
        return self.deadline_seconds(now) - self.silent_seconds(now)
