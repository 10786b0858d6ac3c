"""Hold-down, awake clock, store, configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.coordinator import store as store_module
from fleet.coordinator.awake import AwakeClock
from fleet.coordinator.config import load_config
from fleet.coordinator.hold_down import HoldDown
from fleet.coordinator.records import BoxRecord, EpochRecord, Event
from fleet.coordinator.store import Store
from fleet.errors import ExitCode, FleetError
from tests.coordinator.site import config_data
from tests.coordinator.test_decide import PLAN
from tests.stage_runtime.pki import SiteCa

FIRST, MOST, FORGET, SETTLE = 60.0, 3600.0, 21600.0, 10.0


def test_it_doubles_up_to_the_most_and_is_forgotten() -> None:
    hold, now, lasted = HoldDown(FIRST, MOST, FORGET), 0.0, []
    for _ in range(9):
        hold.died(now)
        lasted.append(hold.remaining(now))
        now += hold.remaining(now) + 1
    assert lasted == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert hold.remaining(now) == 0
    hold.died(now + FORGET)
    assert hold.remaining(now + FORGET) == FIRST


def test_what_an_earlier_process_kept_goes_on() -> None:
    hold = HoldDown(FIRST, MOST, FORGET)
    hold.restore(5.0, deaths=2, remaining=30.0)
    assert hold.remaining(5.0) == 30.0
    hold.died(6.0)
    assert hold.remaining(6.0) == 240.0


@given(st.lists(st.floats(0.01, 3.0), min_size=20, max_size=20))
def test_a_box_that_flaps_twenty_times_in_a_minute_costs_two_plans_at_most(gaps: list[float]) -> None:
    """It comes back at once each time; its death costs a plan if it is in the plan, and so does its return."""
    hold, now, in_plan, plans = HoldDown(FIRST, MOST, FORGET), 0.0, True, 0
    for gap in gaps:
        hold.died(now)
        plans += in_plan
        in_plan = False
        if gap >= max(SETTLE, hold.remaining(now)):
            in_plan, plans = True, plans + 1
        now += gap
    assert now <= 60 and plans <= 2


@given(st.lists(st.floats(0.0, 1e5), max_size=30))
def test_a_hold_down_never_gets_shorter_by_a_death(gaps: list[float]) -> None:
    hold, now = HoldDown(FIRST, MOST, FORGET), 0.0
    for gap in gaps:
        before = hold.remaining(now)
        hold.died(now)
        assert max(before, FIRST) - 1e-6 <= hold.remaining(now) <= MOST + 1e-6  # rounding of sums
        now += gap


def test_a_pause_of_the_listener_is_no_silence() -> None:
    real = [0.0]
    clock = AwakeClock(lambda: real[0], 0.25)
    for _ in range(4):
        real[0] += 0.25
        clock.tick()
    assert clock.now() == pytest.approx(1.0)
    real[0] += 100.0  # stopped
    assert clock.now() < 2.0
    clock.tick()
    real[0] += 0.2
    assert 1.2 < clock.now() < 2.0


async def test_events_are_bounded_and_paged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_EVENTS", 50)
    store = Store(tmp_path / "coordinator.sqlite")
    await store.open()
    for number in range(500):
        store.event(Event("box-dead", f"event {number}", milliseconds={"detect": number}))
    events = await store.events(0, 1000)
    assert [event.text for event in events] == [f"event {number}" for number in range(450, 500)]
    assert events[-1].milliseconds == {"detect": 499}
    page = await store.events(events[10].id, 5)
    assert [event.id for event in page] == [event.id for event in events[11:16]]
    await store.close()


async def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "coordinator.sqlite")
    await store.open()
    store.reserve("main", 7)
    store.epoch("main", EpochRecord(6, PLAN, "preparing", True))
    store.epoch_state("main", 6, "committed")
    record = BoxRecord(3, "abc", "10.0.0.1", 2**33, 0.01, None, 2, 33.5, True)
    store.box("box1", record)
    await store.close()
    again = Store(tmp_path / "deep" / "coordinator.sqlite")
    kept = await again.open()
    assert kept.epochs == {"main": [EpochRecord(6, PLAN, "committed", True)]}
    assert kept.boxes == {"box1": record}
    assert kept.reserved["main"] >= 7
    await again.close()
    again.note("SELECT 1")
    with pytest.raises(RuntimeError):  # it was closed, and is not opened again behind anybody's back
        await again.commit()


@pytest.mark.parametrize("damage", [b"", b"x" * 5000, b"SQLite format 3\0" + b"\xff" * 5000])
async def test_a_damaged_database_is_moved_and_kept(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "coordinator.sqlite"
    path.write_bytes(damage)
    store = Store(path)
    assert (await store.open()).epochs == {}
    await store.close()
    if damage:
        assert store.set_aside is not None and store.set_aside.read_bytes() == damage


async def test_a_second_coordinator_on_the_same_directory_is_refused_before_it_reads(tmp_path: Path) -> None:
    first, second = Store(tmp_path / "coordinator.sqlite"), Store(tmp_path / "coordinator.sqlite")
    await first.open()
    with pytest.raises(FleetError, match="another coordinator runs on it") as refused:
        await second.open()
    assert refused.value.exit_code == 4
    await first.close()
    await second.open()
    await second.close()


async def test_a_directory_that_can_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FleetError, match="cannot use it"):
        await Store(tmp_path / "file" / "coordinator.sqlite").open()


def test_what_provisioning_writes_is_read(tmp_path: Path, ca: SiteCa) -> None:
    file = tmp_path / "coordinator.json"
    file.write_text(json.dumps(config_data(tmp_path, ca)))
    config = load_config(file)
    assert (config.site, config.pipeline_of("box2"), config.pipeline_of("control")) == ("demo", "main", "")
    assert config.timing.dial_seconds == pytest.approx(1.9)


def _cut(data: dict[str, Any]) -> None:
    del data["timing"]["settle_seconds"]


def _foreign(data: dict[str, Any]) -> None:
    data["pipelines"]["main"]["boxes"].append("box9")


def _schema(data: dict[str, Any]) -> None:
    data["schema"] = 9


def _nobody(data: dict[str, Any]) -> None:
    data["pipelines"] = {}


def _rate(data: dict[str, Any]) -> None:
    data["boxes"]["box1"]["bytes_per_second"] = 0


def _ring(data: dict[str, Any]) -> None:
    del data["timing"]["ring_ping_seconds"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut, "timing.settle_seconds"),
        (_foreign, "box9"),
        (_schema, "schema: read 9"),
        (_nobody, "at least one"),
        (_rate, "bytes_per_second"),
        (_ring, "ring_ping_seconds"),
    ],
)
def test_a_wrong_value_is_named(
    tmp_path: Path, ca: SiteCa, damage: Callable[[dict[str, Any]], None], said: str
) -> None:
    data = config_data(tmp_path, ca)
    damage(data)
    file = tmp_path / "coordinator.json"
    file.write_text(json.dumps(data))
    with pytest.raises(FleetError, match=r"coordinator\.json") as caught:
        load_config(file)
    assert said in caught.value.message
    assert caught.value.exit_code == ExitCode.INVALID_INVENTORY
