"""TLS of a site: contexts, names and identities. Torch-free; gateway and operator use it too."""

from __future__ import annotations

import ssl
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# OpenSSL's X509_V_FLAG_NO_CHECK_TIME (openssl/x509_vfy.h); Python's ssl module has no name for it.
X509_V_FLAG_NO_CHECK_TIME = 0x200000


@dataclass(frozen=True)
class PeerIdentity:
    """Subject of a verified peer certificate: CN is the box, O the site."""

    box: str
    site: str


def server_name(box: str, site: str) -> str:
    """The DNS name that a box's certificate carries and its clients check."""
    return f"{box}.{site}.fleet.internal"


def peer_identity(ssl_object: ssl.SSLObject | ssl.SSLSocket | None) -> PeerIdentity | None:
    """Who the peer's certificate says it is; None without TLS or without a certificate."""
    certificate = ssl_object.getpeercert() if ssl_object is not None else None
    if not certificate:
        return None
    names: Any = certificate.get("subject", ())  # ((("commonName", "box1"),), …); typeshed's type is wider
    subject = {key: value for part in names for key, value in part}
    return PeerIdentity(str(subject.get("commonName", "")), str(subject.get("organizationName", "")))


@dataclass
class TlsIdentity:
    """A process' certificate and the contexts made with it.

    Dates of certificates are judged only once this process' own clock is known to be synchronised: boxes without
    a battery-backed clock boot in 1970, and serving never waits for a time server. Chain, key usage and names are
    always judged.

    Attributes:
        ca: PEM file of the site CA.
        certificate: PEM file of the own certificate.
        key: PEM file of the own private key.
        clock_synchronised_file: exists once the clock is synchronised (systemd-timesyncd and chrony set-ups make
            one); None: never known to be.
    """

    ca: Path
    certificate: Path
    key: Path
    clock_synchronised_file: Path | None = None
    # weak: every dial makes one, and a box whose clock is never known to be right dials for years
    _contexts: weakref.WeakSet[ssl.SSLContext] = field(default_factory=weakref.WeakSet, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)  # dials use threads

    @property
    def clock_synchronised(self) -> bool:
        """Whether the own clock is known to be right; also switches contexts made earlier to judging dates."""
        synchronised = self.clock_synchronised_file is not None and self.clock_synchronised_file.exists()
        if synchronised:
            with self._lock:
                for context in self._contexts:
                    context.verify_flags &= ~X509_V_FLAG_NO_CHECK_TIME
                self._contexts.clear()
        return synchronised

    def client_context(self) -> ssl.SSLContext:
        """Context to dial with; pass `server_hostname=server_name(box, site)`.

        Raises:
            OSError: a file is missing or no valid PEM (`ssl.SSLError`).
        """
        return self._prepare(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def server_context(self, *, require_certificate: bool = True) -> ssl.SSLContext:
        """Context to listen with.

        Args:
            require_certificate: False lets clients without a certificate in; the caller decides what they may see.

        Raises:
            OSError: a file is missing or no valid PEM (`ssl.SSLError`).
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED if require_certificate else ssl.CERT_OPTIONAL
        return self._prepare(context)

    def _prepare(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.certificate, self.key)
        if not self.clock_synchronised:
            context.verify_flags |= X509_V_FLAG_NO_CHECK_TIME
            with self._lock:
                self._contexts.add(context)
        return context
