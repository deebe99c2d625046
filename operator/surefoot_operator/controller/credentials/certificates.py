"""Issues the coordinator's certificate and the CA that signs it, and decides when to renew them.

Decisions and issuing do no I/O: the time is an argument, and only keys are random. `CoordinatorTls` stores the
certificate in a Secret.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from surefoot.task_set import repeat_until_cancelled
from surefoot_operator.controller.credentials.secrets import SecretRef, load_or_create_secret, replace_secret
from surefoot_operator.controller.leader.election_rules import shard_url
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes.api_client import Api

log = logging.getLogger(__name__)


CA, CA_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
AUTHORITY_DAYS = 3650
"""Longer than any job: a worker trusts the CA that existed when it started."""
CERTIFICATE_DAYS = 365
_SKEW = timedelta(hours=1)
"""Certificates are valid from this long ago, because clocks of other nodes may be slow."""
_SUBJECT = "surefoot coordinator"

Content = Mapping[str, bytes]
"""Content of a Secret by key."""


def renewal_reason(content: Content, names: Iterable[str], now: float) -> str:
    """Returns why the certificate must be renewed at `now` (Unix seconds); empty: it is valid for all of `names`."""
    try:
        certificate = x509.load_pem_x509_certificate(content[CERTIFICATE])
        authority = x509.load_pem_x509_certificate(content[CA])  # the first one of a bundle is the newest
    except (KeyError, ValueError) as error:
        return f"it cannot be read: {error}"
    if _remaining_validity_ratio(certificate, now) < 1 / 3:
        return "less than a third of its validity is left"
    if _remaining_validity_ratio(authority, now) < 1 / 3:
        return "less than a third of its authority's validity is left"
    missing = sorted(set(names) - names_of(certificate))
    return f"it is not valid for {', '.join(missing)}" if missing else ""


def has_authority_key(content: Content) -> bool:
    """Returns whether the Secret has the CA's key; a certificate of another issuer is never renewed here."""
    return CA_KEY in content


def names_of(certificate: x509.Certificate) -> frozenset[str]:
    """Returns the DNS names and addresses that a certificate is valid for."""
    try:
        alternative_names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    addresses = map(str, alternative_names.get_values_for_type(x509.IPAddress))
    return frozenset((*alternative_names.get_values_for_type(x509.DNSName), *addresses))


