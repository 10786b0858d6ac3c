"""A question to a site's gateway, streamed; aiohttp and nothing of an OpenAI client."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from fleet.errors import ExitCode, FleetError
from fleet.observe.site_access import Endpoint, connect_reason

CONNECT_SECONDS = 5.0
QUIET_SECONDS = 5.0
"""After so long without news a line says what is being waited for."""
MAX_ERROR_BYTES = 2**16
REPLANNING = b"new plan"
"""In a comment of the stream: the gateway waits for one."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Question:
    """What to ask; None leaves a parameter to the gateway."""

    text: str
    system: str | None
    model: str | None
    max_tokens: int | None
    temperature: float | None
    seed: int | None


@dataclass
class Reply:
    """The answer so far."""

    stream_id: str = ""
    model: str = ""
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class Asker:
    """Asks one gateway.

    Args:
        endpoint: of the gateway.
        context: TLS context that trusts the site's CA.
        key: API key.
        status_command: the command to run when the gateway does not serve.
        on_text: called with each piece of the answer.
        on_wait: called with a line that says what is being waited for.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        context: ssl.SSLContext,
        key: str,
        status_command: str,
        on_text: Callable[[str], None],
        on_wait: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._context = context
        self._key = key
        self._status_command = status_command
        self._on_text = on_text
        self._on_wait = on_wait

    async def ask(self, question: Question) -> Reply:
        """Ask and hand out the answer as it comes.

        Raises:
            FleetError: the gateway can't be reached, refuses, or the answer breaks off.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(ssl=self._context, force_close=True)
        headers = {"Authorization": f"Bearer {self._key}"}
        try:
            async with aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=headers, trust_env=False
            ) as session:
                model = question.model
                if model is None:
                    model = await self._noisily(self._first_model(session), "the list of models")
                return await self._stream(session, question, model)
        except aiohttp.ClientConnectorCertificateError as error:
            raise self._failed(f"its certificate is not the site's: {error}") from None
        except aiohttp.ClientSSLError as error:
            raise self._failed(f"no TLS connection: {error}") from None
        except aiohttp.ClientConnectorError as error:
            raise self._failed(connect_reason(error), ExitCode.UNREACHABLE) from None
        except asyncio.TimeoutError:
            raise self._failed(f"no connection within {CONNECT_SECONDS:g} s", ExitCode.UNREACHABLE) from None
        except aiohttp.ClientError as error:
            raise self._failed(f"the connection broke: {error or type(error).__name__}") from None

    def _failed(self, reason: str, exit_code: ExitCode = ExitCode.FAILED) -> FleetError:
        where = f"gateway {self._endpoint.host}:{self._endpoint.port}"
        return FleetError(f"{where}: {reason}", hint=self._status_command, exit_code=exit_code)

    async def _noisily(self, step: Coroutine[Any, Any, Result], what: str) -> Result:
        """Await a step and say so when it takes long."""
        task = asyncio.get_running_loop().create_task(step)
        waited_seconds = 0.0
        try:
            while not (await asyncio.wait([task], timeout=QUIET_SECONDS))[0]:
                waited_seconds += QUIET_SECONDS
                self._on_wait(f"waiting for {what} from {self._endpoint.url}, {waited_seconds:.0f} s so far")
            return await task
        finally:
            task.cancel()

    async def _first_model(self, session: aiohttp.ClientSession) -> str:
        async with session.get(
            f"{self._endpoint.url}/v1/models", server_hostname=self._endpoint.server_name
        ) as response:
            if response.status != 200:
                raise await self._refusal(response)
            models = (await response.json())["data"]
            return str(models[0]["id"])

    async def _stream(self, session: aiohttp.ClientSession, question: Question, model: str) -> Reply:
        reply = Reply()
        response = await self._noisily(self._post(session, _body(question, model)), "the first token")
        async with response:
            if response.status != 200:
                raise await self._refusal(response)
            while line := await self._noisily(response.content.readline(), "the next token"):
                if line.startswith(b":") and REPLANNING in line:
                    self._on_wait("the answer waits for a new plan: layers move (why: fleet events)")
                if not line.startswith(b"data:"):
                    continue
                data = line.decode().removeprefix("data:").strip()
                if data == "[DONE]":
                    return reply
                self._take(json.loads(data), reply)
        raise self._failed("the answer broke off")

    async def _post(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> aiohttp.ClientResponse:
        url = f"{self._endpoint.url}/v1/chat/completions"
        return await session.post(url, json=body, server_hostname=self._endpoint.server_name)

    def _take(self, event: dict[str, Any], reply: Reply) -> None:
        """Add one event to the reply."""
        if "error" in event:
            raise self._failed(f"the answer broke off: {event['error'].get('message')}")
        reply.stream_id, reply.model = str(event["id"]), str(event["model"])
        reply.usage = event.get("usage") or reply.usage
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            reply.text += text
            reply.finish_reason = choice["finish_reason"] or reply.finish_reason
            if text:
                self._on_text(text)

    async def _refusal(self, response: aiohttp.ClientResponse) -> FleetError:
        """The error behind an HTTP status."""
        raw = await response.content.read(MAX_ERROR_BYTES)
        try:
            message = str(json.loads(raw)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"HTTP {response.status} {response.reason}"
        if response.status == 401:
            hint = "give the gateway this site's keys again: fleet provision"
        elif response.status in (400, 404):
            hint = "fleet ask --help"
        else:
            hint = self._status_command
        return FleetError(f"the gateway refused: {message}", hint=hint)


def _body(question: Question, model: str) -> dict[str, Any]:
    """The request; parameters that were not given are left out."""
    messages = [{"role": "user", "content": question.text}]
    if question.system is not None:
        messages.insert(0, {"role": "system", "content": question.system})
    given = {"max_tokens": question.max_tokens, "temperature": question.temperature, "seed": question.seed}
    return {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, value in given.items() if value is not None},
    }
