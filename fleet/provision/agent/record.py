"""What the agent remembers on the box: `<prefix>/provision.json`, 0600, written only when it changes."""

from __future__ import annotations

import json
import os
from typing import Any

from fleet.provision.agent.paths import Ownership, path_fact, write_aside

FILE_NAME = "provision.json"


class Record:
    """Fingerprints of what was started, digests of environment manifests and of the identity's files.

    Shape: {"programs": {name: fingerprint}, "supervisor": fingerprint, "environments": {path: manifest digest},
    "identity": {"key_sha256", "certificate_sha256", "request": {…}}}. A record that is missing or unreadable counts as
    empty: things are then made or started once more, never wrongly kept.
    """

    def __init__(self, prefix: str, privileged: bool) -> None:
        self.path = os.path.join(prefix, FILE_NAME)
        self._ownership = Ownership(privileged)
        self.data: dict[str, Any] = {"programs": {}, "supervisor": "", "environments": {}, "identity": {}}
        if path_fact(self.path)["kind"] == "file":
            with open(self.path, "rb") as file:
                self._load(file.read())
        self._saved = self._text()

    def _load(self, text: bytes) -> None:
        try:
            data = json.loads(text)
        except ValueError:
            return
        if isinstance(data, dict):
            self.data.update(
                {key: data[key] for key, empty in self.data.items() if isinstance(data.get(key), type(empty))}
            )

    def _text(self) -> bytes:
        return json.dumps(self.data, sort_keys=True, indent=1).encode() + b"\n"

    def save(self) -> None:
        """Write it, if it differs from what lies on disk."""
        text = self._text()
        if text != self._saved:
            spec = {"mode": 0o600, "owner": "root", "group": "root"}
            write_aside(self.path, [text], self._ownership, spec, sync=True)
            self._saved = text
