"""A certificate authority for a test, and what it signs. Keys live for minutes; nothing of it is secret."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Signed:
    """A certificate with its key, as text."""

    pem: str
    key_pem: str

    def files(self, folder: Path) -> tuple[Path, Path]:
        """Certificate and key in files, as servers want them."""
        paths = folder / "tls.crt", folder / "tls.key"
        for path, text in zip(paths, (self.pem, self.key_pem), strict=True):
            path.write_text(text)
        return paths

    def server(self, folder: Path) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.files(folder))
        return context


@dataclass(frozen=True)
class Authority:
    pem: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def sign(self, *names: str) -> Signed:
        """A server's certificate for these names or addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        others = x509.SubjectAlternativeName([_name(name) for name in names])
        builder = _builder(names[0], self.certificate.subject, key.public_key()).add_extension(others, critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return Signed(_pem(certificate), _key_pem(key))


def authority(name: str) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(name, subject, key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    return Authority(_pem(certificate), certificate, key)


def _builder(name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
    )


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    kind = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption()).decode()
