"""Asks every stage, the gateway and the coordinator how they are: in parallel, each with its own deadline."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from fleet.observe.site_access import Endpoint, Endpoints, connect_reason

HEALTH_DEADLINE_SECONDS = 2.0
MAX_HEALTH_BYTES = 2**20


@dataclass(frozen=True)
class Answer:
    """What came back from one process.

    Attributes:
        document: the JSON that came; None if there was none.
        unreachable: nothing answered in time.
        error: why there is no document, for people.
    """

    document: dict[str, Any] | None
    unreachable: bool = False
    error: str = ""


@dataclass(frozen=True)
class SiteAnswers:
    """Answers of all processes; `gateway` and `coordinator` are None where the site has none."""

    stages: Mapping[str, Answer]
    gateway: Answer | None
    coordinator: Answer | None


async def ask_site(endpoints: Endpoints, context: ssl.SSLContext) -> SiteAnswers:
    """Ask all at once.

    Args:
        endpoints: of the site.
        context: with the operator's certificate.
    """
    connector = aiohttp.TCPConnector(ssl=context, limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        one_by_one = [ask(session, endpoint, "/health") for endpoint in endpoints.stages.values()]
        *stages, gateway, coordinator = await asyncio.gather(
            *one_by_one,
            _ask_if_there(session, endpoints.gateway, "/health"),
            _ask_if_there(session, endpoints.coordinator, "/v1/site"),
        )
    answered = {box: answer for box, answer in zip(endpoints.stages, stages, strict=True) if answer is not None}
    return SiteAnswers(answered, gateway, coordinator)


async def _ask_if_there(session: aiohttp.ClientSession, endpoint: Endpoint | None, path: str) -> Answer | None:
    return None if endpoint is None else await ask(session, endpoint, path)


async def ask(session: aiohttp.ClientSession, endpoint: Endpoint, path: str) -> Answer:
    """One GET with its own deadline; 503 with a document is an answer."""
    timeout = aiohttp.ClientTimeout(total=HEALTH_DEADLINE_SECONDS)
    where = f"{endpoint.host}:{endpoint.port}"
    try:
        async with session.get(
            f"{endpoint.url}{path}", server_hostname=endpoint.server_name, timeout=timeout
        ) as response:
            document = json.loads(await _body(response))
            if response.status not in (200, 503) or not isinstance(document, dict):
                return Answer(None, error=f"{where} answered HTTP {response.status}")
            return Answer(document)
    except (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError, ssl.SSLError) as error:
        return Answer(None, error=f"{where}: TLS: {error}")
    except asyncio.TimeoutError:
        return Answer(None, unreachable=True, error=f"{where}: no answer within {HEALTH_DEADLINE_SECONDS:g} s")
    except aiohttp.ClientConnectorError as error:
        return Answer(None, unreachable=True, error=f"{where}: {connect_reason(error)}")
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
        return Answer(None, error=f"{where}: {type(error).__name__}: {error}")


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """The whole body; ValueError if it is longer than any answer of ours. One `read` gives what has come so far."""
    body = bytearray()
    async for piece in response.content.iter_chunked(MAX_HEALTH_BYTES):
        body += piece
        if len(body) > MAX_HEALTH_BYTES:
            raise ValueError(f"an answer of more than {MAX_HEALTH_BYTES} bytes")
    return bytes(body)
