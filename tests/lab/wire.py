"""A cable with delay, jitter, loss and a rate: shuttles Ethernet frames between two devices of this namespace.

Started by `tests.lab.network.wire_up` with: RECORD DEVICE DEVICE DELAY_MS JITTER_MS LOSS RATE_MBIT.
Both devices are read and written through packet(7) sockets; each direction is treated alike.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import select
import socket
import struct
import sys
import time
from pathlib import Path

from tests.lab.processes import ProcessRecord
from tests.lab.settings import Shape

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_ADD_MEMBERSHIP = 1
PACKET_MR_PROMISC = 1
PACKET_OUTGOING = 4
SO_RCVBUFFORCE = 33
RECEIVE_BUFFER_BYTES = 8 << 20
LARGEST_FRAME_BYTES = 65_600
FRAMES_A_TURN = 64
QUEUE_FRAMES = 2000  # in flight each way; a real cable's queue ends too (tail drop)


def open_device(device: str) -> socket.socket:
    """A non-blocking socket that sees every frame of `device` and can send whole frames."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
    opened.bind((device, 0))
    membership = struct.pack("iHH8s", socket.if_nametoindex(device), PACKET_MR_PROMISC, 0, b"")
    opened.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, membership)
    opened.setblocking(False)
    return opened


class Direction:
    """One way of the wire: decides whether and when a frame leaves at the other end."""

    def __init__(self, shape: Shape, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.in_flight = 0
        self._shape = shape
        self._free_at = 0.0  # when the rate limit lets the next frame start
        self._random = random.Random(os.urandom(8))  # noqa: S311 (drops frames, guards nothing)

    def leaves_at(self, now: float, frame_bytes: int) -> float | None:
        """Monotonic seconds at which a frame that came in `now` goes out; None when it is lost."""
        shape = self._shape
        if self.in_flight >= QUEUE_FRAMES or self._random.random() < shape.loss:
            return None
        start = now
        if shape.rate_mbit:
            start = self._free_at = max(self._free_at, now) + frame_bytes * 8 / (shape.rate_mbit * 1e6)
        jitter = self._random.uniform(-shape.jitter_ms, shape.jitter_ms) if shape.jitter_ms else 0.0
        return start + max(0.0, shape.delay_ms + jitter) / 1e3

    def send(self, frame: bytes) -> None:
        """Put the frame out; a device that is down or full loses it, as a cable does."""
        with contextlib.suppress(OSError):
            self.target.send(frame)


def shuttle(shape: Shape, first: socket.socket, second: socket.socket) -> None:
    """Carry frames both ways until the process is ended."""
    directions = {
        first.fileno(): Direction(shape, first, second),
        second.fileno(): Direction(shape, second, first),
    }
    poller = select.poll()
    for descriptor in directions:
        poller.register(descriptor, select.POLLIN)
    queue: list[tuple[float, int, Direction, bytes]] = []
    serial = 0  # frames that leave at the same instant keep their order
    while True:
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            _, _, direction, frame = heapq.heappop(queue)
            direction.in_flight -= 1
            direction.send(frame)
        timeout_ms = max(0.0, queue[0][0] - time.monotonic()) * 1e3 if queue else None
        for descriptor, _ in poller.poll(timeout_ms):
            direction = directions[descriptor]
            for frame in _frames(direction.source):
                leaves_at = direction.leaves_at(time.monotonic(), len(frame))
                if leaves_at is not None:
                    serial += 1
                    direction.in_flight += 1
                    heapq.heappush(queue, (leaves_at, serial, direction, frame))


def _frames(source: socket.socket) -> list[bytes]:
    frames: list[bytes] = []
    for _ in range(FRAMES_A_TURN):
        try:
            frame, address = source.recvfrom(LARGEST_FRAME_BYTES)
        except BlockingIOError:
            break
        except OSError:  # ENETDOWN, once each time the device goes down
            break
        if address[2] != PACKET_OUTGOING:  # what we sent ourselves comes by too
            frames.append(frame)
    return frames


def main(arguments: list[str]) -> None:
    """Open both devices, say so by writing the process record, and carry frames."""
    record, first, second, *numbers = arguments
    delay_ms, jitter_ms, loss, rate_mbit = (float(number) for number in numbers)
    shape = Shape(delay_ms=delay_ms, jitter_ms=jitter_ms, loss=loss, rate_mbit=rate_mbit)
    opened = open_device(first), open_device(second)
    ProcessRecord.of(os.getpid()).save(Path(record))
    shuttle(shape, *opened)


if __name__ == "__main__":
    main(sys.argv[1:])
