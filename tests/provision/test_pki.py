"""The site CA: strict verifiers accept what it signs, and it signs only what its box may have."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from fleet.errors import FleetError
from fleet.provision import pki

SITE = "demo"
NAMES = ("DNS:box1.demo.fleet.internal", "IP:10.77.0.11", "DNS:localhost", "IP:127.0.0.1")
X509_V_FLAG_NO_CHECK_TIME = 0x200000


def request(common_name: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    asked = x509.SubjectAlternativeName([x509.DNSName("operator.demo.fleet.internal")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(asked, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def signed_pair(state: Path, directory: Path) -> tuple[Path, Path]:
    """Key and certificate of box1, as files."""
    authority = pki.ensure_authority(state, SITE)
    key = ec.generate_private_key(ec.SECP256R1())
    key_file, certificate_file = directory / "box1.key", directory / "box1.crt"
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    certificate_file.write_text(pki.sign_request(authority, request("box1", key), "box1", NAMES))
    return key_file, certificate_file


@pytest.mark.parametrize("purpose", ["sslserver", "sslclient"])
def test_openssl_accepts_the_chain_strictly(tmp_path: Path, purpose: str) -> None:
    _, certificate = signed_pair(tmp_path / "state", tmp_path)
    ca = pki.ca_certificate_path(tmp_path / "state")
    done = subprocess.run(
        ["openssl", "verify", "-x509_strict", "-check_ss_sig", "-purpose", purpose, "-CAfile", ca, certificate],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> dict[str, object] | None:
    """A mutual handshake in memory; the client's certificate as the server sees it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server, server_hostname=name)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client_side, server_side):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return server_side.getpeercert()  # type: ignore[return-value]


@pytest.mark.parametrize("flags", [ssl.VERIFY_X509_STRICT, ssl.VERIFY_X509_STRICT | X509_V_FLAG_NO_CHECK_TIME])
def test_python_accepts_both_sides_strictly(tmp_path: Path, flags: int) -> None:
    state = tmp_path / "state"
    key, certificate = signed_pair(state, tmp_path)
    pki.ensure_operator(pki.ensure_authority(state, SITE), state)
    operator_key, operator_certificate = pki.operator_paths(state)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode = ssl.CERT_REQUIRED
    for context in (server, client):
        context.verify_flags |= flags
        context.load_verify_locations(pki.ca_certificate_path(state))
    server.load_cert_chain(certificate, key)
    client.load_cert_chain(operator_certificate, operator_key)
    peer = handshake(client, server, "box1.demo.fleet.internal")
    assert peer is not None
    assert peer["subject"] == ((("organizationName", SITE),), (("commonName", "operator"),))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client, server, "box2.demo.fleet.internal")


def test_names_come_from_us_and_not_from_the_request(tmp_path: Path) -> None:
    _, file = signed_pair(tmp_path / "state", tmp_path)
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["box1.demo.fleet.internal", "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("10.77.0.11"),
        ipaddress.ip_address("127.0.0.1"),
    ]


def test_extensions_and_dates(tmp_path: Path) -> None:
    _, file = signed_pair(tmp_path / "state", tmp_path)
    ca = pki.ensure_authority(tmp_path / "state", SITE).certificate
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    ca_usage = ca.extensions.get_extension_for_class(x509.KeyUsage)
    assert (constraints.critical, constraints.value.ca) == (True, False)
    assert (usage.critical, usage.value.digital_signature, usage.value.key_cert_sign) == (True, True, False)
    assert (ca_usage.critical, ca_usage.value.key_cert_sign, ca_usage.value.crl_sign) == (True, True, True)
    now = datetime.datetime.now(datetime.timezone.utc)
    assert certificate.not_valid_before_utc <= now - datetime.timedelta(hours=23) or (
        certificate.not_valid_before_utc == pki.CLOCK_FLOOR
    )
    assert certificate.not_valid_before_utc >= pki.CLOCK_FLOOR
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 3652
    assert (ca.not_valid_after_utc - ca.not_valid_before_utc).days == 7305


