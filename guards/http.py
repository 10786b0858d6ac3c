"""The guards' port over HTTPS: /livez for anyone, /health, /metrics and /v1/guards with a certificate of the site.

The standard library's server, as aiohttp alone would take a third of the guards' memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from stage_runtime.link.tls import TlsIdentity, peer_identity

log = logging.getLogger(__name__)

# A scrape and an operator need one each, for milliseconds; of strangers without end, the one that came first goes.
CONNECTIONS_AT_ONCE = 16
# Handshake, request and each write of the answer.
STEP_SECONDS = 5.0

Page = Callable[[], tuple[HTTPStatus, str, bytes]]  # status, content type, body


def json_page(document: Callable[[], tuple[bool, dict[str, Any]]]) -> Page:
    """A page of a document; 503 where it is not well."""

    def page() -> tuple[HTTPStatus, str, bytes]:
        well, data = document()
        status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "application/json", json.dumps(data).encode() + b"\n"

    return page


def metrics_page(render: Callable[[], bytes]) -> Page:
    """A scrape."""
    return lambda: (HTTPStatus.OK, CONTENT_TYPE_LATEST, render())


def livez() -> tuple[HTTPStatus, str, bytes]:
    """That the process lives, for anyone."""
    return HTTPStatus.OK, "text/plain", b"ok\n"


class _Handler(BaseHTTPRequestHandler):
    """One request on one connection."""

    server: GuardsServer
    timeout = STEP_SECONDS
    server_version = "fleet-guards"
    sys_version = ""

    def do_GET(self) -> None:
        """The only method there is."""
        path = self.path.partition("?")[0]
        connection = self.connection
        identity = peer_identity(connection) if isinstance(connection, ssl.SSLSocket) else None
        if path != "/livez" and (identity is None or identity.site != self.server.site):
            self._answer(HTTPStatus.FORBIDDEN, "application/json", _problem("a certificate of this site is needed"))
        elif page := self.server.pages.get(path):
            try:
                answer = page()
            except Exception:  # a mistake in a page is told in the log, and ends no guard
                log.exception("page %s", path)
                answer = HTTPStatus.INTERNAL_SERVER_ERROR, "application/json", _problem("see the guards' log")
            self._answer(*answer)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "application/json", _problem(f"no page {path[:200]}"))

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not logged: a scrape every few seconds would fill the log."""
        log.debug(format, *arguments)


class GuardsServer(ThreadingHTTPServer):
    """Listens once it is made; `start` begins to answer.

    Args:
        host, port: where; port 0 lets the system choose.
        tls: the box's certificate. site: whose certificates may read.
        pages: path → page.

    Raises:
        OSError: the address is in use or not ours, or a certificate file can't be read.
    """

    daemon_threads = True
    address_family = socket.AF_INET

    def __init__(self, host: str, port: int, tls: TlsIdentity, site: str, pages: dict[str, Page]) -> None:
        self.site = site
        self.pages = {"/livez": livez, **pages}
        self._tls = tls
        self._context = tls.server_context(require_certificate=False)
        self._open: dict[socket.socket, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    def start(self) -> None:
        """Answer on a thread of its own until `close`."""
        threading.Thread(target=self.serve_forever, name="http", daemon=True).start()

    def close(self) -> None:
        """Stop to listen; answers under way end with the process."""
        self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection; the handshake is its own thread's work."""
        connection, address = super().get_request()
        connection.settimeout(STEP_SECONDS)
        _ = self._tls.clock_synchronised  # from then on, dates are judged
        wrapped = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._open[wrapped] = None
            surplus = list(self._open)[: max(0, len(self._open) - CONNECTIONS_AT_ONCE)]
        for oldest in surplus:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the end and closes it
        return wrapped, address

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handshake, then the request; on the connection's own thread."""
        try:
            request.do_handshake()
        except OSError as error:  # an ssl.SSLError is one
            log.debug("HTTPS from %s: %s", client_address[0], error)
            return
        super().finish_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The connection's end, whatever became of it."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are no news; mistakes of a page are."""
        log.debug("HTTPS from %s broke", client_address[0], exc_info=True)


def _problem(reason: str) -> bytes:
    return json.dumps({"reason": reason}).encode() + b"\n"
