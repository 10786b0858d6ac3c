"""Tells the stage how its box stands, so that heartbeats carry it to the coordinator and to `fleet status`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Protocol

from guards.board import Board, Standing
from guards.findings import State
from guards.guard import ActionFailed

log = logging.getLogger(__name__)

TELL_SECONDS = 5.0
MOST_CHARACTERS = 160
TEMPERATURE_PART, TEMPERATURE = "temperature", "celsius"  # of the thermal guard: what the limits follow


class Listener(Protocol):
    """The stage of this box (`guards/stage_client.py`)."""

    def tell(self, state: str, temperature_celsius: float | None) -> None:
        """How the box stands; ActionFailed if the stage does not take it."""


def summary(standings: Mapping[str, Standing]) -> str:
    """The worst state, and which parts are in it: "unhealthy: clock/clock, memory/stage". Pure."""
    worst = max((standing.state for standing in standings.values()), key=lambda state: state.severity)
    if worst.severity <= State.INITIALISING.severity:
        return State.HEALTHY.value if worst is not State.INITIALISING else worst.value
    parts = [
        f"{name}/{finding.part}"
        for name, standing in standings.items()
        for finding in standing.findings
        if finding.state is worst
    ]
    return f"{worst.value}: {', '.join(parts)}"[:MOST_CHARACTERS]


def temperature_celsius(standings: Mapping[str, Standing]) -> float | None:
    """Of the hottest sensor on or near the chips; None if unknown. Pure."""
    for finding in standings["thermal"].findings:
        if finding.part == TEMPERATURE_PART:
            value = finding.evidence.get(TEMPERATURE)
            return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    return None


class Telling:
    """A thread that tells every few seconds; a stage that does not listen now is told the next time."""

    def __init__(self, stage: Listener, board: Board) -> None:
        self._stage, self._board = stage, board
        self._stopping = threading.Event()
        self._away = False

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="telling", daemon=True).start()

    def stop(self) -> None:
        """Tell no more."""
        self._stopping.set()

    def tell(self) -> None:
        """Tell once; a line in the log when the stage goes away, and when it listens again."""
        standings = self._board.standings()
        try:
            self._stage.tell(summary(standings), temperature_celsius(standings))
        except ActionFailed as error:
            if not self._away:
                log.info("the stage is not told how its box stands: %s", error)
            self._away = True
        else:
            if self._away:
                log.info("the stage is told again how its box stands")
            self._away = False

    def _run(self) -> None:
        while not self._stopping.wait(TELL_SECONDS):
            try:
                self.tell()
            except Exception:  # a mistake here must not silence the guards for good
                log.exception("telling the stage")
