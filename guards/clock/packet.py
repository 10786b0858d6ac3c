"""One SNTP exchange (RFC 5905) taken apart and judged. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from guards.clock.limits import TimeLimits
from guards.settings import ClockSettings

UNIX_EPOCH_NTP_SECONDS = 2_208_988_800  # 1970 in seconds since 1900
ERA_SECONDS = 2**32
PACKET_BYTES = 48
TRANSMIT_OFFSET = 40  # of the transmit timestamp, which the server sends back at ORIGIN_OFFSET
ORIGIN_OFFSET = 24
SERVER_MODE = 4
UNSYNCHRONISED_LEAP = 3
UNSYNCHRONISED_STRATUM = 16
# by which an answer may seem to come before its request: resolution of the clocks and of ntplib's floats
MOST_CLOCK_ERROR_SECONDS = 0.001
LOCAL_REFERENCE = 0x7F7F0101  # a server that has no source (see `guards/clock/chrony.py`), and ntpd's driver 1
KISSES_OF_DEATH = ("DENY", "RSTR", "RATE")  # RFC 5905 § 7.4; its other codes are only remarks
LOCAL_NAME = 0x4C4F434C  # "LOCL", the same by RFC 5905 figure 12


class ServerUnusable(Exception):
    """A server's answer says nothing of the time; the message is one line for people."""


class KissOfDeath(ServerUnusable):
    """The server asks to be left alone (RFC 5905 § 7.4)."""


@dataclass(frozen=True)
class Answer:
    """What a server said.

    Attributes:
        offset_seconds: of the box's clock to the server's, positive: ahead. True to half of `delay_seconds`, whatever
            the network does.
        distance_seconds: how far the server's own time may be off true time, plus half of the delay (root distance).
        free_running: the server has no source of its own.
    """

    server: str
    offset_seconds: float
    delay_seconds: float
    distance_seconds: float
    stratum: int
    leap: int
    free_running: bool

    @property
    def uncertainty_seconds(self) -> float:
        """Of the offset to this server."""
        return self.delay_seconds / 2


@dataclass(frozen=True)
class Exchange:
    """What the box knows of it.

    Attributes:
        sent_unix_seconds: wall clock when it was sent. elapsed_seconds: until the answer came, monotonic.
    """

    server: str
    sent_unix_seconds: float
    elapsed_seconds: float


def request_bytes(nonce: bytes) -> bytes:
    """A client's request, NTP version 4.

    Args:
        nonce: eight random bytes, sent as transmit timestamp: the answer must have them as origin, and nobody learns
            the box's time.
    """
    import ntplib

    data: bytes = ntplib.NTPPacket(version=4, mode=3).to_data()
    return data[:TRANSMIT_OFFSET] + nonce


def is_answer(data: bytes, nonce: bytes) -> bool:
    """Whether it answers our request; anything else is an old or a forged one."""
    return len(data) >= PACKET_BYTES and data[ORIGIN_OFFSET : ORIGIN_OFFSET + len(nonce)] == nonce


def judge_answer(data: bytes, exchange: Exchange, limits: TimeLimits, settings: ClockSettings) -> Answer:
    """What it says of the time.

    Raises:
        ServerUnusable: nothing, with the reason.
    """
    import ntplib

    packet = ntplib.NTPPacket()
    try:
        packet.from_data(data)
    except ntplib.NTPException as error:
        raise ServerUnusable(f"answers no NTP packet: {error}") from None
    if packet.mode != SERVER_MODE:
        raise ServerUnusable(f"answers in mode {packet.mode}, not as a server")
    if packet.stratum == 0:
        code = packet.ref_id.to_bytes(4, "big").decode("ascii", "replace")
        if code in KISSES_OF_DEATH:
            raise KissOfDeath(f"asks to be left alone ({code})")
        raise ServerUnusable("is not synchronised itself (stratum 0)")
    if packet.leap == UNSYNCHRONISED_LEAP or packet.stratum >= UNSYNCHRONISED_STRATUM:
        raise ServerUnusable(f"is not synchronised itself (leap {packet.leap}, stratum {packet.stratum})")
    if packet.recv_timestamp == 0 or packet.tx_timestamp == 0:
        raise ServerUnusable("answers without timestamps")
    received = unix_seconds(packet.recv_timestamp, limits.floor_seconds)
    sent = unix_seconds(packet.tx_timestamp, limits.floor_seconds)
    held = sent - received
    delay = exchange.elapsed_seconds - held
    if not -settings.query_seconds <= held <= settings.query_seconds or delay < -MOST_CLOCK_ERROR_SECONDS:
        raise ServerUnusable(f"answers with timestamps that do not fit: {held:.6f} s in the server")
    if not limits.sane(sent):
        raise ServerUnusable("says a time that can't be: before this release was built, or long after it")
    delay = max(0.0, delay)
    distance = packet.root_delay / 2 + packet.root_dispersion + delay / 2
    if distance > settings.root_distance_seconds:
        raise ServerUnusable(f"may be off by {distance:.3f} s itself")
    middle = exchange.sent_unix_seconds + exchange.elapsed_seconds / 2
    return Answer(
        server=exchange.server,
        offset_seconds=middle - (received + sent) / 2,
        delay_seconds=delay,
        distance_seconds=distance,
        stratum=packet.stratum,
        leap=packet.leap,
        free_running=_free_running(packet.ref_id, packet.stratum, settings),
    )


def _free_running(reference: int, stratum: int, settings: ClockSettings) -> bool:
    if settings.local_stratum >= UNSYNCHRONISED_STRATUM:
        return False
    return reference in (LOCAL_REFERENCE, LOCAL_NAME) or stratum >= settings.local_stratum


def unix_seconds(ntp_seconds: float, near_unix_seconds: float) -> float:
    """A timestamp of 32 bits of seconds, which begin anew in 2036, as unix seconds: of all that it may mean, the one
    nearest to another time."""
    plain = ntp_seconds - UNIX_EPOCH_NTP_SECONDS
    return plain + ERA_SECONDS * round((near_unix_seconds - plain) / ERA_SECONDS)
