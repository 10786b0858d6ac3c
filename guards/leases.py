"""The coordinator's permission to take this box out of its pipeline for a while, over HTTPS.

`POST /v1/boxes/<box>/lease` {"because", "seconds"} → 200 {"lease", "seconds"}, or 409 {"reason"}: one box of a pipeline
at a time, and only if a plan fits without it. `DELETE /v1/boxes/<box>/lease/<lease>` gives it back; one that nobody
gives back ends by itself.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from guards.restarts import LeaseRefused
from stage_runtime.link.tls import TlsIdentity, server_name

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0  # a plan without this box must be worked out first
MOST_ANSWER_BYTES = 64 * 1024
REASON_CHARACTERS = 300


class CoordinatorLeases:
    """Asks the coordinator.

    Args:
        site, box: who asks; the certificate says the same.
        coordinator_box, host, port: of its HTTPS port.
        lease_seconds: how long a restart takes at most.
    """

    def __init__(
        self, site: str, box: str, tls: TlsIdentity, *, coordinator_box: str, host: str, port: int, lease_seconds: float
    ) -> None:
        self._site, self._box, self._tls = site, box, tls
        self._coordinator_box, self._host, self._port = coordinator_box, host, port
        self._lease_seconds = lease_seconds

    @contextmanager
    def take(self, because: str) -> Iterator[None]:
        """Hold a lease inside the `with`.

        Raises:
            LeaseRefused: the coordinator says no, or does not answer: then nothing that serves may be taken out.
        """
        path = f"/v1/boxes/{quote(self._box, safe='')}/lease"
        status, answer = self._ask("POST", path, {"because": because, "seconds": self._lease_seconds})
        lease = answer.get("lease")
        if status != 200 or not isinstance(lease, str):
            reason = str(answer.get("reason") or f"HTTP {status}")[:REASON_CHARACTERS]
            raise LeaseRefused(f"the coordinator on {self._coordinator_box} gives no lease: {reason}")
        try:
            yield
        finally:
            try:
                self._ask("DELETE", f"{path}/{quote(lease, safe='')}", None)
            except LeaseRefused as error:
                log.warning("the lease ends by itself within %g s: %s", self._lease_seconds, error)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, Mapping[str, Any]]:
        try:
            connection = _Connection(self._host, self._port, server_name(self._coordinator_box, self._site), self._tls)
            try:
                text = None if body is None else json.dumps(body)
                connection.request(method, path, body=text, headers={"Content-Type": "application/json"})
                answer = connection.getresponse()
                data = answer.read(MOST_ANSWER_BYTES + 1)
            finally:
                connection.close()
            document = json.loads(data) if data else {}
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {str(error)[:REASON_CHARACTERS]}"
            raise LeaseRefused(f"the coordinator on {self._coordinator_box} can't be asked: {why}") from None
        return answer.status, document if isinstance(document, dict) else {}


class _Connection(http.client.HTTPConnection):
    """HTTP over TLS to an address, checked against the name in the box's certificate."""

    def __init__(self, host: str, port: int, name: str, tls: TlsIdentity) -> None:
        super().__init__(host, port, timeout=ANSWER_SECONDS)
        self._name, self._tls = name, tls

    def connect(self) -> None:
        """TCP, then TLS."""
        plain = socket.create_connection((self.host, self.port), ANSWER_SECONDS)
        try:
            self.sock = self._tls.client_context().wrap_socket(plain, server_hostname=self._name)
        except BaseException:
            plain.close()
            raise
