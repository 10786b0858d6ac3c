"""A chronyc that replays recorded answers, and a time server on loopback."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from guards.clock.limits import TimeLimits
from guards.roots import Roots

RECORDED = Path(__file__).parent / "recorded"
BUILT = 1_700_000_000.0  # November 2023
LIMITS = TimeLimits(BUILT, 20.0)
NTP_SECONDS = 2_208_988_800


def recorded(name: str) -> str:
    """A recorded answer."""
    return (RECORDED / f"{name}.txt").read_text()


def install_chronyc(directory: Path, answer: str, code: int = 0, before: str = "") -> Roots:
    """A chronyc that notes its arguments in `argv` and prints an answer."""
    directory.mkdir(exist_ok=True)
    (directory / "answer").write_text(answer)
    program = directory / "chronyc"
    program.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {directory}/argv\n{before}\n/bin/cat {directory}/answer\nexit {code}\n"
    )
    program.chmod(0o755)
    return Roots(run=directory / "run", path=str(directory))


def called(directory: Path) -> list[str]:
    """What the chronyc of `install_chronyc` was called with."""
    noted = directory / "argv"
    return noted.read_text().splitlines() if noted.exists() else []


@dataclass(frozen=True)
class Reply:
    """What a time server answers; times in unix seconds."""

    received: float
    sent: float
    leap: int = 0
    mode: int = 4
    stratum: int = 2
    root_delay: float = 0.001
    root_dispersion: float = 0.002
    reference: bytes = b"\x0a\x00\x00\x01"

    def packed(self, nonce: bytes) -> bytes:
        """On the wire (RFC 5905 figure 8)."""
        head = struct.pack("!BBbb", self.leap << 6 | 4 << 3 | self.mode, self.stratum, 4, -20)
        roots = struct.pack("!II", round(self.root_delay * 2**16), round(self.root_dispersion * 2**16))
        stamps = _stamp(self.received) + nonce + _stamp(self.received) + _stamp(self.sent)
        return head + roots + self.reference + stamps


def _stamp(unix: float) -> bytes:
    if unix == 0:
        return bytes(8)
    whole = int(unix // 1)
    return struct.pack("!II", (whole + NTP_SECONDS) % 2**32, int((unix - whole) * 2**32))


def honest(ahead_seconds: float = 0.0, **fields: object) -> Callable[[bytes], list[bytes]]:
    """A server whose clock is that of this machine, or ahead of it."""

    def answer(request: bytes) -> list[bytes]:
        now = time.time() + ahead_seconds
        return [Reply(now, now, **fields).packed(request[40:48])]  # type: ignore[arg-type]

    return answer


@dataclass
class TimeServer:
    """Answers every request by `answer`, on 127.0.0.N."""

    address: str
    answer: Callable[[bytes], list[bytes]]
    requests: list[bytes] = field(default_factory=list)


@contextmanager
def serving(*servers: TimeServer) -> Iterator[int]:
    """Time servers on one port that the kernel chooses."""
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []
    try:
        for server in servers:
            bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            bound.bind((server.address, sockets[0].getsockname()[1] if sockets else 0))
            bound.settimeout(0.05)
            sockets.append(bound)
        ended = threading.Event()
        for bound, server in zip(sockets, servers, strict=True):
            threads.append(threading.Thread(target=_serve, args=(bound, server, ended)))
            threads[-1].start()
        yield sockets[0].getsockname()[1]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        for bound in sockets:
            bound.close()


def _serve(bound: socket.socket, server: TimeServer, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            request, whom = bound.recvfrom(512)
        except TimeoutError:
            continue
        server.requests.append(request)
        for data in server.answer(request):
            bound.sendto(data, whom)
