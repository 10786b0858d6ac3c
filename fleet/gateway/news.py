"""Waking whoever watches something: many watchers, no task for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class News:
    """Something that changes. A watcher looks, clears its event, looks again, and waits."""

    def __init__(self) -> None:
        self._watchers: set[asyncio.Event] = set()

    @contextmanager
    def watched(self, wake: asyncio.Event) -> Iterator[None]:
        """Set `wake` at every change until the block ends."""
        self._watchers.add(wake)
        try:
            yield
        finally:
            self._watchers.discard(wake)

    def tell(self) -> None:
        """Something changed."""
        for wake in self._watchers:
            wake.set()
