"""Fields that the release before did not have: both releases understand each other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fleet.coordinator.incoming import LARGEST_UNIX_SECONDS, heartbeat_of
from fleet.coordinator.records import BoxRecord, box_from_json, box_to_json
from stage_runtime.link.control import decode_control, encode_control
from stage_runtime.link.frames import FrameError
from stage_runtime.link.membership import Heartbeat

BEAT = Heartbeat(1, "ready", "", 0, 2, 2, 0.5, 1, 7, 0.0, 0.1, 0.1, 2**30, 2**28, 40.0, "healthy")


def test_a_default_is_left_out_and_another_value_travels() -> None:
    assert "wall_unix_seconds" not in json.loads(encode_control(BEAT))
    assert decode_control(Heartbeat, encode_control(BEAT)) == BEAT
    timed = replace(BEAT, wall_unix_seconds=1.8e9)
    assert json.loads(encode_control(timed))["wall_unix_seconds"] == 1.8e9
    assert decode_control(Heartbeat, encode_control(timed)) == timed


@pytest.mark.parametrize(("missing", "extra"), [("guard_state", {}), ("", {"wall": 1.0}), ("epoch", {"x": 1})])
def test_every_other_key_is_as_strict_as_ever(missing: str, extra: dict[str, object]) -> None:
    data = json.loads(encode_control(BEAT)) | extra
    data.pop(missing, None)
    with pytest.raises(FrameError, match="unknown or missing keys"):
        decode_control(Heartbeat, json.dumps(data).encode())


@pytest.mark.parametrize("wall", ['"now"', "NaN", "1e999", "true", "[]"])
def test_a_time_that_is_none_is_refused(wall: str) -> None:
    body = encode_control(BEAT).decode()[:-1] + f',"wall_unix_seconds":{wall}}}'
    with pytest.raises(FrameError):
        heartbeat_of(body.encode())


@pytest.mark.parametrize("wall", [-2 * LARGEST_UNIX_SECONDS, 2 * LARGEST_UNIX_SECONDS, 1e300])
def test_a_clock_beyond_reason_costs_its_box_nothing(wall: float) -> None:
    assert heartbeat_of(encode_control(replace(BEAT, wall_unix_seconds=wall))) == BEAT


@pytest.mark.parametrize("wall", [0.0, -3600.0, 1.8e9])
def test_a_clock_that_is_merely_wrong_is_taken(wall: float) -> None:
    timed = replace(BEAT, wall_unix_seconds=wall)
    assert heartbeat_of(encode_control(timed)) == timed


def test_a_row_of_a_box_from_before_leases_is_read() -> None:
    record = BoxRecord(3, "p", "10.0.0.2", drained=True)
    assert "lease" not in json.loads(box_to_json(record))
    assert box_from_json(box_to_json(record)) == record
    leased = replace(record, lease="ab", lease_seconds=30.0)
    assert box_from_json(box_to_json(leased)) == leased
    with pytest.raises(ValueError, match="can't be true"):
        box_from_json(box_to_json(replace(record, lease_seconds=-1.0)))
