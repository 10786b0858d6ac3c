"""Rows of the journal. Each carries a checksum with its place in it: a worn card may hand back other bytes than it was
given, SQLite does not notice that inside a row, and a client must get what was sent or an honest "gone", never else.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

from fleet.gateway.entries import Entry, decode_entry, encode_entry
from fleet.gateway.record import AdmissionRecord
from stage_runtime.link.control import decode_control, encode_control
from stage_runtime.link.frames import FrameError

_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True)
class StoredStream:
    """A stream as the journal has it.

    Attributes:
        remaining_seconds: counts once it has ended.
        length: number of entries of an ended stream; None while it is made.
    """

    number: int
    record: AdmissionRecord
    resume_seconds: float
    remaining_seconds: float
    length: int | None = None


def stream_row(stream: StoredStream, unix_seconds: float) -> tuple[object, ...]:
    """Columns of table `streams`, for a new stream."""
    seconds = stream.resume_seconds
    record = _sealed(encode_control(stream.record), f"stream {stream.number} {seconds!r}")
    return (stream.number, stream.record.stream_id, record, seconds, stream.remaining_seconds, None, unix_seconds, None)


def stream_of(
    number: object, record: object, resume_seconds: object, remaining_seconds: object, length: object
) -> StoredStream:
    """The stream of a row.

    Raises:
        ValueError: it is not as it was written.
    """
    body = _opened(record, f"stream {number} {resume_seconds!r}")
    if not isinstance(number, int) or not isinstance(resume_seconds, float):
        raise ValueError("a number is none")
    try:
        parsed = decode_control(AdmissionRecord, body)
    except FrameError as error:
        raise ValueError(str(error)) from None
    # these two change, so they are not under the checksum; what can't be true is read as the promise, or as not ended
    remaining = resume_seconds
    if isinstance(remaining_seconds, float) and math.isfinite(remaining_seconds):
        remaining = min(max(remaining_seconds, 0.0), resume_seconds)
    return StoredStream(number, parsed, resume_seconds, remaining, length if isinstance(length, int) else None)


def entry_row(number: int, place: int, entry: Entry) -> tuple[int, int, bytes]:
    """Columns of table `entries`."""
    return number, place, _sealed(encode_entry(entry).encode(), f"entry {number} {place}")


def entry_of(number: int, place: int, body: object) -> Entry:
    """The entry of a row.

    Raises:
        ValueError: it is not as it was written.
    """
    return decode_entry(_opened(body, f"entry {number} {place}").decode())


def _sealed(body: bytes, place: str) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(place.encode()))) + body


def _opened(sealed: object, place: str) -> bytes:
    if not isinstance(sealed, bytes) or _sealed(sealed[_CHECKSUM.size :], place) != sealed:
        raise ValueError("its checksum is wrong")
    return sealed[_CHECKSUM.size :]
