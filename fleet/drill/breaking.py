"""The operator's hand on the box that is to break: sends `box_side`, waits until it is ready, and lets it strike.

All calls block; use them in a thread.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, cast

import fleet.drill.box_side
import fleet.drill.strains
import fleet.provision.agent.errors
import fleet.provision.agent.rpc
from fleet.inventory.sitefile import SiteFile
from fleet.provision.render_layout import layout_of
from fleet.provision.transport import open_transport, packed
from fleet.ssh.results import BoxError, BoxUnreachable
from fleet.ssh.site import SshSite

Kind = Literal["power-cut", "kill", "hang", "link-cut", "heat", "disk-full", "clock", "leak"]
Strain = Literal["heat", "disk-full", "clock"]
BEYOND_CELSIUS = 6.0  # above the threshold of the inventory
MODULES = (fleet.drill.box_side, fleet.drill.strains, fleet.provision.agent.errors, fleet.provision.agent.rpc)
PACKAGES = ("fleet", "fleet.drill", "fleet.provision", "fleet.provision.agent")
MAX_LINE_BYTES = 1 << 16
ANSWER_SECONDS = 30.0  # one line of the box
STEP = "drill"


def program() -> bytes:
    """What travels to the box."""
    sources = dict.fromkeys(PACKAGES, "")
    for module in MODULES:
        assert module.__file__ is not None  # noqa: S101 - our own modules are files
        sources[module.__name__] = Path(module.__file__).read_text(encoding="utf-8")
    return packed(sources, fleet.drill.box_side.__name__)


def order_of(site_file: SiteFile, box: str, kind: Kind, seconds: float) -> dict[str, Any]:
    """What the box is told; nothing in it is secret."""
    layout = layout_of(site_file, box, os.getuid())
    boxes = site_file.site.boxes
    name = hashlib.sha256(f"{layout.prefix} {box}".encode()).hexdigest()[:16]
    return {
        "kind": kind,
        "seconds": seconds,
        "supervisor_socket": layout.supervisor_socket,
        "peers": sorted({spec.address for other, spec in boxes.items() if other != box}),
        "lock": f"fleet-drill-{name}",
    }


def strain_order(site_file: SiteFile, box: str, kind: Strain, seconds: float) -> dict[str, Any]:
    """What the box is told when its guards are to trip, by the thresholds of the inventory."""
    layout, guards = layout_of(site_file, box, os.getuid()), cast("Any", site_file.site.guards)
    return {
        **order_of(site_file, box, "kill", seconds),
        "kind": kind,
        "run_directory": layout.run_directory,
        "celsius": guards.thermal.high_celsius + BEYOND_CELSIUS,
        "directory": layout.prefix,
        "percent": guards.surroundings.disk_full_percent,
    }


class Breaker:
    """A box that is about to be broken. Use as a context manager; leaving it before `strike` breaks nothing.

    Raises:
        BoxError: it can't be broken: no stage runs, another drill, no ip command, your login would be cut too.
        BoxUnreachable: no connection, or silence.
    """

    def __init__(self, site_file: SiteFile, box: str, ssh: SshSite, order: dict[str, Any]) -> None:
        self._box = box
        self._line = b""
        with ExitStack() as stack:
            self._transport = stack.enter_context(open_transport(site_file, box, ssh))
            stack.enter_context(ssh.cancellation.closing(self._transport.hang_up))
            self._send(program() + json.dumps(order).encode() + b"\n")
            self._answer("ready")
            self._closing = stack.pop_all()

    def strike(self) -> str:
        """Break it. Returns what was done, in words."""
        self._send(b"go\n")
        return str(self._answer("broken")["text"])

    def heal(self) -> None:
        """Take off what was laid on the box for its guards; returns when it is off."""
        self._send(b"heal\n")
        self._answer("healed")

    def __enter__(self) -> Breaker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def _send(self, data: bytes) -> None:
        try:
            self._transport.send(data)
        except OSError as error:
            self._broken(error)

    def _answer(self, operation: str) -> dict[str, Any]:
        """The next line of the box."""
        watchdog = self._transport.watchdog
        watchdog.arm("answer", ANSWER_SECONDS)
        try:
            while b"\n" not in self._line and len(self._line) < MAX_LINE_BYTES:
                part = self._transport.receive(MAX_LINE_BYTES)
                if not part:
                    self._broken(EOFError("the end of its answers"))
                self._line += part
            line, _, self._line = self._line.partition(b"\n")
            message = json.loads(line)
        except OSError as error:
            self._broken(error)
        except ValueError as error:
            text = "something else than the drill answers"
            raise BoxError(self._box, STEP, text, hint="log in and run `true`: it must print nothing") from error
        finally:
            watchdog.disarm("answer")
        if message["op"] == "error":
            raise BoxError(self._box, STEP, str(message["message"]), hint=str(message["hint"]))
        if message["op"] != operation:
            raise BoxError(self._box, STEP, f"expected {operation}, got {message['op']}")
        return dict(message)

    def _broken(self, error: BaseException) -> NoReturn:
        status, printed = self._transport.finish()
        last = printed.strip().splitlines()[-1] if printed.strip() else f"{type(error).__name__}: {error}"
        if status is None:
            raise BoxUnreachable(self._box, STEP, f"the connection broke ({last})") from error
        raise BoxError(self._box, STEP, f"its program ended with {status}: {last}", detail=printed) from error
