"""What a stage tells a coordinator that was away: every ring as it is now, and the epochs that it takes no more."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage_runtime.link.membership import LinkReport
from tests.stage_runtime.site import StageSite
from tests.stage_runtime.tiny import TinyModel


@pytest.fixture
def site(tmp_path: Path, tied_model: TinyModel) -> Iterator[StageSite]:
    """Three stages that serve epoch 1."""
    made = StageSite(tmp_path, tied_model.directory, tied_model.digest, layers=6, tied=True)
    for box in made.boxes:
        made.start(box)
    made.giver.wait_registered(*made.boxes)
    made.giver.wait(lambda: made.giver.committed_epoch == 1)
    made.giver.obedient = False
    yield made
    made.stop()


def test_reports_of_every_live_ring_come_again_after_registration(site: StageSite) -> None:
    giver = site.giver
    giver.wait(lambda: all(_known(site, box, 1) for box in site.boxes))
    giver.switch(site.pipeline_plan("box1", "box2", "box3"), planned=True)  # epoch 1 is open still
    giver.wait(lambda: all(_known(site, box, 2) for box in site.boxes))
    giver.go()
    site.kill("box3")
    for heard in giver.stages.values():
        heard.reports.clear()
    giver.come_back()
    giver.wait_registered("box1", "box2", starts=2)
    for box in ("box1", "box2"):
        # both rings have lost it, and it is said without anyone asking
        giver.wait(functools.partial(_is_told, site, box, "box3", {1, 2}))
        assert all(report.kind != "connected" for report in _about(site, box, "box3"))
    giver.retire(1)
    giver.go()
    for heard in giver.stages.values():
        heard.reports.clear()
    giver.come_back()
    giver.wait_registered("box1", "box2", starts=3)
    giver.wait(lambda: _about(site, "box1", "box3"))
    assert {report.epoch for report in _about(site, "box1", "box3")} == {2}  # of a ring that is over, nothing


def _about(site: StageSite, box: str, neighbour: str) -> list[LinkReport]:
    return [report for report in site.giver.stages[box].reports if report.box == neighbour]


def _is_told(site: StageSite, box: str, neighbour: str, epochs: set[int]) -> bool:
    return {report.epoch for report in _about(site, box, neighbour)} == epochs


def _known(site: StageSite, box: str, epoch: int) -> bool:
    """Whether it has said that it is connected with both its neighbours."""
    reports = [report for report in site.giver.stages[box].reports if report.epoch == epoch]
    return len({report.box for report in reports if report.kind == "connected"}) == len(site.boxes) - 1


def test_epochs_that_were_given_up_are_told(site: StageSite) -> None:
    """A coordinator that has lost its memory must not give out a number that this box takes no plan under."""
    giver = site.giver
    giver.prepare(7, site.pipeline_plan("box1", "box2"), only="box1")  # fences epoch 1
    giver.wait(lambda: giver.stages["box1"].vote(7))
    giver.abort(7)
    giver.go()
    giver.come_back()
    giver.wait_registered("box1", starts=2)
    register = giver.stages["box1"].registers[-1]
    assert (register.committed_epoch, register.prepared_epoch, register.serving_epoch) == (1, 7, 0)
