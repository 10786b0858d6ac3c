"""Messages between operator and agent: two big-endian 32-bit lengths, a JSON object, a body of bytes. Both sides."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from typing import Any

LENGTHS = struct.Struct(">II")
MAX_JSON_BYTES = 64 * 1024 * 1024
MAX_BODY_BYTES = 1024 * 1024

Message = dict[str, Any]


class WireError(Exception):
    """The other side sent something that is no message, or ended inside one."""


def encode(message: Message, body: bytes = b"") -> bytes:
    """A message as bytes.

    Raises:
        WireError: longer than the caps.
    """
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) > MAX_JSON_BYTES or len(body) > MAX_BODY_BYTES:
        raise WireError(f"message of {len(text)} and {len(body)} bytes is longer than allowed")
    return LENGTHS.pack(len(text), len(body)) + text + body


class Reader:
    """Reads messages from a source that yields bytes as they come.

    Args:
        read: `read(n)` gives 1..n bytes, or b"" at the end.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self._read(min(count, MAX_BODY_BYTES))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def next(self) -> tuple[Message, bytes]:
        """The next message and its body.

        Raises:
            EOFError: the source ended. WireError: lengths above the caps, or no JSON object.
        """
        text_bytes, body_bytes = LENGTHS.unpack(self._exactly(LENGTHS.size))
        if text_bytes > MAX_JSON_BYTES or body_bytes > MAX_BODY_BYTES:
            raise WireError(f"message announces {text_bytes} and {body_bytes} bytes: no agent speaks here")
        try:
            message = json.loads(self._exactly(text_bytes))
        except ValueError as error:
            raise WireError(f"message is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise WireError("message is not a JSON object")
        return message, self._exactly(body_bytes)


class Writer:
    """Writes messages whole, from any thread.

    Args:
        write: takes all the bytes it is given.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._lock = threading.Lock()

    def send(self, message: Message, body: bytes = b"") -> int:
        """Send one message.

        Returns:
            Bytes written.
        """
        data = encode(message, body)
        with self._lock:
            self._write(data)
        return len(data)
