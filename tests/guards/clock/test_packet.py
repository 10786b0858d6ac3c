from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.clock.packet import (
    Answer,
    Exchange,
    KissOfDeath,
    ServerUnusable,
    is_answer,
    judge_answer,
    request_bytes,
    unix_seconds,
)
from guards.settings import ClockSettings
from tests.guards.clock.helpers import BUILT, LIMITS, NTP_SECONDS, Reply

NONCE = b"nonce-of"
NOW = BUILT + 86_400
GOOD = Reply(NOW, NOW)
AT_NOW = Exchange("10.0.0.1", NOW, 0.0)


def judged(reply: Reply, exchange: Exchange = AT_NOW) -> Answer:
    return judge_answer(reply.packed(NONCE), exchange, LIMITS, ClockSettings())


def test_a_request_is_a_client_s_and_tells_nothing_but_the_nonce() -> None:
    request = request_bytes(NONCE)
    assert len(request) == 48 and request[0] == 0b00_100_011 and request[40:] == NONCE
    assert not any(request[1:40])


def test_only_what_has_our_nonce_is_an_answer() -> None:
    assert is_answer(GOOD.packed(NONCE), NONCE)
    assert not is_answer(GOOD.packed(b"another!"), NONCE)
    assert not is_answer(GOOD.packed(NONCE)[:47], NONCE)
    assert not is_answer(b"", NONCE)


@given(
    ahead=st.floats(-1e8, 1e8),
    there=st.floats(0, 1),
    held=st.floats(0, 0.5),
    back=st.floats(0, 1),
)
def test_the_offset_is_true_to_half_of_the_delay(ahead: float, there: float, held: float, back: float) -> None:
    """`ahead`: of the box's clock; the server has the true time."""
    received = NOW + there
    sent = received + held
    answer = judged(Reply(received, sent), Exchange("x", NOW + ahead, there + held + back))
    assert abs(answer.offset_seconds - ahead) <= answer.uncertainty_seconds + 2e-6
    assert answer.delay_seconds == pytest.approx(there + back, abs=2e-6)


@pytest.mark.parametrize("code", [b"RATE", b"DENY", b"RSTR"])
def test_a_kiss_of_death(code: bytes) -> None:
    with pytest.raises(KissOfDeath, match=code.decode()):
        judged(replace(GOOD, stratum=0, leap=3, reference=code))


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (replace(GOOD, stratum=0, reference=b"INIT"), "stratum 0"),
        (replace(GOOD, stratum=0, reference=b"\xff\xfe\xfd\xfc"), "stratum 0"),
        (replace(GOOD, stratum=16), "not synchronised"),
        (replace(GOOD, leap=3), "leap 3"),
        (replace(GOOD, mode=3), "mode 3"),
        (replace(GOOD, mode=6), "mode 6"),
        (replace(GOOD, sent=0), "without timestamps"),
        (replace(GOOD, received=0), "without timestamps"),
        (replace(GOOD, root_dispersion=16.0), "may be off by 16"),
        (replace(GOOD, root_delay=7.0), "may be off by 3.5"),
        (Reply(BUILT - 3600, BUILT - 3600), "time that can't be"),
        (Reply(100.0, 100.0), "time that can't be"),  # 1970
        (Reply(BUILT + 21 * 31_556_952, BUILT + 21 * 31_556_952), "time that can't be"),
        (Reply(NOW, NOW + 60), "do not fit"),  # holds longer than we waited
        (Reply(NOW, NOW - 60), "do not fit"),
    ],
)
def test_answers_that_say_nothing(reply: Reply, reason: str) -> None:
    with pytest.raises(ServerUnusable, match=reason) as raised:
        judged(reply)
    assert not isinstance(raised.value, KissOfDeath)


@pytest.mark.parametrize(
    ("fields", "free"),
    [
        ({}, False),
        ({"reference": b"\x7f\x7f\x01\x01"}, True),
        ({"reference": b"LOCL"}, True),
        ({"stratum": 10}, True),
        ({"stratum": 9}, False),
    ],
)
def test_a_server_without_a_source_is_known(fields: dict[str, object], free: bool) -> None:
    reply = replace(GOOD, **fields)  # type: ignore[arg-type]
    assert judged(reply).free_running is free
    at_a_site_without_any = replace(ClockSettings(), local_stratum=16.0)
    assert not judge_answer(reply.packed(NONCE), AT_NOW, LIMITS, at_a_site_without_any).free_running


@given(data=st.binary(max_size=128))
def test_any_bytes_are_judged_or_refused(data: bytes) -> None:
    try:
        answer = judge_answer(data, AT_NOW, LIMITS, ClockSettings())
    except ServerUnusable as error:
        assert str(error)
    else:
        assert answer.server == "10.0.0.1"


@given(unix=st.floats(0, 2**36), apart=st.floats(-2e9, 2e9))
def test_eras_are_told_apart_by_what_is_near(unix: float, apart: float) -> None:
    stamp = (unix + NTP_SECONDS) % 2**32
    assert unix_seconds(stamp, unix + apart) == pytest.approx(unix, abs=1e-3)


def test_after_2036_timestamps_begin_anew_and_the_box_in_1970_is_found_far_behind() -> None:
    later = BUILT + 15 * 31_556_952  # 2041
    answer = judged(Reply(later, later), Exchange("x", 5.0, 0.0))
    assert answer.offset_seconds == pytest.approx(5.0 - later, abs=1e-3)
