"""Throttle bits of a Raspberry Pi: by sysfs, else by `vcgencmd get_throttled`. Its temperature is a thermal zone."""

from __future__ import annotations

import time

from guards.deadline import DeadlineReader, Unreadable
from guards.roots import Roots
from guards.thermal.readings import Seen, Throttle
from guards.thermal.sources.names import read_name
from guards.thermal.throttled import parse_throttled
from guards.tools import ToolFailed, ToolMissing, run_tool

NAME = "raspberry-pi"
FILE_PATTERN = "devices/platform/soc*/*firmware/get_throttled"
MODEL_FILE = "firmware/devicetree/base/model"
TOOL_PERIOD_SECONDS = 30.0
"""A process started each period would cost more than all other sensors together."""
TOOL_SECONDS = 2.0


class RaspberryPi:
    """Nothing on any other device."""

    def __init__(self, roots: Roots, reader: DeadlineReader) -> None:
        self._roots = roots
        self._reader = reader
        self._path = next(iter(sorted(roots.sys.glob(FILE_PATTERN))), None)
        self._is_pi = "Raspberry Pi" in read_name(roots.sys / MODEL_FILE)
        self._kept: Throttle | None = None
        self._next_seconds = 0.0

    def read(self) -> Seen:
        """The bits, those of the tool at most `TOOL_PERIOD_SECONDS` old."""
        if self._path is not None:
            try:
                return Seen(throttles=(_throttle(self._reader.text(self._path)),))
            except Unreadable as error:
                return Seen(throttles=(Throttle(NAME, None, reason=str(error)),))
        if not self._is_pi:
            return Seen()
        if self._kept is None or time.monotonic() >= self._next_seconds:
            self._kept, self._next_seconds = self._by_tool(), time.monotonic() + TOOL_PERIOD_SECONDS
        return Seen(throttles=(self._kept,))

    def _by_tool(self) -> Throttle:
        try:
            answer = run_tool(self._roots, "vcgencmd", "get_throttled", deadline_seconds=TOOL_SECONDS)
        except ToolMissing:
            return Throttle(NAME, None, reason="neither a file get_throttled in sysfs nor the tool vcgencmd")
        except ToolFailed as error:
            return Throttle(NAME, None, reason=str(error))
        if answer.code != 0:
            # a service user needs the group video for it
            return Throttle(NAME, None, reason=f"vcgencmd: {answer.error or answer.text.strip()[:100]}")
        return _throttle(answer.text)


def _throttle(text: str) -> Throttle:
    try:
        bits = parse_throttled(text)
    except ValueError as error:
        return Throttle(NAME, None, reason=str(error))
    return Throttle(NAME, bits.now.heat, bits.since_boot.heat, bits.now.under_voltage)
