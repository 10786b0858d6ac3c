"""API keys: only their SHA-256 is on the box; comparison takes the same time for every key."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from pathlib import Path

from fleet.errors import ExitCode, FleetError
from fleet.gateway.errors import unauthorized

KEYS_SCHEMA = 1
MAX_KEY_CHARACTERS = 512
MAX_KEYS_FILE_BYTES = 2**20
_HEX_SHA256 = re.compile(r"[0-9a-f]{64}")


class ApiKeys:
    """The clients that may use the gateway.

    Args:
        digests: client's name → hex SHA-256 of its key.
    """

    def __init__(self, digests: dict[str, str]) -> None:
        self._digests = digests

    def client(self, authorization: str | None) -> str:
        """The name of the client behind an Authorization header.

        Raises:
            ApiError: 401.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise unauthorized("no API key: send the header Authorization: Bearer <key>")
        if len(key) > MAX_KEY_CHARACTERS:
            raise unauthorized("the API key is not known here")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
        # every key is compared, so that the time does not tell which one matched
        matches = [name for name, known in self._digests.items() if hmac.compare_digest(known, digest)]
        if not matches:
            raise unauthorized("the API key is not known here")
        return matches[0]


def load_api_keys(path: Path) -> ApiKeys:
    """Read `{"schema":1,"keys":[{"name","sha256"}]}`.

    Raises:
        FleetError: not readable, or not of this form.
    """
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(MAX_KEYS_FILE_BYTES))
        if data["schema"] != KEYS_SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, expected {KEYS_SCHEMA}")
        digests = {str(entry["name"]): str(entry["sha256"]) for entry in data["keys"]}
        if not all(_HEX_SHA256.fullmatch(digest) for digest in digests.values()):
            raise ValueError("sha256 must be 64 lower-case hexadecimal digits")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f"{path}: expected API keys with name and sha256: {type(error).__name__}: {error}",
            hint="write the keys anew: fleet provision",
            exit_code=ExitCode.INVALID_INVENTORY,
        ) from None
    return ApiKeys(digests)
