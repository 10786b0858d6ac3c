"""Whose programs may restart now: while the site serves, one box after the other, each once the last is back.

A box's turn begins when everything has arrived and ends when the coordinator has given the box its place again, so no
answer waits for more than a planned switch. A box that fails on the new release, or does not come back, ends it for
the others: they keep what they run. Where no box can be spared, or old and new can't serve together, all restart at
once: one outage instead of many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from fleet.errors import ExitCode
from fleet.planning.spec import PipelineSpec
from fleet.provision.diff import Changes
from fleet.provision.rollout_gate import RESTING_STATES, Expected, HealthTarget, ask_site, entries, wait_until_spread
from fleet.ssh.pool import Cancellation
from fleet.ssh.results import BoxError
from stage_runtime.link.control import PROTOCOL

STEP = "turn"
LOOK_UP_SECONDS = 0.2
"""A waiting box looks so often whether the run was interrupted."""
QUESTIONS = 3
PAUSE_SECONDS = 1.0
"""A coordinator that does not answer is asked again: it may be restarting, or one packet was lost."""
ACTIVATING = ("link", "supervisor", "program")
DISTURBING_NOBODY = {"missing", "stopped"}
"""Why something is started that does not run yet."""
SERVING = ("serving", "replanning")


def restarts(changes: Changes) -> bool:
    """Whether these changes restart programs that answers may depend on. Pure."""
    return any(change.kind in ACTIVATING and not DISTURBING_NOBODY & set(change.why.split(", ")) for change in changes)


def serves(document: Mapping[str, Any]) -> bool:
    """Whether anything can be disturbed: a pipeline of `/v1/site` serves, or heals just now. Pure."""
    return any(pipeline.get("state") in SERVING for pipeline in entries(document, "pipelines").values())


def why_together(document: Mapping[str, Any], wanted: Mapping[str, PipelineSpec]) -> str:
    """Why turns would help nobody; empty if they do. Pure.

    Args:
        document: the coordinator's `/v1/site`. wanted: the pipelines after this run.
    """
    if document.get("protocol") != PROTOCOL:
        return f"the releases speak different protocols ({document.get('protocol')} and {PROTOCOL})"
    serving = {
        name: pipeline
        for name, pipeline in entries(document, "pipelines").items()
        if name in wanted and pipeline.get("state") in SERVING
    }
    for name, pipeline in serving.items():
        told = (pipeline.get("model_digest"), pipeline.get("policy"))
        if told != (wanted[name].model_digest, wanted[name].policy):
            return f"pipeline {name} gets another model or numeric policy"
    for name, pipeline in serving.items():
        members = {stage.get("box") for stage in pipeline.get("stages", []) if isinstance(stage, dict)}
        if members and members <= set(pipeline.get("unsurvivable", [])):
            return f"pipeline {name} can spare no box"
    return ""


def place_of(box: str, document: Mapping[str, Any]) -> Expected:
    """What must be so again after a box's turn, by `/v1/site` before it: its own place, and who is heard. Pure."""
    boxes = entries(document, "boxes")
    heard = [name for name, entry in boxes.items() if entry.get("heartbeat") is not None and name != box]
    if box not in boxes:
        return Expected({}, heard)
    states = ("serving", "drained") if boxes[box].get("state") == "serving" else RESTING_STATES
    return Expected({box: states}, heard)


