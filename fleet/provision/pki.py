"""The site's certificate authority: made once on the operator's side, signs what boxes ask for.

Certificates follow RFC 5280 closely enough for strict verifiers (`X509_V_FLAG_X509_STRICT`): critical basic
constraints and key usage, subject and authority key identifiers, positive random serial numbers.
"""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleet import RELEASED_UNIX_SECONDS
from fleet.errors import FleetError
from fleet.provision.state_directory import write_private

DAYS_PER_YEAR = 365.25
CA_YEARS = 20
CERTIFICATE_YEARS = 10
# A box whose clock is a little behind the operator's must not read "not yet valid".
BACKDATED = timedelta(days=1)
# Release date of this version. No certificate is signed by, or starts at, a clock that is before it.
CLOCK_FLOOR = datetime.fromtimestamp(RELEASED_UNIX_SECONDS, timezone.utc)
REQUEST_MAX_CHARACTERS = 16 * 1024
OPERATOR = "operator"
CURVE = ec.SECP256R1()


@dataclass(frozen=True)
class SiteAuthority:
    """The CA of a site, loaded.

    Attributes:
        site: the site's name; O of every subject.
        key: private key of the CA, EC P-256.
        certificate: its self-signed certificate.
    """

    site: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def certificate_pem(self) -> bytes:
        """The CA's certificate, PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def sha256(self) -> str:
        """Hex digest of the CA's PEM: what `IdentitySpec.ca_sha256` holds."""
        return hashlib.sha256(self.certificate_pem).hexdigest()


def checked_now() -> datetime:
    """The operator's clock, UTC.

    Raises:
        FleetError: it stands before this release, so a certificate would carry nonsense dates.
    """
    now = datetime.now(timezone.utc)
    if now < CLOCK_FLOOR:
        raise FleetError(
            f"this machine's clock says {now:%Y-%m-%d}, before this release of fleet ({CLOCK_FLOOR:%Y-%m-%d}): "
            "no certificate is signed with a wrong date",
            hint="set the clock, then provision again",
        )
    return now


def load_authority(state_directory: Path, site: str) -> SiteAuthority | None:
    """The site's CA, or None if there is none yet.

    Raises:
        FleetError: half of it is missing, unreadable, or belongs to another site.
    """
    key_path, certificate_path = _ca_paths(state_directory)
    if not certificate_path.exists():  # the last file written: without it there is no CA yet
        return None
    hint = f"put {key_path.parent} back from a backup; moving it away makes a new CA, and every box a new certificate"
    try:
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
    except (OSError, ValueError) as error:
        raise FleetError(f"site CA in {key_path.parent}: {error}", hint=hint) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise FleetError(f"site CA in {key_path.parent}: ca.key does not belong to ca.crt", hint=hint)
    organization = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    if [attribute.value for attribute in organization] != [site]:
        raise FleetError(f"site CA in {key_path.parent} is not of site {site}", hint=hint)
    return SiteAuthority(site=site, key=key, certificate=certificate)


def ensure_authority(state_directory: Path, site: str) -> SiteAuthority:
    """The site's CA; made if there is none yet, never a second time.

    Raises:
        FleetError: as `load_authority` and `checked_now`.
    """
    return load_authority(state_directory, site) or _make_authority(state_directory, site)


def ensure_operator(authority: SiteAuthority, state_directory: Path) -> None:
    """Make `<state>/operator.key` and `.crt` (CN=operator) unless a pair by this CA is already there.

    Raises:
        FleetError: as `checked_now`; or the files cannot be written.
    """
    key_path, certificate_path = operator_paths(state_directory)
    if key_path.is_file() and certificate_path.is_file():
        try:
            certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
            certificate.verify_directly_issued_by(authority.certificate)
            key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
            if key.public_key() == certificate.public_key():
                return
        except (ValueError, TypeError, InvalidSignature):
            pass  # damaged, or by a CA that was replaced: made anew below
    key = ec.generate_private_key(CURVE)
    certificate = _issue(authority, OPERATOR, key.public_key(), (f"DNS:{OPERATOR}.{authority.site}.fleet.internal",))
    write_private(key_path, _key_pem(key))
    write_private(certificate_path, certificate.public_bytes(serialization.Encoding.PEM))


