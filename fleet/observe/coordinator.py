"""The coordinator's HTTP API as the operator's verbs use it: what it knows, what happened, and orders to it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from fleet.errors import ExitCode, FleetError
from fleet.observe.site_access import Endpoint, connect_reason
from fleet.observe.site_view import integer, mapping, number, text

REQUEST_SECONDS = 5.0
MAX_BODY_BYTES = 2**23
EVENTS_A_PAGE = 500


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        id: rises by time. unix_seconds: by the coordinator's clock. kind: e.g. "box-dead", "plan-serving".
        pipeline, box: what it is about, empty if nothing. text: for people. milliseconds: phase → how long it took.
    """

    id: int
    unix_seconds: float
    kind: str
    pipeline: str
    box: str
    text: str
    milliseconds: Mapping[str, float]


class RefusedOrder(FleetError):
    """The coordinator says no (HTTP 409).

    Attributes:
        missing_mebibytes: box → what it lacks for a plan without the drained one.
    """

    def __init__(self, message: str, missing_mebibytes: Mapping[str, str], hint: str) -> None:
        super().__init__(message, hint=hint)
        self.missing_mebibytes = missing_mebibytes


class Coordinator:
    """Questions and orders; use `coordinator_of` to get one.

    Args:
        session: with the operator's certificate.
        endpoint: of its HTTP port.

    Attributes:
        hint: the command to run when it does not answer.
    """

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint, hint: str) -> None:
        self._session = session
        self._endpoint = endpoint
        self.hint = hint

    async def site(self) -> dict[str, Any]:
        """The document of `GET /v1/site`.

        Raises:
            FleetError: it can't be reached (exit code 3), or answers something else.
        """
        status, document = await self._ask("GET", "/v1/site")
        if status != 200:
            raise self._failed(f"answered HTTP {status}")
        return document

    async def events(self, after: int, limit: int = EVENTS_A_PAGE) -> list[Event]:
        """Events with a higher id, oldest first, at most `limit`.

        Raises:
            FleetError: as `site`.
        """
        status, document = await self._ask("GET", f"/v1/events?after={after}&limit={limit}")
        entries = document.get("events")
        if status != 200 or not isinstance(entries, list):
            raise self._failed(f"answered HTTP {status} without events")
        return [event_of(mapping(entry)) for entry in entries]

    async def last_events(self, count: int, *, after: int = 0, box: str = "") -> list[Event]:
        """The newest events, oldest of them first: the API hands them out from the oldest on.

        Args:
            count: most to keep. after: only those with a higher id. box: only those about it; empty: all.

        Raises:
            FleetError: as `site`.
        """
        newest: deque[Event] = deque(maxlen=count)
        while page := await self.events(after):
            newest.extend(event for event in page if not box or event.box == box)
            after = max(after + 1, *(event.id for event in page))
        return list(newest)

    async def order(self, box: str, what: str) -> dict[str, Any]:
        """Drain or undrain a box; asking twice is asking once.

        Args:
            what: "drain" or "undrain".

        Returns:
            The box as in `/v1/site`.

        Raises:
            RefusedOrder: no plan fits without the box. FleetError: unknown box, or as `site`.
        """
        status, document = await self._ask("POST", f"/v1/boxes/{box}/{what}")
        reason = _reason(document)
        if status == 409:
            missing = {name: str(size) for name, size in mapping(document.get("missing_mebibytes")).items()}
            lacks = "".join(f"\n  {name} lacks {size} MiB" for name, size in missing.items())
            hint = "bring back boxes that are out, free memory on one, or lower max_sequences; then try again"
            raise RefusedOrder(f"{box} is not {what}ed: {reason or 'no plan fits without it'}{lacks}", missing, hint)
        if status == 404:
            raise self._failed(f"knows no box {box}: {reason}" if reason else f"knows no box {box}")
        if status not in (200, 202):
            raise self._failed(f"answered HTTP {status}{f': {reason}' if reason else ''}")
        return document

    async def _ask(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        """One request: status and JSON object (empty if the body is none)."""
        endpoint = self._endpoint
        try:
            async with self._session.request(
                method, f"{endpoint.url}{path}", server_hostname=endpoint.server_name
            ) as response:
                raw = await response.content.read(MAX_BODY_BYTES)
                while not response.content.at_eof() and len(raw) < MAX_BODY_BYTES:
                    raw += await response.content.read(MAX_BODY_BYTES - len(raw))
                return response.status, dict(mapping(_decoded(raw)))
        except (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError, ssl.SSLError) as error:
            raise self._failed(f"TLS: {error}") from None
        except asyncio.TimeoutError:
            raise self._failed(f"no answer within {REQUEST_SECONDS:g} s", ExitCode.UNREACHABLE) from None
        except aiohttp.ClientConnectorError as error:
            raise self._failed(connect_reason(error), ExitCode.UNREACHABLE) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._failed(f"the connection broke: {error or type(error).__name__}", ExitCode.UNREACHABLE) from None

    def _failed(self, reason: str, exit_code: ExitCode = ExitCode.FAILED) -> FleetError:
        where = f"coordinator {self._endpoint.host}:{self._endpoint.port}"
        return FleetError(f"{where}: {reason}", hint=self.hint, exit_code=exit_code)


@asynccontextmanager
async def coordinator_of(endpoint: Endpoint, context: ssl.SSLContext, hint: str) -> AsyncIterator[Coordinator]:
    """The coordinator behind an endpoint, with one session for all questions."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    connector = aiohttp.TCPConnector(ssl=context, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        yield Coordinator(session, endpoint, hint)


def event_of(entry: Mapping[str, Any]) -> Event:
    """An event from its JSON; what is missing or odd is empty."""
    phases = {str(phase): number(value) for phase, value in mapping(entry.get("milliseconds")).items()}
    return Event(
        id=integer(entry.get("id")) or 0,
        unix_seconds=number(entry.get("unix_seconds")) or 0.0,
        kind=text(entry.get("kind")) or "",
        pipeline=text(entry.get("pipeline")) or "",
        box=text(entry.get("box")) or "",
        text=text(entry.get("text")) or "",
        milliseconds={phase: value for phase, value in phases.items() if value is not None},
    )


def _reason(document: Mapping[str, Any]) -> str:
    """Why, however it is wrapped: `reason`, `error`, or OpenAI's `error.message`."""
    error = document.get("error")
    return text(document.get("reason")) or text(error) or text(mapping(error).get("message")) or ""


def _decoded(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        return None
