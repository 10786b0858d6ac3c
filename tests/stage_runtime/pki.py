"""A site CA and box certificates as docs/architecture.md describes them."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stage_runtime.link.tls import TlsIdentity

NO_KEY_USAGE = {
    "digital_signature": False,
    "content_commitment": False,
    "key_encipherment": False,
    "data_encipherment": False,
    "key_agreement": False,
    "key_cert_sign": False,
    "crl_sign": False,
    "encipher_only": False,
    "decipher_only": False,
}


class SiteCa:
    """Issues certificates into a directory, one CA a site."""

    def __init__(self, directory: Path, site: str) -> None:
        self.directory = directory
        self.site = site
        directory.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{site} CA")])
        usage = NO_KEY_USAGE | {"key_cert_sign": True, "crl_sign": True}
        self._certificate = (
            self._builder(self._name, self._key.public_key(), years=20)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = directory / "ca.crt"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, box: str, *, site: str | None = None, expired: bool = False, clock_file: Path | None = None
    ) -> TlsIdentity:
        """A key and certificate for a box; `site` and `expired` make unusual ones."""
        organization = site or self.site
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, box),
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization),
            ]
        )
        names = [
            x509.DNSName(f"{box}.{organization}.fleet.internal"),
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        certificate = (
            self._builder(subject, key.public_key(), years=-1 if expired else 10)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**(NO_KEY_USAGE | {"digital_signature": True})), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        stem = f"{box}-{organization}-{'expired' if expired else 'valid'}"
        certificate_path, key_path = self.directory / f"{stem}.crt", self.directory / f"{stem}.key"
        certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return TlsIdentity(self.path, certificate_path, key_path, clock_file)

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey, *, years: int
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=5 * 365))
            .not_valid_after(now + dt.timedelta(days=years * 365))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
