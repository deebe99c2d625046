"""Issues the coordinator's certificate and its authority, and decides when to renew.

No I/O: the time is an argument, only keys are random. Called by `coordinator_tls`, which stores them in a Secret.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA, CA_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
AUTHORITY_DAYS = 3650
"""Longer than any job: a worker knows the authority that was there when it began."""
CERTIFICATE_DAYS = 365
_SKEW = timedelta(hours=1)
"""Clocks of other nodes may be behind."""
_SUBJECT = "surefoot coordinator"

Content = Mapping[str, bytes]


def why_anew(content: Content, names: Iterable[str], now: float) -> str:
    """Says why the certificate must be renewed at `now` (Unix seconds); empty: valid."""
    try:
        certificate = x509.load_pem_x509_certificate(content[CERTIFICATE])
        authority = x509.load_pem_x509_certificate(content[CA])  # of several, the newest stands first
    except (KeyError, ValueError) as error:
        return f"it cannot be read ({error})"
    if _left(certificate, now) < 1 / 3:
        return "less than a third of its validity is left"
    if _left(authority, now) < 1 / 3:
        return "less than a third of its authority's validity is left"
    missing = sorted(set(names) - names_of(certificate))
    return f"it does not name {', '.join(missing)}" if missing else ""


def is_ours(content: Content) -> bool:
    """Whether we hold the authority's key; others' certificates are never renewed."""
    return CA_KEY in content


def names_of(certificate: x509.Certificate) -> frozenset[str]:
    """The DNS names and addresses that a certificate is valid for."""
    try:
        said = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    addresses = map(str, said.get_values_for_type(x509.IPAddress))
    return frozenset((*said.get_values_for_type(x509.DNSName), *addresses))


def made(old: Content, names: Iterable[str], now: float) -> dict[str, bytes]:
    """Issues a certificate for `names` by the authority of `old`.

    A missing or old authority is replaced. Workers that trust only the former one could not reconnect once the new one
    signs; so both are distributed to workers until the former expires.
    """
    at = datetime.fromtimestamp(now, UTC)
    chain, key = old.get(CA, b""), old.get(CA_KEY)
    authority = _authority(chain, now) if key is not None else None
    if authority is None or key is None:
        authority_key = ec.generate_private_key(ec.SECP256R1())
        authority = _signed_authority(authority_key, at)
        chain = _pem(authority) + _living(chain, now)
        key = _private_pem(authority_key)
    signer = serialization.load_pem_private_key(key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    own_key = ec.generate_private_key(ec.SECP256R1())
    certificate = _signed(own_key.public_key(), list(names), at, authority, signer)
    return {CA: chain, CA_KEY: key, CERTIFICATE: _pem(certificate), KEY: _private_pem(own_key)}


def _left(certificate: x509.Certificate, now: float) -> float:
    """The share of its life that is still to come."""
    begin, end = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    return (end - now) / (end - begin)


def _authority(chain: bytes, now: float) -> x509.Certificate | None:
    try:
        found = x509.load_pem_x509_certificate(chain)
    except ValueError:
        return None
    return found if _left(found, now) >= 1 / 3 else None


def _living(chain: bytes, now: float) -> bytes:
    try:
        return b"".join(_pem(one) for one in x509.load_pem_x509_certificates(chain) if _left(one, now) > 0)
    except ValueError:
        return b""


def _builder(at: datetime, days: int, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - _SKEW)
        .not_valid_after(at + timedelta(days=days))
        .public_key(public)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _signed_authority(key: ec.EllipticCurvePrivateKey, at: datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{_SUBJECT} authority {at:%Y-%m-%d}")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(at, AUTHORITY_DAYS, key.public_key()).subject_name(name).issuer_name(name)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())


def _signed(
    public: ec.EllipticCurvePublicKey,
    names: list[str],
    at: datetime,
    authority: x509.Certificate,
    signer: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    known_as = x509.SubjectAlternativeName([_general(name) for name in names])
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    builder = _builder(at, CERTIFICATE_DAYS, public).issuer_name(authority.subject)
    builder = builder.subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _SUBJECT)]))
    builder = builder.add_extension(known_as, critical=False).add_extension(issued_by, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