def issue_certificate(old: Content, names: Iterable[str], now: float) -> dict[str, bytes]:
    """Issues a certificate for `names`, signed by the CA of `old`; a missing or old CA is replaced.

    A worker that trusts only the former CA could not reconnect once the new one signs. So workers get both until the
    former expires.

    Args:
        old: Current content of the Secret; empty: there is none.
        names: DNS names and addresses of the server.
        now: Unix seconds.

    Returns:
        The new content of the Secret.
    """
    issued_time = datetime.fromtimestamp(now, UTC)
    chain, key = old.get(CA, b""), old.get(CA_KEY)
    authority = _usable_authority(chain, now) if key is not None else None
    if authority is None or key is None:
        authority_key = ec.generate_private_key(ec.SECP256R1())
        authority = _issue_authority(authority_key, issued_time)
        chain = _certificate_pem(authority) + _unexpired_chain(chain, now)
        key = _private_key_pem(authority_key)
    signer = serialization.load_pem_private_key(key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    server_key = ec.generate_private_key(ec.SECP256R1())
    certificate = _sign_server_certificate(server_key.public_key(), list(names), issued_time, authority, signer)
    return {CA: chain, CA_KEY: key, CERTIFICATE: _certificate_pem(certificate), KEY: _private_key_pem(server_key)}


def _remaining_validity_ratio(certificate: x509.Certificate, now: float) -> float:
    """Returns the share of its lifetime that the certificate has left; negative once it has expired."""
    start_seconds, end_seconds = (
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )
    return (end_seconds - now) / (end_seconds - start_seconds)


def _usable_authority(chain: bytes, now: float) -> x509.Certificate | None:
    try:
        authority = x509.load_pem_x509_certificate(chain)
    except ValueError:
        return None
    return authority if _remaining_validity_ratio(authority, now) >= 1 / 3 else None


def _unexpired_chain(chain: bytes, now: float) -> bytes:
    try:
        return b"".join(
            _certificate_pem(certificate)
            for certificate in x509.load_pem_x509_certificates(chain)
            if _remaining_validity_ratio(certificate, now) > 0
        )
    except ValueError:
        return b""


def _certificate_builder(
    issued_time: datetime, days: int, public: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(issued_time - _SKEW)
        .not_valid_after(issued_time + timedelta(days=days))
        .public_key(public)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _issue_authority(key: ec.EllipticCurvePrivateKey, issued_time: datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{_SUBJECT} authority {issued_time:%Y-%m-%d}")])
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
    builder = _certificate_builder(issued_time, AUTHORITY_DAYS, key.public_key()).subject_name(name).issuer_name(name)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())


def _sign_server_certificate(
    public: ec.EllipticCurvePublicKey,
    names: list[str],
    issued_time: datetime,
    authority: x509.Certificate,
    signer: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    alternative_names = x509.SubjectAlternativeName([_general_name(name) for name in names])
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    authority_identifier = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    builder = _certificate_builder(issued_time, CERTIFICATE_DAYS, public).issuer_name(authority.subject)
    builder = builder.subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _SUBJECT)]))
    builder = builder.add_extension(alternative_names, critical=False).add_extension(
        authority_identifier, critical=False
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


# ---- coordinator TLS -------------------------------------------------------------------------------------------------
# Keeps the coordinator's TLS certificate in a Secret that all replicas share. Touches the API server; called by the
# composition root. A Secret of another issuer (cert-manager, for example) is used as it is. Our own is created, and
# renewed in time.

CERTIFICATE_POLL_SECONDS = 600.0
"""Interval for reading the Secret: our renewal is due months ahead, and another issuer's is used within minutes."""
_TYPE = "kubernetes.io/tls"


def server_names(url: str, namespace: str, shards: int = 1) -> tuple[str, ...]:
    """Returns all DNS names by which agents or users call the coordinator, those of every shard included."""
    service = f"surefoot-coordinator.{namespace}.svc"
    names: list[str] = []
    for shard in range(shards):
        host = urlsplit(shard_url(url, shard)).hostname or ""
        names += [host, f"{host}.cluster.local"] if host.endswith(".svc") else [host]
    return tuple(dict.fromkeys((*names, service, f"{service}.cluster.local")))


class CoordinatorTls:
    """Keeps the server's TLS context current; a renewed certificate serves new connections.

    Call `start`, then run `keep_current` until cancelled.

    Args:
        api: The API server.
        where: The Secret.
        names: DNS names and addresses that the certificate must be valid for.
    """

    def __init__(self, api: Api, where: SecretRef, names: Sequence[str]) -> None:
        self._api, self._where, self._names = api, where, names
        self._content: Content = {}
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3

    @property
    def authority(self) -> str:
        """The CA certificate in PEM for agents; empty: they use the trust store of their machine."""
        return self._content.get(CA, b"").decode("ascii", "replace")

    async def start(self) -> None:
        """Loads or creates the certificate. Raises PlatformError if neither is possible."""
        self._use_certificate(await self._read_or_renew())

    async def keep_current(self) -> None:
        """Reloads and renews the certificate until cancelled.

        A failure is logged and retried; the former certificate stays in use.
        """
        await repeat_until_cancelled(self._reload_once, CERTIFICATE_POLL_SECONDS)

    async def _reload_once(self) -> float:
        try:
            content = await self._read_or_renew()
            if content != self._content:
                self._use_certificate(content)
                log.info("secret %s has a new certificate; new connections use it", self._where)
        except PlatformError as error:
            log.warning("cannot read or renew the certificate in secret %s, keeping it: %s", self._where, error)
        return CERTIFICATE_POLL_SECONDS

    async def _read_or_renew(self) -> Content:
        """Reads the Secret, and creates or renews it if it has our CA's key."""
        now = time.time()
        content = await load_or_create_secret(
            self._api, self._where, lambda: issue_certificate({}, self._names, now), kind=_TYPE
        )
        reason = renewal_reason(content, self._names, now)
        if reason and has_authority_key(content):
            log.info("renewing the certificate in secret %s: %s", self._where, reason)
            return await replace_secret(
                self._api,
                self._where,
                lambda old: issue_certificate(old, self._names, now) if renewal_reason(old, self._names, now) else None,
            )
        if reason:
            log.warning("the certificate in secret %s must be renewed by its issuer: %s", self._where, reason)
        return content

    def _use_certificate(self, content: Content) -> None:
        try:
            # Try the pair in an unused context first: half of a bad pair must not replace the certificate in use.
            _load_key_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), content[CERTIFICATE], content[KEY])
            _load_key_pair(self.context, content[CERTIFICATE], content[KEY])
        except (KeyError, ssl.SSLError) as error:
            raise PlatformError(
                f"secret {self._where} has no usable {CERTIFICATE} and {KEY} ({error}); delete it, and it is created again"
            ) from error
        self._content = content


def _load_key_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Loads a key pair from an anonymous file in memory, because the ssl module reads only files."""
    descriptor = os.memfd_create("coordinator", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
