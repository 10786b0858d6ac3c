"""A real TLS server with a certificate of the site CA, in a thread."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fleet.provision import pki
from fleet.provision.rollout_gate import HealthTarget

NAME = "control.demo.fleet.internal"
API_KEY = "sesame"


@contextmanager
def https_server(directory: Path, handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[HealthTarget]:
    """Serve with this handler; yields where, and with what it is asked. CA and certificates lie in `directory`."""
    authority = pki.ensure_authority(directory, "demo")
    pki.ensure_operator(authority, directory)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "control")])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    pem = request.public_bytes(serialization.Encoding.PEM).decode()
    (directory / "box.crt").write_text(pki.sign_request(authority, pem, "control", (f"DNS:{NAME}", "IP:127.0.0.1")))
    (directory / "box.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "box.crt", directory / "box.key")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    operator_key, operator_certificate = pki.operator_paths(directory)
    try:
        yield HealthTarget(
            "127.0.0.1",
            server.server_address[1],
            NAME,
            pki.ca_certificate_path(directory),
            operator_certificate,
            operator_key,
            API_KEY,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
