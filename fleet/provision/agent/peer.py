"""The operator as the agent sees it: progress goes there, content and certificates come from there."""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

from fleet.provision.agent.errors import AgentError
from fleet.provision.agent.wire import MAX_BODY_BYTES, Message, Reader, WireError, Writer

AT_REST = ""  # the step between two requests
QUIET_SECONDS = 5.0  # a step that runs longer says what it waits for, again and again


class Peer:
    """The conversation. Progress is best effort: once the operator is gone, what was begun is still finished, so that
    a box is never left between two releases."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        self._reader = reader
        self._writer = writer
        self._step = AT_REST
        self._detail = ""
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._ticker.start()

    @property
    def present_step(self) -> str:
        """What is being done."""
        return self._step or "start"

    def receive(self) -> Message:
        """The next message. Raises EOFError when the operator is gone."""
        return self._reader.next()[0]

    def next_request(self) -> Message:
        """Wait for a request, at rest. A sign of life still goes out now and then: if the operator was unplugged, the
        kernel gives the connection up, the agent ends, and the run lock is free again."""
        self._step = AT_REST
        return self.receive()

    def send(self, message: Message) -> None:
        """Answer the operator; silent once it is gone (the next `receive` raises EOFError)."""
        try:
            self._writer.send(message)
        except OSError:
            self._ended.set()

    def step(self, text: str) -> None:
        """Begin a step."""
        self._step, self._detail, self._since = text, "", time.monotonic()
        self.send({"op": "step", "text": text})

    def waits_for(self, text: str) -> None:
        """What the present step is waiting for, told if it lasts."""
        self._detail = text

    def close(self) -> None:
        """End the ticker."""
        self._ended.set()
        self._ticker.join()

    def _tick(self) -> None:
        while not self._ended.wait(QUIET_SECONDS):
            seconds = time.monotonic() - self._since
            if self._step == AT_REST:
                self.send({"op": "alive"})
            elif seconds >= QUIET_SECONDS:
                self.send({"op": "waiting", "step": self._step, "text": self._detail, "seconds": round(seconds)})

    def contents(self, wanted: list[dict[str, Any]]) -> Iterator[Blob]:
        """Ask for contents ({"sha256", "size_bytes"}); they come as one stream, in this order. Each blob must be
        consumed before the next one is asked for."""
        if not wanted:
            return
        self.send({"op": "want", "contents": wanted})
        for item in wanted:
            message, _ = self._reader.next()
            if message.get("op") != "content" or message.get("sha256") != item["sha256"]:
                raise WireError(f"expected content {item['sha256'][:16]}, got {message.get('op')}")
            blob = Blob(self._reader, item["sha256"], int(item["size_bytes"]), str(message.get("file", "")))
            yield blob
            blob.check_consumed()


class Blob:
    """One content that arrives. `file` is its path on this machine when operator and box share one (local mode)."""

    def __init__(self, reader: Reader, sha256: str, size_bytes: int, file: str) -> None:
        self._reader = reader
        self._done = False
        self.sha256 = sha256
        self.size_bytes = size_bytes
        self.file = file

    def chunks(self) -> Iterator[bytes]:
        """The bytes, verified: the last chunk is yielded, then a wrong digest raises.

        Raises:
            AgentError: digest or size differs from what was announced. EOFError: the operator is gone.
        """
        digest, total = hashlib.sha256(), 0
        for chunk in self._from_file() if self.file else self._from_stream():
            total += len(chunk)
            if total > self.size_bytes:
                break
            digest.update(chunk)
            yield chunk
        self._done = True
        if total != self.size_bytes or digest.hexdigest() != self.sha256:
            source = self.file or "the connection"
            raise AgentError(
                "transfer",
                f"{source}: SHA-256 {digest.hexdigest()[:16]}… of {total} bytes, expected {self.sha256[:16]}… "
                f"of {self.size_bytes} bytes",
                hint="fleet bundle  (makes the bundle whole again), then provision again",
            )

    def take_file(self) -> str:
        """Use `file` where it is, verified instead of copied. Raises AgentError as `chunks`."""
        for _ in self.chunks():
            pass
        return self.file

    def check_consumed(self) -> None:
        """Raises WireError when our own code left bytes in the stream."""
        if not self._done:
            raise WireError(f"content {self.sha256[:16]} was not consumed")

    def _from_file(self) -> Iterator[bytes]:
        try:
            with open(self.file, "rb") as file:
                while chunk := file.read(MAX_BODY_BYTES):
                    yield chunk
        except OSError as error:
            raise AgentError("transfer", f"{self.file}: {error.strerror}", hint="fleet bundle") from error

    def _from_stream(self) -> Iterator[bytes]:
        while True:
            message, body = self._reader.next()
            if message.get("op") != "chunk":
                raise WireError(f"expected a chunk, got {message.get('op')}")
            if message.get("zlib"):
                inflater = zlib.decompressobj()
                body = inflater.decompress(body, MAX_BODY_BYTES)
                if not inflater.eof:
                    raise WireError("a chunk inflates beyond the cap")
            if body:
                yield body
            if message.get("last"):
                return
