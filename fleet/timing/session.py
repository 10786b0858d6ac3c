"""The operator's end of one box's clock. All calls block; use them in a thread."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import fleet.timing.box_side
from fleet.inventory.sitefile import SiteFile
from fleet.provision.transport import open_transport, packed
from fleet.ssh.results import BoxError, BoxUnreachable
from fleet.ssh.site import SshSite
from fleet.timing.estimate import Exchange, Offset, estimate
from fleet.timing.keeper import keeper_of

STEP = "clock"
PACKAGES = ("fleet", "fleet.timing")
EXCHANGES = 9  # of which the quickest counts
ANSWER_SECONDS = 30.0  # one line of the box, which may ask two tools for it
MAX_LINE_BYTES = 1 << 18


def program() -> bytes:
    """What travels to the box."""
    sources = dict.fromkeys(PACKAGES, "")
    name = fleet.timing.box_side.__name__
    sources[name] = Path(fleet.timing.box_side.__file__).read_text(encoding="utf-8")
    return packed(sources, name)


class BoxClock:
    """A box's clock. Use as a context manager.

    Raises:
        BoxError, BoxUnreachable: (here and in every method) no login, silence, or the box refuses.
    """

    def __init__(self, site_file: SiteFile, box: str, ssh: SshSite) -> None:
        self._box = box
        self._rest = b""
        with ExitStack() as stack:
            self._transport = stack.enter_context(open_transport(site_file, box, ssh))
            stack.enter_context(ssh.cancellation.closing(self._transport.hang_up))
            self._send(program())
            self._closing = stack.pop_all()

    def __enter__(self) -> BoxClock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def keeper(self) -> str:
        """What keeps the clock to a source, in words; empty: nothing."""
        return keeper_of(self._ask({"op": "facts"}))

    def offset(self, exchanges: int = EXCHANGES) -> Offset:
        """Measure. The first exchange also waits for the program to start, so it is thrown away."""
        self._ask({"op": "time"})
        return estimate([self._exchange() for _ in range(exchanges)])

    def correct(self, offset: Offset) -> str:
        """Take the offset off the box's clock. Returns what became of its hardware clock: "set", "none", or why not."""
        return str(self._ask({"op": "set", "ahead_nanoseconds": offset.nanoseconds})["hardware_clock"])

    def _exchange(self) -> Exchange:
        sent, started = time.time_ns(), time.monotonic_ns()
        box = int(self._ask({"op": "time"})["unix_nanoseconds"])
        return Exchange(sent, time.monotonic_ns() - started, box)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._send(json.dumps(request).encode() + b"\n")
        watchdog = self._transport.watchdog
        watchdog.arm("answer", ANSWER_SECONDS)
        try:
            while b"\n" not in self._rest and len(self._rest) < MAX_LINE_BYTES:
                part = self._transport.receive(MAX_LINE_BYTES)
                if not part:
                    self._broken(EOFError("the end of its answers"))
                self._rest += part
            line, _, self._rest = self._rest.partition(b"\n")
            message = json.loads(line)
            if message["op"] == "error":
                raise BoxError(self._box, STEP, str(message["message"]), hint=str(message["hint"]))
            if message["op"] != request["op"]:
                raise BoxError(self._box, STEP, f"expected {request['op']}, got {message['op']}")
        except OSError as error:
            self._broken(error)
        except (ValueError, KeyError, TypeError) as error:
            text = "something else than fleet answers"
            raise BoxError(self._box, STEP, text, hint="log in and run `true`: it must print nothing") from error
        finally:
            watchdog.disarm("answer")
        return dict(message)

    def _send(self, data: bytes) -> None:
        try:
            self._transport.send(data)
        except OSError as error:
            self._broken(error)

    def _broken(self, error: BaseException) -> NoReturn:
        status, printed = self._transport.finish()
        last = printed.strip().splitlines()[-1] if printed.strip() else f"{type(error).__name__}: {error}"
        if status is None:
            raise BoxUnreachable(self._box, STEP, f"the connection broke ({last})") from error
        raise BoxError(self._box, STEP, f"its program ended with {status}: {last}", detail=printed) from error
