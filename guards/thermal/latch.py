"""The 80/70 latch: one step down while too hot, one step up while cool, and none in between. Pure.

It differs from a bare latch in three things, each of which the simulation (`benchmarks/thermal.py`) shows to be needed:

- It looks `lead_seconds` ahead along the present trend, since a box that warms by 1 °C/s would pass from 80 °C into
  the hardware's throttle while the bare latch waits; and it does not step down for a temperature that falls below
  the threshold within that time anyway.
- After a step down it waits until that step can be judged: the next one needs a temperature higher by `rise_celsius`,
  or `patience_seconds` without relief. A slow box would otherwise be taken to the bottom for one degree too much.
- Above `urgent_celsius` it steps down in every period.

Bound: a step up needs `up_dwell_seconds` since any step, and every step down either takes back a step up or uses one
of the rungs left. So within T seconds there are at most `rungs + 2·(T / up_dwell_seconds + 1)` steps for any trace, and
none at all at any steady temperature between both thresholds.
"""

from __future__ import annotations

from typing import NamedTuple

from guards.settings import ThermalSettings

# Gains of the alpha-beta filter that follows temperature and trend: alpha for sensors with up to 0.5 °C of noise,
# beta = alpha² / (2 − alpha), which damps critically (Benedict and Bordner, 1962).
ALPHA = 0.4
BETA = ALPHA**2 / (2 - ALPHA)
# Readings further apart than so many periods say nothing about a trend.
MOST_PERIODS_APART = 5
# No box warms or cools faster at its sensor for long; it bounds what one false jump can do.
FASTEST_CELSIUS_PER_SECOND = 2.0


class Latch(NamedTuple):
    """Where the latch stands. A tuple, as the simulation makes millions.

    Attributes:
        level: rung of the ladder; 0: no limit.
        switched_seconds: when it last stepped; None: never.
        switched_celsius: how hot it was then; None: unknown.
        followed_celsius, trend: of the filter, °C and °C/s; the former is None before the first reading.
        seen_seconds: when a temperature was last known; None: never.
    """

    level: int = 0
    switched_seconds: float | None = None
    switched_celsius: float | None = None
    followed_celsius: float | None = None
    trend: float = 0.0
    seen_seconds: float | None = None


def step(
    latch: Latch, celsius: float | None, *, throttled: bool, bottom: int, now_seconds: float, settings: ThermalSettings
) -> Latch:
    """The latch after a reading; its level differs by one at most, unless the ladder became shorter.

    Args:
        celsius: of the hottest part; None: unknown. Then the level is held, and never raised.
        throttled: the hardware says that it throttles for heat right now.
        bottom: last rung of the ladder.
    """
    if latch.level > bottom:
        latch = latch._replace(level=bottom)
    if celsius is None:
        # what the hardware does counts where no sensor answers; it does not need one
        if throttled and latch.level < bottom and _waited(latch, settings.down_dwell_seconds, now_seconds):
            return latch._replace(level=latch.level + 1, switched_seconds=now_seconds, switched_celsius=None)
        return latch
    latch = _follow(latch, celsius, now_seconds, settings.period_seconds)
    expected = celsius + latch.trend * settings.lead_seconds
    if celsius >= settings.low_celsius:
        too_hot = expected > settings.high_celsius or throttled
        if too_hot and latch.level < bottom and _may_lower(latch, celsius, expected, now_seconds, settings):
            return latch._replace(level=latch.level + 1, switched_seconds=now_seconds, switched_celsius=celsius)
    elif (
        latch.level > 0
        and expected < settings.low_celsius
        and not throttled
        and _waited(latch, settings.up_dwell_seconds, now_seconds)
    ):
        return latch._replace(level=latch.level - 1, switched_seconds=now_seconds, switched_celsius=celsius)
    return latch


def _may_lower(latch: Latch, celsius: float, expected: float, now_seconds: float, settings: ThermalSettings) -> bool:
    if expected > settings.urgent_celsius or latch.switched_seconds is None:
        return True
    since = now_seconds - latch.switched_seconds
    if since < settings.down_dwell_seconds:
        return False
    if since >= settings.patience_seconds or latch.switched_celsius is None:
        return True
    return celsius >= latch.switched_celsius + settings.rise_celsius


def _waited(latch: Latch, dwell_seconds: float, now_seconds: float) -> bool:
    return latch.switched_seconds is None or now_seconds - latch.switched_seconds >= dwell_seconds


def _follow(latch: Latch, celsius: float, now_seconds: float, period_seconds: float) -> Latch:
    """Temperature and trend after a reading (alpha-beta filter)."""
    before, seen = latch.followed_celsius, latch.seen_seconds
    if before is None or seen is None or not 0 < now_seconds - seen <= MOST_PERIODS_APART * period_seconds:
        return latch._replace(followed_celsius=celsius, trend=0.0, seen_seconds=now_seconds)
    elapsed = now_seconds - seen
    predicted = before + latch.trend * elapsed
    missed = celsius - predicted
    trend = latch.trend + BETA * missed / elapsed
    trend = max(-FASTEST_CELSIUS_PER_SECOND, min(FASTEST_CELSIUS_PER_SECOND, trend))
    return Latch(
        latch.level, latch.switched_seconds, latch.switched_celsius, predicted + ALPHA * missed, trend, now_seconds
    )
