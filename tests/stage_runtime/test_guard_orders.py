"""What the guards of a box order from its stage: limits, rests, shedding, trimming. Real stages answer all the same."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fleet.coordinator.judge import Evidence, Thresholds, judge
from stage_runtime.link.client import PipelineClient
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, TokenEvent
from stage_runtime.server.admin import LINE_BYTES
from stage_runtime.server.compute import FULL_DUTY_PERCENT, MOST_REST_SECONDS, ComputeThread
from stage_runtime.server.config import load_config
from stage_runtime.server.state import Guarded, StageState
from tests.stage_runtime.conftest import Served
from tests.stage_runtime.site import StageSite, answer, connected, eventually, request
from tests.stage_runtime.test_process import get
from tests.stage_runtime.tiny import TinyModel


class Reading:
    """An answer that is read while it comes."""

    def __init__(self, client: PipelineClient, wanted: GenerateRequest) -> None:
        self.tokens: list[int] = []
        self.end: FinishedEvent | None = None
        self.task = asyncio.ensure_future(self._read(client, wanted))

    async def _read(self, client: PipelineClient, wanted: GenerateRequest) -> None:
        async for event in client.generate(wanted):
            if isinstance(event, TokenEvent):
                self.tokens.append(event.token_id)
            else:
                self.end = event


async def order(site: StageSite, box: str, **wanted: Any) -> dict[str, Any]:
    """An order that is obeyed."""
    obeyed = await site.admin(box, wanted)
    assert "error" not in obeyed
    return obeyed


@asynccontextmanager
async def probed(site: StageSite) -> AsyncIterator[PipelineClient]:
    """A client of a ring in which nothing but what the test asks for is computed."""
    async with connected(site.client()) as client:
        await eventually(lambda: client.status.largest_logit_difference is not None)
        await site.wait_kv_empty()
        yield client


async def test_a_batch_limit_that_changes_in_the_middle_of_answers_changes_no_token(tied: Served) -> None:
    site = tied.site
    async with probed(site) as client:
        answers = [Reading(client, request([number + 3, 7], 30)) for number in range(4)]
        for number, limit in enumerate((1, 8, 2, 1, 8)):
            await eventually(lambda least=4 * number: all(len(each.tokens) > least for each in answers))  # type: ignore[misc]
            assert await order(site, "box2", op="batch-limit", sequences=limit) == {"batch_limit_sequences": limit}
        await asyncio.gather(*(each.task for each in answers))
    for number, each in enumerate(answers):
        assert each.tokens == tied.model.greedy([number + 3, 7], 30)
    assert (await site.health("box2"))["max_batch_sequences"] == 8


async def test_a_stage_that_rests_gives_the_same_tokens_and_looks_alive(tied: Served) -> None:
    site = tied.site
    heard, operator = site.giver.stages["box2"], site.ca.issue("operator").client_context()
    async with probed(site) as client:
        before = len(heard.heartbeats)
        assert await order(site, "box2", op="duty-limit", percent=5) == {"duty_limit_percent": 5.0}
        slow = Reading(client, request([5, 6], 25))
        await eventually(lambda: len(slow.tokens) > 2)
        assert (await site.health("box2"))["duty_limit_percent"] == 5.0
        _, text = await get(site, "box2", "/metrics", operator)
        assert "\nfleet_stage_duty_limit_percent 5.0" in text
        await slow.task
        await order(site, "box2", op="duty-limit", percent=100)
    assert slow.tokens == tied.model.greedy([5, 6], 25)
    beats = heard.heartbeats[before:]
    assert len({beat.progress for beat in beats}) > 2
    thresholds = Thresholds(hung=MOST_REST_SECONDS, ring_trouble=1.0, redial=1.0, dial=1.0)
    for beat in beats:  # `still_seconds` as long as can be: what it says of its work alone must do
        evidence = Evidence("open", 99.0, True, (), beat.state, beat.reason, 0.0, 99.0, beat.working_seconds)
        assert judge(evidence, thresholds).kind == "alive"
    assert heard.registers[-1].serving_epoch in (0, 1)
    assert not site.log("box2").count("ring is broken")


async def test_a_stage_that_rests_gets_ready_for_another_plan(tmp_path: Path, tied_model: TinyModel) -> None:
    site = StageSite(tmp_path, tied_model.directory, tied_model.digest, layers=6, tied=True, stages=2)
    try:
        for box in site.boxes:
            site.start(box)
        async with connected(site.client()) as client:
            await eventually(lambda: client.status.largest_logit_difference is not None)
            for box in site.boxes:
                await order(site, box, op="duty-limit", percent=10)
            open_answer = asyncio.ensure_future(answer(client, request([7, 8], 60)))
            await asyncio.to_thread(site.giver.prepare, 2, site.pipeline_plan(*site.boxes), planned=True)
            votes = await asyncio.to_thread(site.giver.votes, 2)
            assert {box: vote.yes for box, vote in votes.items()} == {"box1": True, "box2": True}
            for box in site.boxes:
                await order(site, box, op="duty-limit", percent=100)
            assert (await open_answer)[0] == tied_model.greedy([7, 8], 60)
    finally:
        site.stop()


async def test_a_rest_is_no_work_and_holds_up_nothing_but_the_next_micro_batch() -> None:
    compute, done = ComputeThread(1), []
    compute.duty_percent = 1.0
    await compute.step(time.sleep, 0.05)
    resting = asyncio.ensure_future(compute.step(done.append, "step"))
    await asyncio.sleep(0)
    assert compute.working_seconds == 0
    await compute.run(done.append, "order")
    assert compute.busy_seconds < MOST_REST_SECONDS
    await resting
    assert done == ["order", "step"]
    assert compute.work.finished == 2
    assert compute.work.usual_step_seconds is not None
    assert compute.work.usual_step_seconds < MOST_REST_SECONDS
    compute.duty_percent = FULL_DUTY_PERCENT
    compute.close()


async def test_memory_is_trimmed_only_while_nothing_is_computed(tied: Served) -> None:
    site = tied.site
    async with probed(site) as client:
        freed = await order(site, "box2", op="trim")
        assert freed["freed_bytes"] >= 0
        await order(site, "box2", op="duty-limit", percent=5)
        reading = Reading(client, request([5, 6], 40))
        await eventually(lambda: len(reading.tokens) > 0)
        refused = await site.admin("box2", {"op": "trim"})
        assert refused == {"error": "the stage is not idle: ask again later"}
        await order(site, "box2", op="duty-limit", percent=100)
        await reading.task
        await site.wait_kv_empty()
        await order(site, "box2", op="trim")


async def test_while_the_middle_stage_sheds_what_is_open_goes_on_and_new_ones_take_turns(tied: Served) -> None:
    site, greedy = tied.site, tied.model.greedy
    operator = site.ca.issue("operator").client_context()
    async with probed(site) as client:
        open_ones = [Reading(client, request([number + 3], 60)) for number in range(3)]
        await eventually(lambda: all(open_one.tokens for open_one in open_ones))
        assert await order(site, "box2", op="shed", shedding=True) == {"shedding": True}
        assert (await site.health("box2"))["shedding"] is True
        _, text = await get(site, "box2", "/metrics", operator)
        assert "\nfleet_stage_shedding_flag 1.0" in text
        seen = len(open_ones[0].tokens)
        await eventually(lambda: len(open_ones[0].tokens) > seen + 8)  # by then the first stage has heard of it
        late = Reading(client, request([9], 1))
        await late.task
        assert all(open_one.end is not None for open_one in open_ones), "it waited for all that was open"
        await asyncio.gather(*(open_one.task for open_one in open_ones))
        assert [open_one.tokens for open_one in open_ones] == [greedy([number + 3], 60) for number in range(3)]
        assert late.tokens == greedy([9], 1)
        in_turn = [Reading(client, request([number + 3], 12)) for number in range(4)]
        most = 0
        while not all(each.task.done() for each in in_turn):
            most = max(most, (await site.health("box3"))["open_sequences"])
            begun = [each for each in in_turn if each.tokens and each.end is None]
            assert len(begun) <= 1
        assert most <= 1
        assert [each.tokens for each in in_turn] == [greedy([number + 3], 12) for number in range(4)]
        await order(site, "box2", op="shed", shedding=False)
        await answer(client, request([5], 2))  # the first stage hears of it
        together = [Reading(client, request([number + 3], 60)) for number in range(3)]
        await eventually(lambda: all(each.tokens and each.end is None for each in together))
        await asyncio.gather(*(each.task for each in together))


async def test_one_stage_alone_sheds_too(single: Served) -> None:
    site = single.site
    async with probed(site) as client:
        await order(site, "box1", op="shed", shedding=True)
        await answer(client, request([5], 2))
        answers = [Reading(client, request([number + 3], 8)) for number in range(3)]
        await asyncio.gather(*(each.task for each in answers))
        await order(site, "box1", op="shed", shedding=False)
    assert [each.tokens for each in answers] == [single.model.greedy([number + 3], 8) for number in range(3)]


async def test_heartbeats_carry_what_the_guards_say(tied: Served) -> None:
    heard = tied.site.giver.stages["box3"]
    await order(
        tied.site, "box3", op="guards", state="degraded: thermal/\x1b[31msoc" + "x" * 500, temperature_celsius=81
    )
    await eventually(lambda: heard.heartbeats[-1].guard_state.startswith("degraded: thermal/"))
    beat = heard.heartbeats[-1]
    assert (len(beat.guard_state) < 201, "\x1b" in beat.guard_state, beat.temperature_celsius) == (True, False, 81.0)
    await order(tied.site, "box3", op="guards", state="healthy", temperature_celsius=-256)
    await eventually(lambda: heard.heartbeats[-1].guard_state == "healthy")
    assert heard.heartbeats[-1].temperature_celsius is None, "no board has that"
    assert heard.heartbeats[-1].wall_unix_seconds is None, "this coordinator does not say that it takes it"


@pytest.fixture
def state(tmp_path: Path, tied_model: TinyModel) -> Iterator[StageState]:
    site = StageSite(tmp_path, tied_model.directory, tied_model.digest, layers=6, tied=True, stages=1)
    path = tmp_path / "stage.json"
    path.write_text(json.dumps(site.config("box1")))
    compute = ComputeThread(1)
    yield StageState(load_config(path), compute)
    compute.close()
    site.stop()


def test_guards_that_say_nothing_any_more_are_silent(state: StageState) -> None:
    assert state.guards == Guarded(), "none run"
    state.guarded = Guarded("healthy", 50.0, time.monotonic() + 60.0)
    assert state.guards.temperature_celsius == 50.0
    state.guarded = Guarded("healthy", 50.0, time.monotonic())
    assert (state.guards.state, state.guards.temperature_celsius) == ("silent", None)


@pytest.mark.parametrize(
    "line",
    [
        b'{"op": "duty-limit", "percent": 0}',
        b'{"op": "duty-limit", "percent": 101}',
        b'{"op": "duty-limit", "percent": true}',
        b'{"op": "duty-limit", "percent": NaN}',
        b'{"op": "duty-limit", "percent": 1' + b"0" * 400 + b"}",
        b'{"op": "duty-limit", "percent": "5"}',
        b'{"op": "batch-limit", "sequences": true}',
        b'{"op": "batch-limit", "sequences": -1}',
        b'{"op": "batch-limit", "sequences": 1.5}',
        b'{"op": "shed", "shedding": 1}',
        b'{"op": "shed", "shedding": null}',
        b'{"op": "shed"}',
        b'{"op": "guards", "state": 1, "temperature_celsius": null}',
        b'{"op": "guards", "state": "healthy"}',
        b'{"op": "guards", "state": "healthy", "temperature_celsius": "hot"}',
        b'{"op": "guards", "state": "healthy", "temperature_celsius": true}',
        b'{"op": ["health"]}',
        b"[" * 60_000,
        b"\xff\xfe",
        b"{}",
        b"null",
        b"1" * 5000,
        b"x" * (LINE_BYTES + 1),
    ],
)
async def test_lines_that_are_no_orders_change_nothing(tied: Served, line: bytes) -> None:
    site = tied.site
    reader, writer = await asyncio.open_unix_connection(str(site.admin_socket("box2")))
    writer.write(line + b"\n")
    assert json.loads(await reader.readline())["error"]
    writer.close()
    health = await site.health("box2")
    assert (health["duty_limit_percent"], health["batch_limit_sequences"], health["shedding"]) == (100.0, 8, False)


@pytest.mark.parametrize("celsius", [b"1" + b"0" * 400, b"NaN", b"-Infinity", b"1e999", b"null"])
async def test_a_temperature_that_no_board_has_is_none(tied: Served, celsius: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(tied.site.admin_socket("box1")))
    writer.write(b'{"op": "guards", "state": "healthy", "temperature_celsius": ' + celsius + b"}\n")
    assert json.loads(await reader.readline()) == {}
    writer.close()
    assert (await tied.site.health("box1"))["state"] in ("loaded", "ready")
