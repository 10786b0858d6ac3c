"""The pulse must show a compute thread that hangs, whatever became of the ring that its work was for."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest

from stage_runtime.server.compute import ComputeThread


async def test_hung_work_stays_visible_when_nobody_waits_for_it_any_more() -> None:
    compute, begun, go_on = ComputeThread(1), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait()

    hung = asyncio.ensure_future(compute.step(hang))
    queued = asyncio.ensure_future(compute.step(int))
    await asyncio.to_thread(begun.wait)
    for task in (hung, queued):  # the ring broke: its tasks end
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    before = compute.working_seconds
    await asyncio.sleep(0.02)
    assert compute.working_seconds > before > 0
    assert compute.work.finished == 0
    go_on.set()
    await compute.run(int)
    assert compute.working_seconds == 0
    assert compute.work.finished == 1  # the one that hung; the other was never begun
    compute.close()


async def test_work_that_fails_counts_for_nothing() -> None:
    compute = ComputeThread(1)
    with pytest.raises(ZeroDivisionError):
        await compute.step(lambda: 1 // 0)
    assert compute.working_seconds == 0
    assert compute.work.finished == 0
    assert compute.work.step_seconds is None
    compute.close()