def operator_paths(state_directory: Path) -> tuple[Path, Path]:
    """Key and certificate of the operator."""
    return state_directory / "operator.key", state_directory / "operator.crt"


def ca_certificate_path(state_directory: Path) -> Path:
    """The site CA's certificate."""
    return _ca_paths(state_directory)[1]


def sign_request(authority: SiteAuthority, request_pem: str, box: str, names: tuple[str, ...]) -> str:
    """Sign a box's request: subject and alternative names come from us; of the request only its key is taken.

    Args:
        authority: the site's CA.
        request_pem: PKCS#10 in PEM, at most REQUEST_MAX_CHARACTERS.
        box: the box that the request came from.
        names: `DNS:…` and `IP:…` entries.

    Returns:
        The certificate, PEM.

    Raises:
        FleetError: too long, unreadable, self-signature wrong, another box's name, or no EC P-256 key.
    """
    hint = f"provision {box} again; if it stays, look at its pki directory"
    if len(request_pem) > REQUEST_MAX_CHARACTERS:
        raise FleetError(
            f"{box}: certificate request of {len(request_pem)} characters, at most {REQUEST_MAX_CHARACTERS}"
        )
    try:
        request = x509.load_pem_x509_csr(request_pem.encode())
        valid = request.is_signature_valid
    except (ValueError, TypeError, InvalidSignature) as error:
        raise FleetError(f"{box}: unreadable certificate request: {error}", hint=hint) from error
    if not valid:
        raise FleetError(f"{box}: certificate request is not signed by its own key", hint=hint)
    common_names = [str(name.value) for name in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if common_names != [box]:
        raise FleetError(f"{box}: asks for a certificate of {', '.join(common_names) or 'nobody'}: refused", hint=hint)
    key = request.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise FleetError(f"{box}: certificate request with another kind of key, expected EC P-256", hint=hint)
    return _issue(authority, box, key, names).public_bytes(serialization.Encoding.PEM).decode()


def _ca_paths(state_directory: Path) -> tuple[Path, Path]:
    directory = state_directory / "ca"
    return directory / "ca.key", directory / "ca.crt"


def _make_authority(state_directory: Path, site: str) -> SiteAuthority:
    now = checked_now()
    key_path, certificate_path = _ca_paths(state_directory)
    key = _started_key(key_path) or ec.generate_private_key(CURVE)
    subject = _subject(f"{site} site CA", site)
    certificate = (
        _builder(subject, subject, key.public_key(), now, CA_YEARS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(certificate_authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_private(key_path, _key_pem(key))
    write_private(certificate_path, certificate.public_bytes(serialization.Encoding.PEM))
    return SiteAuthority(site=site, key=key, certificate=certificate)


def _started_key(key_path: Path) -> ec.EllipticCurvePrivateKey | None:
    """The key of a CA whose making was cut short before its certificate was written."""
    if not key_path.exists():
        return None
    try:
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise FleetError(
            f"{key_path}: not readable as a private key: {error}",
            hint=f"put {key_path.parent} back from a backup; moving it away makes a new CA",
        ) from error
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _issue(
    authority: SiteAuthority, common_name: str, key: ec.EllipticCurvePublicKey, names: tuple[str, ...]
) -> x509.Certificate:
    ca = authority.certificate
    identifier = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    subject = _subject(common_name, authority.site)
    return (
        _builder(subject, ca.subject, key, checked_now(), CERTIFICATE_YEARS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(certificate_authority=False), critical=True)
        .add_extension(usages, critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, years: int
) -> x509.CertificateBuilder:
    start = max(now - BACKDATED, CLOCK_FLOOR)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=years * DAYS_PER_YEAR))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _subject(common_name: str, site: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, site),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _key_usage(*, certificate_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificate_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificate_authority,
        crl_sign=certificate_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    kind, _, value = name.partition(":")
    if kind == "IP":
        return x509.IPAddress(ipaddress.ip_address(value))
    if kind == "DNS":
        return x509.DNSName(value)
    raise ValueError(f"alternative name {name!r}: expected DNS:… or IP:…")


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
