"""Is there memory enough, on the box and on its GPUs, and must new sequences wait? Pure."""

from __future__ import annotations

from collections.abc import Sequence

from guards.findings import Finding, Repair, State
from guards.memory.gpu import GpuMemory
from guards.memory.headroom import Headroom
from guards.settings import MemorySettings

BOX = "box"


def judge_box(seen: Headroom, settings: MemorySettings) -> Finding:
    """The box's own memory."""
    room = seen.tightest
    evidence = {
        "available_bytes": seen.available_bytes,
        "available_percent": None if room is None else round(room.free_percent, 1),
        "limited_by": "" if room is None else room.path,
        "some_percent": seen.some_percent,
        "full_percent": seen.full_percent,
    }
    if room is None:
        return Finding(BOX, State.DEGRADED, "; ".join(seen.reasons), evidence, Repair.CHECK_SENSOR)
    where = f"control group {room.path}" if room.path else "the box"
    if room.free_percent < settings.least_available_percent:
        critical = room.free_percent < settings.critical_available_percent
        least = f"less than {settings.least_available_percent:g} %"
        reason = f"{where} has {room.free_percent:.1f} % of its memory left, {least}"
        return Finding(BOX, State.UNHEALTHY if critical else State.DEGRADED, reason, evidence, Repair.FREE_MEMORY)
    if seen.some_percent is not None and seen.some_percent > settings.pressure_some_percent:
        most = f"more than {settings.pressure_some_percent:g} %"
        reason = f"tasks waited for memory {seen.some_percent:g} % of a minute, {most}"
        return Finding(BOX, State.DEGRADED, reason, evidence, Repair.FREE_MEMORY)
    return Finding(BOX, State.HEALTHY, "", evidence)


def judge_gpu(gpu: GpuMemory, settings: MemorySettings) -> Finding:
    """One GPU. One that shares the box's memory is judged with it."""
    evidence = {"used_bytes": gpu.used_bytes, "total_bytes": gpu.total_bytes, "name": gpu.name}
    part, percent = f"gpu{gpu.index}", gpu.used_percent
    if percent is None:
        return Finding(part, State.UNSUPPORTED, f"memory not told: {gpu.reason}; judged with the box's", evidence)
    if percent > settings.gpu_memory_percent:
        reason = f"{percent:.1f} % of its memory used, more than {settings.gpu_memory_percent:g} %"
        return Finding(part, State.DEGRADED, reason, evidence, Repair.SHED_SEQUENCES)
    return Finding(part, State.HEALTHY, "", evidence)


def must_shed(seen: Headroom, gpus: Sequence[GpuMemory], shedding: bool, settings: MemorySettings) -> bool:
    """Whether new sequences must wait: a latch over all memories that sequences live in.

    It closes when any of them is too full and opens when all that are known have recovered. What can't be read neither
    closes nor opens it, and with nothing known it stays.
    """
    free = None if seen.tightest is None else seen.tightest.free_percent
    used = [gpu.used_percent for gpu in gpus if gpu.used_percent is not None]
    full = free is not None and free < settings.least_available_percent
    if full or any(percent > settings.gpu_memory_percent for percent in used):
        return True
    if free is None and not used:
        return shedding
    recovered = free is None or free > settings.recovered_available_percent
    return shedding and not (recovered and all(percent < settings.gpu_recovered_percent for percent in used))
