"""Admin unix socket: one JSON object a line in, one a line out; for guards and operators on the box itself."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

from stage_runtime.server.compute import FULL_DUTY_PERCENT, LEAST_DUTY_PERCENT
from stage_runtime.server.memory import trim
from stage_runtime.server.state import Guarded, StageState

LINE_BYTES = 64 * 1024
# A box's guards say how it stands every few seconds; what they said longer ago says nothing any more.
GUARDS_SECONDS = 60.0
TEXT_CHARACTERS = 200
COLDEST_CELSIUS, HOTTEST_CELSIUS = -60.0, 200.0
OPERATIONS = """{"op": "health"}, {"op": "batch-limit", "sequences": n ≥ 1}, {"op": "duty-limit", "percent": 1…100}, \
{"op": "shed", "shedding": true or false}, {"op": "trim"} or \
{"op": "guards", "state": text, "temperature_celsius": number or null}"""


class AdminServer:
    """Answers health, and obeys the guards of this box: batch limit, duty cycle, shedding, trimming of freed memory.

    Args:
        state: what to show and change.
        path: the socket; mode 0600.
    """

    def __init__(self, state: StageState, path: Path) -> None:
        self._state = state
        self._path = path
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; a socket left over by a power cut is replaced.

        Raises:
            OSError: the directory is missing, or another process answers on the socket.
        """
        listener = await asyncio.to_thread(_bind, self._path)
        self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=LINE_BYTES)

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._server is None:
            return
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._path.unlink, missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
                await writer.drain()
        except (ValueError, ConnectionError) as error:  # ValueError: the line is too long
            writer.write(json.dumps({"error": str(error)}).encode() + b"\n")
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            return {"error": f"no JSON: {error}"}
        match request:
            case {"op": "health"}:
                return self._state.health()
            case {"op": "batch-limit", "sequences": int(sequences)} if sequences >= 1 and sequences is not True:
                self._state.batch_limit = min(sequences, self._state.config.max_batch_sequences)
                return {"batch_limit_sequences": self._state.batch_limit}
            case {"op": "duty-limit", "percent": int(percent) | float(percent)} if (
                percent is not True and LEAST_DUTY_PERCENT <= percent <= FULL_DUTY_PERCENT
            ):
                self._state.compute.duty_percent = float(percent)
                return {"duty_limit_percent": self._state.compute.duty_percent}
            case {"op": "shed", "shedding": bool(shedding)}:
                self._state.shedding = shedding
                return {"shedding": shedding}
            case {"op": "trim"}:
                return await self._trim()
            case {"op": "guards", "state": str(text), "temperature_celsius": None | int() | float() as celsius} if (
                celsius is not True and celsius is not False
            ):
                shown = "".join(character for character in text[:TEXT_CHARACTERS] if character.isprintable())
                self._state.guarded = Guarded(shown, _plausible(celsius), time.monotonic() + GUARDS_SECONDS)
                return {}
        return {"error": f"expected {OPERATIONS}"}

    async def _trim(self) -> dict[str, Any]:
        """In the compute thread, which alone may hold heap blocks of any size, and only while it has nothing to do."""
        if self._state.open_sequences or self._state.compute.working_seconds:
            return {"error": "the stage is not idle: ask again later"}
        return {"freed_bytes": await self._state.compute.run(trim)}


def _plausible(celsius: float | None) -> float | None:
    """A temperature that a board can have, or None."""
    return float(celsius) if celsius is not None and COLDEST_CELSIUS <= celsius <= HOTTEST_CELSIUS else None


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise OSError(f"{path}: another process listens there")
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError:
        listener.close()
        raise
    return listener
