"""Throttle bits of Raspberry Pis: every combination."""

from __future__ import annotations

import itertools

import pytest

from guards.thermal.throttled import Bits, parse_throttled

COMBINATIONS = tuple(itertools.product((False, True), repeat=4))

# under-voltage, frequency capped, throttled, soft temperature limit → slowed down for heat
HEAT = {
    (False, False, False, False): False,
    (False, False, False, True): True,
    (False, False, True, False): True,
    (False, False, True, True): True,
    (False, True, False, False): True,
    (False, True, False, True): True,
    (False, True, True, False): True,
    (False, True, True, True): True,
    (True, False, False, False): False,
    (True, False, False, True): True,
    (True, False, True, False): False,
    (True, False, True, True): True,
    (True, True, False, False): False,
    (True, True, False, True): True,
    (True, True, True, False): False,
    (True, True, True, True): True,
}


def word(now: tuple[bool, ...], since_boot: tuple[bool, ...]) -> int:
    return sum(bit << index for index, bit in enumerate((*now, *([False] * 12), *since_boot)))


@pytest.mark.parametrize("since_boot", COMBINATIONS)
@pytest.mark.parametrize("now", COMBINATIONS)
def test_live_bits_decide_whatever_those_since_boot_say(now: tuple[bool, ...], since_boot: tuple[bool, ...]) -> None:
    read = parse_throttled(f"throttled={word(now, since_boot):#x}\n")
    assert read.now == Bits(*now)
    assert read.since_boot == Bits(*since_boot)
    assert read.now.heat is HEAT[now]
    assert read.since_boot.heat is HEAT[since_boot]


@pytest.mark.parametrize(
    ("text", "now", "since_boot"),
    [
        ("throttled=0x0\n", (False, False, False, False), (False, False, False, False)),
        ("throttled=0x50000\n", (False, False, False, False), (True, False, True, False)),
        ("throttled=0x50005\n", (True, False, True, False), (True, False, True, False)),
        ("throttled=0x80008\n", (False, False, False, True), (False, False, False, True)),
        ("80008\n", (False, False, False, True), (False, False, False, True)),  # sysfs: hexadecimal without a prefix
        ("0xe0006", (False, True, True, False), (False, True, True, True)),
    ],
)
def test_words_seen_in_the_field(text: str, now: tuple[bool, ...], since_boot: tuple[bool, ...]) -> None:
    read = parse_throttled(text)
    assert (read.now, read.since_boot) == (Bits(*now), Bits(*since_boot))


@pytest.mark.parametrize(
    "text", ["", "VCHI initialization failed\n", "throttled=", "-1", "0x1ffffffff", "throttled=50.0"]
)
def test_anything_else_is_no_word(text: str) -> None:
    with pytest.raises(ValueError, match="no word of throttle bits"):
        parse_throttled(text)
