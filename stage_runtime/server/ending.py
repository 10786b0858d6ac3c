"""Ending what may hang: a compute thread that never returns must not keep orders or a stop waiting."""

from __future__ import annotations

import asyncio
from typing import Any

# How long an order waits for the compute thread to put an epoch's caches away; the call that runs meanwhile is one
# micro-batch, or a part of it.
END_SECONDS = 5.0
# The same while the process stops and nobody will take the caches over.
STOP_END_SECONDS = 0.5


class HungError(Exception):
    """The compute thread is of no use any more; the message says for how long. Only a new process helps."""


async def end_within(seconds: float, task: asyncio.Task[Any]) -> bool:
    """Cancel a task and wait for its end; whether it could put everything away in so many seconds.

    What it does at its end is cancelled after that.
    """
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        task.cancel()
        await asyncio.wait([task], timeout=seconds)
    if task.done() and not task.cancelled():
        task.exception()  # whoever owns the task has been told
    return bool(done)
