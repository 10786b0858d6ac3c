"""A provisioned site under faults: streams equal to the undisturbed ones, and the way back to a whole site."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fleet.bundle.manifest import load_manifest
from fleet.inventory.sitefile import SiteFile
from tests.figures import note
from tests.lab.lab import Lab, LabBox
from tests.site import faults
from tests.site.askers import MODEL, OfficialClient, ResumingClient
from tests.site.judge import MOST_DIFFERENCE, MOST_NEAR_TIES, Comparison, Judge, Reference
from tests.site.streams import ENOUGH_DEADLINE_SECONDS, FLOWING_TOKENS, MAX_TOKENS, PROMPTS, Prompt, Run, run_streams
from tests.site.watch import Event, Watch

PHASES = ("detect", "plan", "prepare", "commit", "ring")
BACK_DEADLINE_SECONDS = 180.0


class Healing:
    """What the tests of self-healing do with a site.

    Args:
        prompts: asked in every run, unless it names some of them. max_tokens: of each answer.

    Attributes:
        total: comparisons of every run so far.
        difference: δ, the largest logit difference that a ring's probe has seen so far.
    """

    def __init__(
        self, site: SiteFile, lab: Lab, *, prompts: Sequence[Prompt] = PROMPTS, max_tokens: int = MAX_TOKENS
    ) -> None:
        self.site = site
        self.lab = lab
        self.prompts = prompts
        self.max_tokens = max_tokens
        self.watch = Watch(site, lab)
        self.total = Comparison()
        self.difference = 0.0
        directory = load_manifest(site.bundle_directory).model_directory(MODEL)
        self.watch.wait_whole()
        undisturbed = self.stream()
        assert all(stream.is_complete for stream in undisturbed.streams), undisturbed
        self.judge = Judge(undisturbed, Reference(directory))

    def box(self, name: str) -> LabBox:
        """A box of the lab."""
        return self.lab.box(name)

    def stream(
        self,
        *,
        fault: Callable[[], Any] | None = None,
        until: Callable[[], bool] | None = None,
        until_seconds: float = ENOUGH_DEADLINE_SECONDS,
        resumable: bool = False,
        after_tokens: int = FLOWING_TOKENS,
        prompts: Sequence[Prompt] | None = None,
    ) -> Run:
        """Run streams through a fault; `until` may ask who does not answer. See `run_streams`."""
        asker = ResumingClient(self.site) if resumable else OfficialClient(self.site)
        end = None if until is None else lambda: self.watch.holds(until)
        try:
            return run_streams(
                asker,
                prompts=prompts or self.prompts,
                fault=fault,
                until=end,
                until_seconds=until_seconds,
                after_tokens=after_tokens,
                max_tokens=self.max_tokens,
            )
        finally:
            self.difference = max(self.difference, self.watch.largest_logit_difference() or 0.0)

    def compare(self, run: Run) -> Comparison:
        """Judge a run and count it."""
        result = self.judge.compare(run, self.difference or MOST_DIFFERENCE)
        self.total.add(result)
        return result

    def assert_equal(self, run: Run, what: str) -> Comparison:
        """All streams of a run are complete and equal to the undisturbed ones up to near-ties, which are shown."""
        result = self.compare(run)
        note(f"{what}: {result}; longest pause {run.longest_pause:.2f} s, δ {self.difference:.1e}")
        assert result.is_equal, f"{what}: {result}\n{self.watch.report()}"
        return result

    def assert_few_near_ties(self) -> None:
        """No more of all requests than policy `exact` admits."""
        note(f"healing, all together: {self.total}")
        assert len(self.total.near_ties) <= max(1.0, MOST_NEAR_TIES * self.total.streams), str(self.total)

    def note_phases(self, event: Event, what: str) -> None:
        """Show how long each phase of a switch took."""
        took = event["milliseconds"]
        note(f"{what}: " + ", ".join(f"{phase} {took[phase]:.0f} ms" for phase in PHASES if phase in took))

    def committed(self, after: int) -> list[Event]:
        """Plans that were committed behind an event id."""
        return [event for event in self.watch.events(after) if event["kind"] == "plan-committed"]

    def bring_back(self, *names: str) -> Run:
        """Switch boxes on (or plug them in) while streams run, and go on until the site is whole again."""

        def switch_on() -> float:
            moment = time.monotonic()
            for name in names:
                self.box(name).link_heal()
                self.box(name).on(wait=False)
            return moment

        return self.stream(fault=switch_on, until=self.watch.is_whole)

    def recover(self) -> None:
        """End what a test has left, however it ended: cables, power, stopped programs. Then wait for a whole site."""
        for box in self.lab.boxes:
            box.recover()
            faults.go_on(box)
            faults.supervisor(box, "start", "all")
        self.watch.wait_whole(BACK_DEADLINE_SECONDS)
