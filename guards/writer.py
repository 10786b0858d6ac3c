"""Writes the guards' store on a thread of its own: a disk that hangs stops that thread, and no guard.

Only the newest state is ever written: while a write is under way, a newer state replaces the one that waits. There is
one such thread, so a disk that hangs for days holds one state and costs nothing more.
"""

from __future__ import annotations

import logging
import threading
import time

from guards.store import Kept, Store

log = logging.getLogger(__name__)

# SD cards write a few kB in well under a second, and in one or two while they tidy up.
HUNG_SECONDS = 5.0


class Writer:
    """See the module.

    Args:
        store: where to.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()  # of everything below
        self._waiting: Kept | None = None
        self._offered = 0  # number of the newest state
        self._ended = 0  # number of the newest state whose write has ended, well or not
        self._under_way_since: float | None = None
        self._failure = ""  # of the write that ended last
        self._thread: threading.Thread | None = None

    def offer(self, kept: Kept) -> int:
        """Take a state over, in place of one that has not been begun. Never waits for the disk.

        Returns:
            Its number, for `wait`.
        """
        with self._changed:
            self._waiting = kept
            self._offered += 1
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="store", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no thread to be had, as at pids.max: the next state tries again
                    self._failure = f"{self._store.path}: cannot be written: {error}"
                    self._ended = self._offered
                else:
                    self._thread = thread
            self._changed.notify_all()
            return self._offered

    def wait(self, number: int, seconds: float) -> str:
        """Until a state is written down, or a newer one.

        Returns:
            Why it is not: the disk refuses, or has not answered in time; empty if it is durable.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._ended >= number, seconds):
                return self._failure
            return f"{self._store.path}: not written within {seconds:g} s: the disk hangs or is overloaded"

    @property
    def under_way_seconds(self) -> float:
        """How long the write under way has taken so far; 0 if there is none."""
        with self._changed:
            return 0.0 if self._under_way_since is None else time.monotonic() - self._under_way_since

    @property
    def hung(self) -> bool:
        """A write has been under way for longer than `HUNG_SECONDS`."""
        return self.under_way_seconds > HUNG_SECONDS

    @property
    def trouble(self) -> str:
        """Why nothing can be written down now; empty if it can."""
        seconds = self.under_way_seconds
        if seconds > HUNG_SECONDS:
            return f"{self._store.path}: a write hangs for {seconds:.0f} s"
        with self._changed:
            return self._failure

    @property
    def written(self) -> bool:
        """Something was written down since the start."""
        with self._changed:
            return self._ended > 0 and not self._failure

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                kept, number, self._waiting = self._waiting, self._offered, None
                self._under_way_since = time.monotonic()
            failure = "" if kept is None else self._save(kept)
            with self._changed:
                self._ended, self._failure, self._under_way_since = number, failure, None
                self._changed.notify_all()

    def _save(self, kept: Kept) -> str:
        """Why it could not be written; empty if it is durable."""
        try:
            self._store.save(kept)
        except OSError as error:
            return f"{self._store.path}: cannot be written: {error.strerror or error}"
        except Exception as error:  # a mistake in what is kept must not end the only thread that writes
            log.exception("the guards' store")
            return f"{self._store.path}: cannot be written: {type(error).__name__}: {str(error)[:200]}"
        return ""
