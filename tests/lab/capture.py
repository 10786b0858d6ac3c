"""Capture what passes a box's switch port, to show what left a dying box. The files are classic pcap.

`python -m tests.lab.capture DEVICE FILE` captures in the namespace it runs in until SIGTERM; `Capture` starts it.
"""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.lab.errors import LabError
from tests.lab.network import in_switch
from tests.lab.paths import REPOSITORY
from tests.lab.processes import KILL_DEADLINE_SECONDS
from tests.lab.wire import LARGEST_FRAME_BYTES, open_device

PCAP_HEADER = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65_535, 1)  # pcap-savefile(5): version 2.4, Ethernet
PCAP_RECORD = struct.Struct("<IIII")
READY = "ready"
POLL_SECONDS = 0.2
FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10  # RFC 9293, section 3.1
ETHERNET_BYTES = 14
ETHERTYPE_IPV4 = 0x0800
PROTOCOL_TCP = 6


@dataclass(frozen=True)
class TcpPacket:
    """One TCP segment over IPv4; addresses are text, `flags` are the low bits of RFC 9293."""

    seconds: float
    source: str
    source_port: int
    destination: str
    destination_port: int
    flags: int

    @property
    def closes(self) -> bool:
        """Whether it says that the connection ends (FIN or RST)."""
        return bool(self.flags & (FIN | RST))


def tcp_packet(seconds: float, frame: bytes) -> TcpPacket | None:
    """Decode an Ethernet frame; None when it is no TCP over IPv4, or cut short."""
    if len(frame) < ETHERNET_BYTES + 20 or frame[12:14] != ETHERTYPE_IPV4.to_bytes(2, "big"):
        return None
    packet = frame[ETHERNET_BYTES:]
    header = (packet[0] & 0x0F) * 4
    fragment = int.from_bytes(packet[6:8], "big") & 0x1FFF
    if packet[9] != PROTOCOL_TCP or fragment or len(packet) < header + 14:
        return None
    source, destination = socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])
    source_port, destination_port = struct.unpack_from("!HH", packet, header)
    return TcpPacket(seconds, source, source_port, destination, destination_port, packet[header + 13])


def frames(file: Path) -> Iterator[tuple[float, bytes]]:
    """(seconds since the epoch, frame) of a capture file of ours; a record cut short ends it."""
    data = file.read_bytes()
    offset = len(PCAP_HEADER)
    while offset + PCAP_RECORD.size <= len(data):
        whole, micro, length, _ = PCAP_RECORD.unpack_from(data, offset)
        offset += PCAP_RECORD.size
        yield whole + micro / 1e6, data[offset : offset + length]
        offset += length


class Capture:
    """A running capture of one switch port; as a context manager it has stopped at the end.

    Args:
        port: device in the switch's namespace.
        file: where the frames go.
    """

    def __init__(self, port: str, file: Path) -> None:
        self._port = port
        self._file = file
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Capture:
        argv = in_switch([sys.executable, "-m", "tests.lab.capture", self._port, str(self._file)])
        self._process = subprocess.Popen(
            argv, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != READY:
            self.stop()
            raise LabError(f"the capture on {self._port} did not start", hint="its words stand above on stderr")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the capture; nothing happens when it has ended."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(KILL_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._process = None

    def tcp(self) -> list[TcpPacket]:
        """The TCP segments seen so far, oldest first."""
        return [packet for seconds, frame in frames(self._file) if (packet := tcp_packet(seconds, frame))]


def capture(device: str, file: Path) -> None:
    """Write every frame of `device` to `file` until SIGTERM."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    opened = open_device(device)
    opened.settimeout(POLL_SECONDS)
    with file.open("wb", buffering=0) as sink:
        sink.write(PCAP_HEADER)
        print(READY, flush=True)
        while not ended:
            try:
                frame = opened.recv(LARGEST_FRAME_BYTES)
            except TimeoutError:
                continue
            except OSError:  # ENETDOWN: the port went down, or is gone; it may come up again
                time.sleep(POLL_SECONDS)
                continue
            now = time.time()
            sink.write(PCAP_RECORD.pack(int(now), int(now % 1 * 1e6), len(frame), len(frame)) + frame)


if __name__ == "__main__":
    capture(sys.argv[1], Path(sys.argv[2]))
