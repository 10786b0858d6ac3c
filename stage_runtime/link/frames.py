"""Frames of a link: a fixed binary header and a body, every length capped before it is believed."""

from __future__ import annotations

import struct
import zlib
from asyncio import IncompleteReadError, StreamReader
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"FLRG"
FRAME_VERSION = 1
# little-endian: magic, version u8, type u8, flags u16 (reserved, 0), epoch u64, micro-batch u32, body length u32,
# CRC-32 u32 of the header before it and the body: TLS already guards the wire, this guards against bugs on either side
_PREFIX = struct.Struct("<4sBBHQII")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _PREFIX.size + _CHECKSUM.size

CONTROL_BODY_BYTES = 64 * 1024
GENERATE_BODY_BYTES = 1024 * 1024  # a prompt of 100 000 tokens as JSON
PLAN_BODY_BYTES = 1024 * 1024  # 512 boxes with long names
TENSOR_BODY_BYTES = 32 * 1024 * 1024  # 1024 rows of hidden size 8192 in FP32


class FrameType(IntEnum):
    """What a body holds, and which way it travels."""

    HELLO = 1  # both ways, first
    REFUSED = 2  # both ways, instead of HELLO: why, then the connection ends
    PING = 3  # both ways, on an idle link
    NOTICE = 4  # towards the first stage: why the ring does not close, or that a box drains
    READY = 5  # along the ring: the probe passed
    OPEN = 6  # along the ring: a sequence begins
    STEP = 7  # along the ring: hidden states of a micro-batch
    OUTPUT = 8  # last stage to first (tied embeddings): hidden states that the head needs
    TOKENS = 9  # last stage to first (untied): sampled tokens
    FREE = 10  # along the ring: sequences end
    GENERATE = 11  # gateway to first stage
    CANCEL = 12  # gateway to first stage
    TOKEN = 13  # first stage to gateway
    FINISHED = 14  # first stage to gateway
    STATUS = 15  # first stage to gateway
    SURVEY = 16  # round the ring: the KV length of every kept sequence, each stage lowers it to its own
    AGREED = 17  # along the ring: the lengths that all have; every stage cuts its caches to them
    REGISTER = 18  # stage to coordinator, as are HEARTBEAT, LINK_REPORT, VOTE, COMMITTED, ANSWER; see membership.py
    HEARTBEAT = 19
    LINK_REPORT = 20
    PREPARE = 21  # coordinator to stage, as are COMMIT, ABORT, RETIRE, STANDBY, CHALLENGE
    VOTE = 22
    COMMIT = 23
    COMMITTED = 24
    ABORT = 25
    RETIRE = 26
    STANDBY = 27
    CHALLENGE = 28
    ANSWER = 29
    ROUTE = 30  # coordinator to gateway
    DRAINED = 31  # gateway to coordinator
    LEAVING = 32  # stage to coordinator


BODY_CAPS: dict[FrameType, int] = {kind: CONTROL_BODY_BYTES for kind in FrameType} | {
    FrameType.PING: 0,
    FrameType.GENERATE: GENERATE_BODY_BYTES,
    FrameType.OPEN: GENERATE_BODY_BYTES,  # carries the answer so far
    FrameType.PREPARE: PLAN_BODY_BYTES,
    FrameType.STEP: TENSOR_BODY_BYTES,
    FrameType.OUTPUT: TENSOR_BODY_BYTES,
    FrameType.TOKENS: TENSOR_BODY_BYTES,
}


class FrameError(Exception):
    """Bytes that are no frame; the message says what was wrong. The connection can't be used any further."""


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        type: what the body holds.
        body: raw bytes, at most `BODY_CAPS[type]`.
        epoch: plan epoch that the sender acts in.
        micro_batch: number of the micro-batch (STEP, OUTPUT, TOKENS), else 0.
    """

    type: FrameType
    body: bytes = b""
    epoch: int = 0
    micro_batch: int = 0


@dataclass(frozen=True)
class _Header:
    type: FrameType
    epoch: int
    micro_batch: int
    body_bytes: int
    checksum: int
    prefix: bytes


def encode_frame(frame: Frame) -> bytes:
    """The frame as bytes.

    Raises:
        FrameError: the body is longer than its type allows.
    """
    if len(frame.body) > BODY_CAPS[frame.type]:
        raise FrameError(f"{frame.type.name} body of {len(frame.body)} bytes, at most {BODY_CAPS[frame.type]}")
    prefix = _PREFIX.pack(MAGIC, FRAME_VERSION, frame.type, 0, frame.epoch, frame.micro_batch, len(frame.body))
    return b"".join((prefix, _CHECKSUM.pack(zlib.crc32(frame.body, zlib.crc32(prefix))), frame.body))


def _parse_header(data: bytes) -> _Header:
    magic, version, kind, flags, epoch, micro_batch, body_bytes = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(f"magic {magic!r}, expected {MAGIC!r}")
    if version != FRAME_VERSION:
        raise FrameError(f"frame version {version}, expected {FRAME_VERSION}")
    if flags != 0:
        raise FrameError(f"flags {flags:#06x}, expected 0")
    try:
        frame_type = FrameType(kind)
    except ValueError:
        raise FrameError(f"frame type {kind} is unknown") from None
    if body_bytes > BODY_CAPS[frame_type]:
        raise FrameError(f"{frame_type.name} body of {body_bytes} bytes, at most {BODY_CAPS[frame_type]}")
    checksum = _CHECKSUM.unpack_from(data, _PREFIX.size)[0]
    return _Header(frame_type, epoch, micro_batch, body_bytes, checksum, data[: _PREFIX.size])


async def read_frame(reader: StreamReader) -> Frame:
    """The next frame.

    Raises:
        FrameError: wrong magic, version, type, flags, length or checksum, or an end inside a frame.
        EOFError: the peer closed between two frames.
    """
    try:
        header = _parse_header(await reader.readexactly(HEADER_BYTES))
        body = await reader.readexactly(header.body_bytes)
    except IncompleteReadError as error:
        if not error.partial and error.expected == HEADER_BYTES:
            raise EOFError("closed by the peer") from None
        raise FrameError(f"connection ended inside a frame ({len(error.partial)} of {error.expected} bytes)") from None
    if zlib.crc32(body, zlib.crc32(header.prefix)) != header.checksum:
        raise FrameError(f"{header.type.name} frame with a wrong checksum")
    return Frame(header.type, body, header.epoch, header.micro_batch)
