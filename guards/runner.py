"""All guards of a box, each at its post, and the loop that looks after them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from guards.board import Board
from guards.keeper import Keeper
from guards.post import Post

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0


class Runner:
    """Starts the posts, gives up what hangs, and has memories written down.

    Args:
        posts: one a guard.
    """

    def __init__(self, posts: Sequence[Post], keeper: Keeper, board: Board) -> None:
        self._posts, self._keeper, self._board = posts, keeper, board
        self._stopping = False

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

    def run(self) -> None:
        """Until `stop`. Threads of guards that hang are left behind; they are daemons and end with the process."""
        for post in self._posts:
            post.start()
        try:
            while not self._stopping:
                time.sleep(WATCH_SECONDS)
                for post in self._posts:
                    try:
                        post.watch()
                    except RuntimeError as error:  # no thread to be had, as at pids.max: the next second tries again
                        self._board.event(post.guard.name, "hang", f"no thread: {error}")
                self._keeper.save_in_time()
        finally:
            for post in self._posts:
                post.stop()
            self._keeper.close()
