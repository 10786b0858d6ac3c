"""What stages say, within reason: a certificate of the site makes nobody right. Pure; each refusal is a FrameError."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from fleet.coordinator.records import LARGEST_EPOCH, is_step
from fleet.coordinator.text import line
from stage_runtime.link.control import decode_control
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.membership import Heartbeat, Leaving, LinkReport, Register, Vote

# Epochs are counted from 1 and given out above the highest that anyone knows: a peer's word must leave some.
LARGEST_TOLD_NUMBER = LARGEST_EPOCH // 2
# No box has so much memory (an exbibyte); sums of such numbers stay far below 2^63.
LARGEST_BYTES = 2**60
MOST_PROCESS_ID_CHARACTERS = 128
# The longest time that any configuration holds.
LONGEST_SILENCE_SECONDS = 7 * 24 * 3600.0
# What a stage says of itself or others is a line for people; it goes on to gateways, events and logs.
REASON_CHARACTERS = 300
# A box's clock may be wrong by centuries, and that must cost it nothing; beyond the year 5138 nothing is compared.
LARGEST_UNIX_SECONDS = 1e11

T = TypeVar("T")


def decode(kind: type[T], frame: Frame, expected: FrameType) -> T:
    """The message of a frame.

    Raises:
        FrameError: another type of frame, or a body that is none.
    """
    if frame.type is not expected:
        raise FrameError(f"{frame.type.name} where {expected.name} was expected")
    return decode_control(kind, frame.body)


def register_of(frame: Frame, box: str, pipeline: str) -> Register:
    """REGISTER of a box of this pipeline.

    Raises:
        FrameError: no REGISTER, one for another pipeline, or one that can't be true.
    """
    register = decode(Register, frame, FrameType.REGISTER)
    if register.pipeline != pipeline:
        raise FrameError(f"{box} belongs to pipeline {pipeline!r}, registers for {register.pipeline[:80]!r}")
    epochs = (register.committed_epoch, register.prepared_epoch, register.serving_epoch)
    if max(*epochs, register.incarnation) > LARGEST_TOLD_NUMBER or register.memory_total_bytes > LARGEST_BYTES:
        raise FrameError("REGISTER with a number beyond all reason")
    for seconds in (register.layer_seconds, register.head_seconds):
        if not is_step(seconds):
            raise FrameError(f"REGISTER with a step of {seconds:g} s, which is beyond all reason")
    if not 0 < len(register.process_id) <= MOST_PROCESS_ID_CHARACTERS or not 0 < register.ring_port < 2**16:
        raise FrameError("REGISTER without a process id or a port")
    return register


def heartbeat_of(body: bytes) -> Heartbeat:
    """HEARTBEAT; its texts are lines.

    Raises:
        FrameError: a body that is none.
    """
    heartbeat = decode_control(Heartbeat, body)
    if heartbeat.reason or heartbeat.guard_state:
        texts = line(heartbeat.reason, REASON_CHARACTERS), line(heartbeat.guard_state, REASON_CHARACTERS)
        heartbeat = replace(heartbeat, reason=texts[0], guard_state=texts[1])
    if heartbeat.wall_unix_seconds is not None and abs(heartbeat.wall_unix_seconds) > LARGEST_UNIX_SECONDS:
        heartbeat = replace(heartbeat, wall_unix_seconds=None)
    return heartbeat


def link_report_of(body: bytes) -> LinkReport:
    """LINK_REPORT; its text is a line.

    Raises:
        FrameError: a body that is none, or a silence that can't be true.
    """
    report = decode_control(LinkReport, body)
    if not 0 <= report.silent_seconds <= LONGEST_SILENCE_SECONDS:
        raise FrameError(f"LINK_REPORT of a silence of {report.silent_seconds:g} s, which is beyond all reason")
    return replace(report, text=line(report.text, REASON_CHARACTERS))


def vote_of(body: bytes) -> Vote:
    """VOTE; its reason is a line.

    Raises:
        FrameError: a body that is none, or memory that no box lacks.
    """
    vote = decode_control(Vote, body)
    if vote.missing_bytes > LARGEST_BYTES:
        raise FrameError("VOTE that lacks memory beyond all reason")
    return replace(vote, reason=line(vote.reason, REASON_CHARACTERS))


def leaving_reason(body: bytes) -> str:
    """Why a stage leaves, a line.

    Raises:
        FrameError: a body that is none.
    """
    return line(decode_control(Leaving, body).reason, REASON_CHARACTERS)