def test_another_boxs_name_is_refused_and_both_are_named(tmp_path: Path) -> None:
    authority = pki.ensure_authority(tmp_path, SITE)
    with pytest.raises(FleetError, match="box1: asks for a certificate of operator"):
        pki.sign_request(authority, request("operator", ec.generate_private_key(ec.SECP256R1())), "box1", NAMES)


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"])
def test_an_unreadable_request_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FleetError, match="box1: unreadable certificate request"):
        pki.sign_request(pki.ensure_authority(tmp_path, SITE), text, "box1", NAMES)


def test_an_endless_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="at most 16384"):
        pki.sign_request(pki.ensure_authority(tmp_path, SITE), "x" * 20_000, "box1", NAMES)


def test_a_request_whose_signature_is_wrong_is_refused(tmp_path: Path) -> None:
    der = bytearray(
        x509.load_pem_x509_csr(request("box1", ec.generate_private_key(ec.SECP256R1())).encode()).public_bytes(
            serialization.Encoding.DER
        )
    )
    der[-1] ^= 1
    pem = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM).decode()
    with pytest.raises(FleetError, match="not signed by its own key"):
        pki.sign_request(pki.ensure_authority(tmp_path, SITE), pem, "box1", NAMES)


def test_another_kind_of_key_is_refused(tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    with pytest.raises(FleetError, match="expected EC P-256"):
        pki.sign_request(pki.ensure_authority(tmp_path, SITE), request("box1", key), "box1", NAMES)


def test_nothing_is_made_twice(tmp_path: Path) -> None:
    def run() -> dict[str, bytes]:
        pki.ensure_operator(pki.ensure_authority(tmp_path, SITE), tmp_path)
        return {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    first = run()
    assert run() == first
    assert len(first) == 4


def test_files_are_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    pki.ensure_operator(pki.ensure_authority(state, SITE), state)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in state.rglob("*") if path.is_file()}
    directories = {stat.S_IMODE(path.stat().st_mode) for path in (state, state / "ca")}
    assert (modes, directories) == ({0o600}, {0o700})


def test_a_replaced_ca_makes_the_operator_a_new_certificate(tmp_path: Path) -> None:
    pki.ensure_operator(pki.ensure_authority(tmp_path, SITE), tmp_path)
    before = pki.operator_paths(tmp_path)[1].read_bytes()
    (tmp_path / "ca").rename(tmp_path / "old-ca")
    authority = pki.ensure_authority(tmp_path, SITE)
    pki.ensure_operator(authority, tmp_path)
    after = x509.load_pem_x509_certificate(pki.operator_paths(tmp_path)[1].read_bytes())
    after.verify_directly_issued_by(authority.certificate)
    assert pki.operator_paths(tmp_path)[1].read_bytes() != before


def test_a_making_that_was_cut_short_is_finished_with_its_key(tmp_path: Path) -> None:
    first = pki.ensure_authority(tmp_path, SITE)
    pki.ca_certificate_path(tmp_path).unlink()
    assert pki.load_authority(tmp_path, SITE) is None
    assert pki.ensure_authority(tmp_path, SITE).key.public_key() == first.key.public_key()


def test_a_ca_of_another_site_or_without_its_key_is_refused(tmp_path: Path) -> None:
    pki.ensure_authority(tmp_path, SITE)
    with pytest.raises(FleetError, match="not of site other"):
        pki.load_authority(tmp_path, "other")
    (tmp_path / "ca" / "ca.key").unlink()
    with pytest.raises(FleetError, match="site CA in"):
        pki.load_authority(tmp_path, SITE)


def test_a_clock_before_the_release_signs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pki, "CLOCK_FLOOR", datetime.datetime(2999, 1, 1, tzinfo=datetime.timezone.utc))
    with pytest.raises(FleetError, match="before this release of fleet"):
        pki.ensure_authority(tmp_path, SITE)
    assert not list(tmp_path.iterdir())
