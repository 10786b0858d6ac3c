"""Waiting for news in shared state."""

from __future__ import annotations

import asyncio

from stage_runtime.link.tasks import within


class Changes:
    """Wakes everyone who waits, at every change; who wakes up looks again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Something has changed."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, seconds: float) -> bool:
        """Until the next change, or for so long; whether there was one."""
        try:
            await within(seconds, self._event.wait())
        except asyncio.TimeoutError:
            return False
        return True
