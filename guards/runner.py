"""All guards of a box, each at its post, and the loop that looks after them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from guards.board import Board
from guards.keeper import Keeper
from guards.post import Post

WATCH_SECONDS = 1.0
# From the last round of all guards to the verdict that none will ever end: so long, or so many of the shortest rounds.
LEAST_ALLOWED_SECONDS = 120.0
ALLOWED_ROUNDS = 3


class Helper(Protocol):
    """A thread beside the guards (`guards/telling.py`, `guards/beat.py`)."""

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """Begin nothing more; does not wait."""


class Runner:
    """Starts the posts, gives up what hangs, and has memories written down.

    Args:
        posts: one a guard.
    """

    def __init__(self, posts: Sequence[Post], keeper: Keeper, board: Board) -> None:
        self._posts, self._keeper, self._board = posts, keeper, board
        self._stopping = False
        self._watched_seconds = time.monotonic()

    @property
    def round_seconds(self) -> float:
        """Monotonic: when a round of any guard last ended, or crashed, but not later than this loop last came round. It
        stands still once all guards hang, or the loop itself does; before the first round it is the process's start."""
        ended = [at for standing in self._board.standings().values() if (at := standing.at_seconds) is not None]
        return min(self._watched_seconds, max(ended, default=self._watched_seconds))

    @property
    def allowed_seconds(self) -> float:
        """How long ago it may be."""
        shortest = min(post.guard.period_seconds + post.guard.deadline_seconds for post in self._posts)
        return max(LEAST_ALLOWED_SECONDS, ALLOWED_ROUNDS * shortest)

    def stop(self) -> None:
        """Let `run` end within a second. Takes no lock, so a signal handler may call it."""
        self._stopping = True

    def look(self, most_seconds: float) -> None:
        """One round of every guard, all at once; those that have not ended by then are left behind."""
        threads = [threading.Thread(target=post.one_round, name=post.guard.name, daemon=True) for post in self._posts]
        end = time.monotonic() + most_seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def run(self, helpers: Sequence[Helper] = ()) -> None:
        """Until `stop`. Threads of guards that hang are left behind; they are daemons and end with the process.

        Args:
            helpers: that run meanwhile.
        """
        try:
            for helper in helpers:
                helper.start()
            while not self._stopping:
                for post in self._posts:
                    try:
                        post.watch()
                    except RuntimeError as error:  # no thread to be had, as at pids.max: the next second tries again
                        self._board.event(post.guard.name, "hang", f"no thread: {error}")
                self._keeper.save_in_time()
                self._watched_seconds = time.monotonic()
                time.sleep(WATCH_SECONDS)
        finally:
            for helper in helpers:
                helper.stop()
            for post in self._posts:
                post.stop()
            self._keeper.close()