class Turns:
    """The turns of one run.

    Args:
        coordinator: where the site is asked how it is; None for a site without one, which has no turns.
        wanted: the pipelines after this run.
        at_once: the operator wants no turns.
        seconds: a box must be back after so long.
        report: takes a line of progress.
    """

    def __init__(
        self,
        coordinator: HealthTarget | None,
        wanted: Mapping[str, PipelineSpec],
        *,
        at_once: bool,
        seconds: float,
        cancellation: Cancellation,
        report: Callable[[str], None],
    ) -> None:
        self._coordinator = coordinator
        self._wanted = wanted
        self._seconds = seconds
        self._cancellation = cancellation
        self._report = report
        self._lock = threading.Lock()
        self._one_by_one: bool | None = False if at_once else None
        self._holder = ""
        self._failed = ""
        self._expected = Expected({})  # of the holder

    def of(self, box: str, changes: Changes) -> Turn:
        """The turn of a box; use it as a context manager around everything that may end with restarts."""
        return Turn(self, box, needed=restarts(changes))

    def take(self, box: str) -> bool:
        """Wait until the box may restart; True if it has a turn that must be given back.

        Raises:
            BoxError: the run was interrupted, or an earlier box failed.
        """
        told = False
        while not self._lock.acquire(timeout=LOOK_UP_SECONDS):
            self._look_up(box)
            if not told and self._one_by_one and self._holder:
                told = True
                self._report(f"{box}: everything has arrived; {self._holder} restarts first")
        try:
            self._look_up(box)
            if self._one_by_one is None:
                self._one_by_one = self._decide(box)
            if self._failed:
                raise BoxError(
                    box,
                    STEP,
                    f"keeps the release that it runs, because {self._failed}",
                    hint=f"mend that, then provision again (to leave it out: --limit '!{self._failed.split()[0]}')",
                )
            if self._one_by_one:
                self._holder, self._expected = box, place_of(box, self._ask(box) or {})
                return True
        except BaseException:
            self._lock.release()
            raise
        self._lock.release()
        return False

    def give_back(self, box: str, error: BaseException | None) -> None:
        """End a turn that `take` gave, once the box has its place in the plan again.

        Raises:
            BoxError: it does not come back, or the run was interrupted.
        """
        try:
            if error is not None:
                if not (isinstance(error, BoxError) and error.step == STEP):  # else it was lost while it waited
                    self._failed = f"{box} failed on the new one"
                return
            assert self._coordinator is not None  # noqa: S101 - without it nobody has a turn
            reason = wait_until_spread(
                self._coordinator,
                seconds=self._seconds,
                report=lambda line: self._report(f"{box}: {line}"),
                expected=self._expected,
                pause=lambda seconds: self._pause(box, seconds),
            )
            if reason is not None:
                self._failed = f"{box} is not back in the plan"
                raise BoxError(
                    box,
                    STEP,
                    f"runs the new release, but is not back in the plan after {self._seconds:.0f} s: {reason}",
                    hint="fleet status and fleet events say why; the boxes after it keep what they run",
                )
        finally:
            self._holder = ""
            self._lock.release()

    def _ask(self, box: str) -> dict[str, Any] | None:
        """The coordinator's `/v1/site`; None if it does not answer."""
        if self._coordinator is None:
            return None
        for number in range(QUESTIONS):
            if number:
                self._pause(box, PAUSE_SECONDS)
            if (document := ask_site(self._coordinator)) is not None:
                return document
        return None

    def _decide(self, box: str) -> bool:
        """Whether there are turns in this run, by how the site is before its first restart."""
        document = self._ask(box)
        if document is None or not serves(document):
            return False
        if reason := why_together(document, self._wanted):
            self._report(f"all boxes restart at once, answers wait until they are back: {reason}")
            return False
        self._report("the site serves: boxes restart one after the other, each once the last is back in the plan")
        return True

    def _pause(self, box: str, seconds: float) -> None:
        self._cancellation.sleep(seconds)
        self._look_up(box)

    def _look_up(self, box: str) -> None:
        if self._cancellation.cancelled:
            raise BoxError(box, STEP, "interrupted", hint="provision again", exit_code=ExitCode.INTERRUPTED)


class Turn:
    """One box's turn; `begin` is called when everything has arrived."""

    def __init__(self, turns: Turns, box: str, *, needed: bool) -> None:
        self._turns = turns
        self._box = box
        self._needed = needed
        self._held = False

    def begin(self) -> None:
        """Wait for it, if the box needs one. Raises BoxError, see `Turns.take`."""
        self._held = self._needed and self._turns.take(self._box)

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            self._turns.give_back(self._box, error)
