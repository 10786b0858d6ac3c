"""Owned tasks: what starts together ends together (asyncio.TaskGroup needs Python 3.11; boxes may have 3.10)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends or raises, or the caller is cancelled; then cancel and await the others.

    Raises:
        Exception: what the first one raised.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, if it comes in time.

    `asyncio.wait_for` before Python 3.12 loses a cancellation that arrives when the inner task has just ended.

    Raises:
        asyncio.TimeoutError: it did not come; the coroutine was cancelled.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not done:
        raise asyncio.TimeoutError
    return task.result()
