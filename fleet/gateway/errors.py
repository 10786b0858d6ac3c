"""Errors in the shape of the OpenAI API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from typing import Any

RETRY_AFTER_SECONDS = 2
"""Sent with 429, 503 and 507 where nobody knows better: a ring forms anew within about this time."""


class ApiError(Exception):
    """An answer that is not the one the client asked for.

    Args:
        status: HTTP status.
        message: for people; names what was read and what was expected.
        param: the field of the request that is wrong.
        code: for programs, e.g. "model_not_found".
        outcome: label of `fleet_gateway_requests_total`, one of `metrics.OUTCOMES`.
        retry_after_seconds: sent with 429, 503 and 507 instead of `RETRY_AFTER_SECONDS`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        outcome: str = "invalid",
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.outcome = outcome
        self.retry_after_seconds = retry_after_seconds

    @property
    def kind(self) -> str:
        """The API's error type for the status."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The JSON document of this error."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        if self.status in (429, 503, 507):
            return {"Retry-After": str(math.ceil(self.retry_after_seconds or RETRY_AFTER_SECONDS))}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def invalid(param: str, message: str) -> ApiError:
    """400 for a field with a wrong type or value."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def unsupported(param: str, message: str = "this server does not support it") -> ApiError:
    """400 for a field that the API knows and this server does not."""
    return ApiError(400, f"{param}: {message}", param=param, code="unsupported_parameter")


def unauthorized(message: str) -> ApiError:
    """401."""
    return ApiError(401, message, code="invalid_api_key", outcome="unauthorized")


def overloaded(message: str) -> ApiError:
    """429, to be tried again."""
    return ApiError(429, message, code="overloaded", outcome="overloaded")


def unavailable(message: str, *, retry_after_seconds: float | None = None) -> ApiError:
    """503, to be tried again."""
    return ApiError(503, message, code="unavailable", outcome="unavailable", retry_after_seconds=retry_after_seconds)


def journal_full(message: str) -> ApiError:
    """507: an answer that could be resumed can't be kept now; one that can't be resumed could be made."""
    return ApiError(507, message, code="journal_unavailable", outcome="unavailable")


def gone(message: str, code: str) -> ApiError:
    """410: a stream that is not kept, or not for this key."""
    return ApiError(410, message, code=code)


def timed_out(message: str) -> ApiError:
    """504."""
    return ApiError(504, message, code="timeout", outcome="timeout")


def internal(message: str) -> ApiError:
    """500, a bug of ours or of the engine."""
    return ApiError(500, message, code="internal_error", outcome="error")
