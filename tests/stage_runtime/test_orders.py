"""PREPARE, COMMIT, ABORT and RETIRE in any order, again, late, with restarts between: a small model says what holds."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.planning.plan import PipelinePlan
from stage_runtime.checkpoint.manifest import read_manifest
from stage_runtime.link.endpoints import LinkSettings
from stage_runtime.link.membership import Abort, Commit, Prepare, Retire, Vote
from stage_runtime.model.store import WeightStore
from stage_runtime.server import plan_log
from stage_runtime.server.compute import ComputeThread
from stage_runtime.server.config import StageConfig, load_config
from stage_runtime.server.epochs import Epochs
from stage_runtime.server.history import History
from stage_runtime.server.loader import Loader
from stage_runtime.server.plan_log import PlanLog, PlanLogError
from stage_runtime.server.process import expected_plan, own_hello
from stage_runtime.server.state import StageState
from tests.stage_runtime.site import StageSite, eventually, split_layers
from tests.stage_runtime.tiny import TinyModel

EPOCHS = 6
Order = tuple[str, int]
orders = st.lists(
    st.tuples(
        st.sampled_from(["prepare", "prepare", "prepare", "commit", "commit", "abort", "retire", "restart"]),
        st.integers(0, EPOCHS),
    ),
    max_size=20,
)


@dataclass
class Small:
    """What a box knows, and what it answers. Even epochs are planned."""

    committed: int = 0
    prepared: int = 0
    fenced: int = 0
    retired: int = 0
    aborted: int = 0
    live: dict[int, bool] = field(default_factory=dict)  # epoch -> committed

    def over(self, epoch: int) -> bool:
        return epoch < self.fenced or epoch <= self.retired

    def logged(self, epoch: int) -> bool:
        return epoch > 0 and epoch in (self.committed, self.prepared)

    @property
    def newest(self) -> int:
        return max(self.committed, self.prepared, self.fenced, self.retired, self.aborted)

    def drop_uncommitted(self) -> None:
        self.live = {epoch: committed for epoch, committed in self.live.items() if committed}

    def prepare(self, epoch: int) -> bool:
        if epoch in self.live:
            return True
        if epoch < max(self.newest, *self.live, 1) or self.over(epoch) or epoch == self.aborted:
            return False
        self.drop_uncommitted()
        if epoch % 2:
            self.fenced = epoch
            self.live = {}
        self.live[epoch] = False
        self.prepared = epoch
        return True

    def commit(self, epoch: int) -> bool:
        if self.live.get(epoch):
            return True
        if epoch not in self.live and (not self.logged(epoch) or self.over(epoch)):
            return False
        if epoch not in self.live:
            self.drop_uncommitted()
        self.live[epoch] = True
        self.committed, self.prepared = epoch, 0
        for old in sorted(each for each, committed in self.live.items() if committed)[:-2]:
            del self.live[old]
        return True

    def abort(self, epoch: int) -> None:
        if self.live.get(epoch) or not (epoch in self.live or self.logged(epoch)):
            return
        self.aborted = max(self.aborted, epoch)
        self.prepared = 0 if self.prepared == epoch else self.prepared
        self.live.pop(epoch, None)

    def retire(self, epoch: int) -> None:
        self.retired = max(self.retired, min(epoch, max(self.newest, *self.live, 0)))
        self.live = {each: committed for each, committed in self.live.items() if each > self.retired}

    def restart(self) -> None:
        self.live, self.aborted = {}, 0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tied_model: TinyModel) -> Iterator[StageConfig]:
    """Of a box that serves the whole model."""
    directory = tmp_path_factory.mktemp("orders")
    site = StageSite(directory, tied_model.directory, tied_model.digest, layers=6, tied=True, stages=1)
    path = directory / "stage.json"
    path.write_text(json.dumps(site.config("box1")))
    yield load_config(path)


class Box:
    """Epochs over a real plan log and real weights; links are nobody's, as its plans have one stage."""

    def __init__(self, config: StageConfig, directory: Path) -> None:
        self.config = config
        self.compute = ComputeThread(1)
        manifest = read_manifest(config.model_directory, config.model_digest)
        self.loader = Loader(WeightStore(config.model_directory, manifest, "dense"), 1, 0)
        self.expected = expected_plan(config, manifest)
        self.settings = LinkSettings(own_hello(config), config.tls, config.link_timing)
        self.log = PlanLog(directory)
        self.votes: list[Vote] = []
        self.epochs: Epochs
        self._running: asyncio.Task[None]

    async def start(self) -> None:
        recovered = await self.log.open()
        state = StageState(self.config, self.compute)
        self.epochs = Epochs(state, self.settings, self.expected, self.loader, History(self.log, recovered))
        self.epochs.on_vote = self.votes.append
        self._running = asyncio.ensure_future(self.epochs.run())

    async def stop(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def prepare_of(self, epoch: int) -> Prepare:
        plan = self.plan()
        return Prepare("main", epoch, plan, {"box1": "127.0.0.1:7401"}, planned=epoch % 2 == 0)

    def plan(self) -> PipelinePlan:
        stages = split_layers(["box1"], 6, tied=True)
        return PipelinePlan("tiny", self.config.model_digest, 6, "exact", 4, 64, stages)

    async def vote(self, epoch: int) -> Vote:
        """PREPARE, and the vote that follows."""
        heard = len(self.votes)
        await self.epochs.prepare(self.prepare_of(epoch))
        await eventually(lambda: len(self.votes) > heard, lambda: f"a vote for {epoch}")
        return self.votes[-1]

    def seen(self) -> Small:
        history = self.epochs.history
        live = {number: epoch.view.committed for number, epoch in self.epochs.live.items()}
        prepared = history.prepared.epoch if history.prepared else 0
        return Small(history.committed_epoch, prepared, history._fenced, history.retired_epoch, history._aborted, live)


async def give(box: Box, small: Small, order: Order) -> None:
    """One order to both."""
    kind, epoch = order
    if kind == "prepare":
        vote = await box.vote(epoch)
        assert (vote.epoch, vote.yes) == (epoch, small.prepare(epoch)), vote
    elif kind == "commit":
        assert await box.epochs.commit(Commit(epoch)) == small.commit(epoch)
    elif kind == "abort":
        await box.epochs.abort(Abort(epoch, "the test says so"))
        small.abort(epoch)
    elif kind == "retire":
        await box.epochs.retire(Retire(epoch, "the test says so"))
        small.retire(epoch)
    else:
        await box.stop()
        await box.start()
        small.restart()


@settings(max_examples=40)
@given(orders)
def test_orders_in_any_order(config: StageConfig, given_orders: list[Order]) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            box, small = Box(config, Path(directory)), Small()
            await box.start()
            try:
                for order in given_orders:
                    await give(box, small, order)
                    assert box.seen() == small, order
                    assert box.epochs.history.newest_epoch == small.newest
            finally:
                await box.stop()
                box.loader.close()
                box.compute.close()
                box.log.close()

    asyncio.run(run())


async def test_a_late_abort_ends_no_later_epoch(config: StageConfig, tmp_path: Path) -> None:
    """Epoch 2 is voted for, epoch 4 takes its place and is still being prepared when epoch 2 is aborted once more."""
    box = Box(config, tmp_path)
    await box.start()
    assert (await box.vote(2)).yes
    await box.epochs.prepare(box.prepare_of(4))
    await box.epochs.abort(Abort(2, "late"))
    await eventually(lambda: len(box.votes) > 1, lambda: box.votes)
    assert (box.votes[-1].epoch, box.votes[-1].yes) == (4, True)
    await box.stop()
    box.log.close()


@settings(max_examples=25)
@given(orders)
def test_orders_that_do_not_wait_for_votes(config: StageConfig, given_orders: list[Order]) -> None:
    """Whatever is under way when the next order comes: what is over stays over, and nobody votes for it."""

    async def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            box = Box(config, Path(directory))
            await box.start()
            try:
                for kind, epoch in given_orders:
                    if kind == "prepare":
                        await box.epochs.prepare(box.prepare_of(epoch))
                    elif kind == "restart":
                        await asyncio.sleep(0.002 * epoch)
                    elif kind == "commit":
                        await box.epochs.commit(Commit(epoch))
                    else:
                        await give(box, Small(), (kind, epoch))
                    seen = box.seen()
                    assert not any(seen.over(number) for number in seen.live)
                    assert sum(seen.live.values()) <= 2
                    assert len(seen.live) - sum(seen.live.values()) <= 1
                last = max(box.epochs.live, default=0)
                if last and not box.epochs.live[last].view.committed:
                    await eventually(lambda: any(vote.epoch == last for vote in box.votes), lambda: box.votes)
            finally:
                await box.stop()
                box.loader.close()
                box.compute.close()
                box.log.close()

    asyncio.run(run())


async def test_a_disk_that_does_not_answer_while_layers_are_loaded_keeps_no_order_waiting(
    config: StageConfig, tmp_path: Path
) -> None:
    box, answers = Box(config, tmp_path), threading.Event()
    await box.start()
    box.loader._urgent.submit(answers.wait)  # the thread is in a read that does not return
    await box.epochs.prepare(box.prepare_of(2))
    await eventually(lambda: box.loader._urgent._work_queue.qsize() > 0)  # its first layer waits for the thread
    await box.epochs.abort(Abort(2, "no vote in time"))
    await box.epochs.retire(Retire(1, "it is over"))
    assert box.epochs.live == {}
    await box.epochs.prepare(box.prepare_of(4))
    assert not box.votes
    answers.set()
    await eventually(lambda: bool(box.votes), lambda: box.votes)
    assert (box.votes[0].epoch, box.votes[0].yes) == (4, True)
    await box.stop()
    box.log.close()


async def test_a_disk_that_does_not_answer_writes_is_a_no(
    config: StageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, answers = Box(config, tmp_path), threading.Event()
    await box.start()
    monkeypatch.setattr(plan_log, "ANSWER_SECONDS", 0.2)
    box.log._executor.submit(answers.wait)
    vote = await box.vote(2)
    assert (vote.yes, "the disk has not answered" in vote.reason) == (False, True)
    with pytest.raises(PlanLogError, match="has not answered"):
        await box.epochs.prepare(box.prepare_of(3))
    answers.set()
    monkeypatch.undo()
    assert (await box.vote(4)).yes
    assert await box.epochs.commit(Commit(4))
    await box.stop()
    box.log.close()
    log = PlanLog(tmp_path)
    assert (await log.open()).committed == box.prepare_of(4)
    log.close()
