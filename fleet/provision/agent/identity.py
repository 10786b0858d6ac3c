"""The box's key pair: the key is made here and never leaves; only its request travels."""

from __future__ import annotations

import os
import pwd
import shutil
from typing import Any

from fleet.provision.agent.errors import AgentError
from fleet.provision.agent.paths import (
    Ownership,
    group_name,
    make_parents,
    open_quietly,
    path_fact,
    sha256_of,
    user_name,
    write_aside,
)
from fleet.provision.agent.record import Record
from fleet.provision.agent.system import PATH, command

STEP = "identity"
CURVE = "P-256"
KEY_MODE, CERTIFICATE_MODE = 0o600, 0o644
REQUEST_FIELDS = ("common_name", "organization", "subject_alternative_names", "ca_sha256")


def owner_of(spec: dict[str, Any]) -> str:
    """Who must be able to read the key: the service user, in local mode whoever runs the agent."""
    return str(spec["user"] or user_name(os.geteuid()))


def fact(identity: dict[str, Any], owner: str, privileged: bool, record: Record) -> dict[str, Any]:
    """In the shape of `fleet.provision.facts.IdentityFact`."""
    recorded = record.data["identity"]
    key = path_fact(identity["key_path"])
    certificate = path_fact(identity["certificate_path"])
    return {
        "key": _difference(key, recorded.get("key_sha256", ""), KEY_MODE, owner, privileged),
        "certificate": _difference(
            certificate, recorded.get("certificate_sha256", ""), CERTIFICATE_MODE, owner, privileged
        ),
        "recorded": recorded.get("request", {}),
        "certificate_sha256": certificate.get("sha256", ""),
    }


def _difference(found: dict[str, Any], sha256: str, mode: int, owner: str, privileged: bool) -> str:
    if found["kind"] != "file":
        return "missing"
    if found["sha256"] != sha256:
        return "content"
    if found["mode"] != mode:
        return "mode"
    return "owner" if privileged and found["owner"] != owner else ""


class IdentityFiles:
    """Key and certificate on disk, owned by whoever serves with them.

    Args:
        spec: the identity's specification. owner: see `owner_of`.
    """

    def __init__(self, spec: dict[str, Any], owner: str, ownership: Ownership, record: Record) -> None:
        self._spec = spec
        self._ownership = ownership
        self._record = record
        self._attributes = {"owner": owner, "group": group_name(pwd.getpwnam(owner).pw_gid)}

    def _write(self, path: str, data: bytes, mode: int) -> str:
        make_parents(path)
        write_aside(path, [data], self._ownership, {"mode": mode} | self._attributes, sync=True)
        return sha256_of(path)

    def set_attributes(self) -> None:
        """Modes and owner of key and certificate, both of which are there."""
        for path, mode in ((self._spec["key_path"], KEY_MODE), (self._spec["certificate_path"], CERTIFICATE_MODE)):
            self._ownership.set(path, mode, **self._attributes)

    def make_key(self) -> None:
        """Make a new private key; what was recorded of the old one is forgotten."""
        pem = _openssl_key() if _has_openssl() else _cryptography_key()
        self._record.data["identity"] = {"key_sha256": self._write(self._spec["key_path"], pem, KEY_MODE)}
        self._record.save()

    def make_request(self) -> str:
        """A PKCS #10 request (PEM) for the present key."""
        with open(open_quietly(self._spec["key_path"]), "rb") as file:  # the directory is the service user's
            key = file.read()
        make = _openssl_request if _has_openssl() else _cryptography_request
        return make(key, self._spec).decode()

    def store_certificate(self, pem: str) -> None:
        """Write the signed certificate and record what it answers."""
        self._record.data["identity"] |= {
            "certificate_sha256": self._write(self._spec["certificate_path"], pem.encode(), CERTIFICATE_MODE),
            "request": {field: self._spec[field] for field in REQUEST_FIELDS},
        }
        self._record.save()


def _has_openssl() -> bool:
    return shutil.which("openssl", path=PATH) is not None


def _openssl_key() -> bytes:
    argv = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", f"ec_paramgen_curve:{CURVE}"]
    return command(STEP, argv).stdout


def _openssl_request(key: bytes, identity: dict[str, Any]) -> bytes:
    """The configuration goes through memory: names in it are data, and nothing is left on disk."""
    names = ",".join(identity["subject_alternative_names"])
    text = (
        "[req]\nprompt=no\nstring_mask=utf8only\ndistinguished_name=name\nreq_extensions=extensions\n"
        f"[name]\nO={identity['organization']}\nCN={identity['common_name']}\n"
        f"[extensions]\nsubjectAltName={names}\nkeyUsage=critical,digitalSignature\n"
        "extendedKeyUsage=serverAuth,clientAuth\n"
    )
    descriptor = os.memfd_create("request.cnf")
    try:
        os.write(descriptor, text.encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        argv = ["openssl", "req", "-new", "-sha256", "-key", "/dev/stdin", "-config", f"/proc/self/fd/{descriptor}"]
        return command(STEP, argv, stdin=key, pass_fds=(descriptor,)).stdout
    finally:
        os.close(descriptor)


def _cryptography_missing(error: ImportError) -> AgentError:
    return AgentError(
        STEP, f"neither openssl nor Python's cryptography is here ({error})", hint="apt-get install openssl"
    )


def _cryptography_key() -> bytes:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise _cryptography_missing(error) from error
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _cryptography_request(key: bytes, identity: dict[str, Any]) -> bytes:
    try:
        from ipaddress import ip_address

        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise _cryptography_missing(error) from error
    names: list[x509.GeneralName] = []
    for name in identity["subject_alternative_names"]:
        kind, _, value = name.partition(":")
        names.append(x509.IPAddress(ip_address(value)) if kind == "IP" else x509.DNSName(value))
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, identity["organization"]),
            x509.NameAttribute(NameOID.COMMON_NAME, identity["common_name"]),
        ]
    )
    private_key = serialization.load_pem_private_key(key, None)
    if not isinstance(private_key, ec.EllipticCurvePrivateKey):
        raise AgentError(STEP, f"{identity['key_path']} is no elliptic-curve key, expected {CURVE}")
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    request = builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(
        private_key, hashes.SHA256()
    )
    return request.public_bytes(serialization.Encoding.PEM)
