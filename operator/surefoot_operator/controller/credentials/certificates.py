"""Issues the coordinator's certificate and its authority, and decides when to renew.

Deciding and issuing do no I/O: the time is an argument, only keys are random. `CoordinatorTls` stores them in a Secret.
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

from surefoot.task_set import repeat
from surefoot_operator.controller.credentials.secrets import SecretRef, load_or_create_secret, replaced_secret
from surefoot_operator.controller.leader.election_rules import shard_url
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes.api_client import Api

log = logging.getLogger(__name__)


CA, CA_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
AUTHORITY_DAYS = 3650
"""Longer than any job: a worker knows the authority that was there when it began."""
CERTIFICATE_DAYS = 365
_SKEW = timedelta(hours=1)
"""Clocks of other nodes may be behind."""
_SUBJECT = "surefoot coordinator"

Content = Mapping[str, bytes]


def renewal_reason(content: Content, names: Iterable[str], now: float) -> str:
    """Says why the certificate must be renewed at `now` (Unix seconds); empty: valid."""
    try:
        certificate = x509.load_pem_x509_certificate(content[CERTIFICATE])
        authority = x509.load_pem_x509_certificate(content[CA])  # of several, the newest stands first
    except (KeyError, ValueError) as error:
        return f"it cannot be read ({error})"
    if _remaining_validity_ratio(certificate, now) < 1 / 3:
        return "less than a third of its validity is left"
    if _remaining_validity_ratio(authority, now) < 1 / 3:
        return "less than a third of its authority's validity is left"
    missing = sorted(set(names) - names_of(certificate))
    return f"it does not name {', '.join(missing)}" if missing else ""


def is_signed_by_us(content: Content) -> bool:
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


def issue_certificate(old: Content, names: Iterable[str], now: float) -> dict[str, bytes]:
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


def _remaining_validity_ratio(certificate: x509.Certificate, now: float) -> float:
    """The share of its life that is still to come."""
    begin, end = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    return (end - now) / (end - begin)


def _authority(chain: bytes, now: float) -> x509.Certificate | None:
    try:
        found = x509.load_pem_x509_certificate(chain)
    except ValueError:
        return None
    return found if _remaining_validity_ratio(found, now) >= 1 / 3 else None


def _living(chain: bytes, now: float) -> bytes:
    try:
        return b"".join(
            _pem(one) for one in x509.load_pem_x509_certificates(chain) if _remaining_validity_ratio(one, now) > 0
        )
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


# ---- coordinator tls -------------------------------------------------------------------------------------------------
# Keeps the coordinator's TLS certificate in a Secret shared by all replicas. Touches the API server; called by the
# composition root. A Secret from elsewhere (cert-manager, say) is used as it is; our own is created, and renewed in
# time.

POLL_SECONDS = 600.0
"""How often the Secret is looked at: renewal is due months ahead, somebody else's rotation within the hour."""
_TYPE = "kubernetes.io/tls"


def server_names(url: str, namespace: str, shards: int = 1) -> tuple[str, ...]:
    """Lists every name by which agents or people call the coordinator."""
    service = f"surefoot-coordinator.{namespace}.svc"
    names: list[str] = []
    for shard in range(shards):
        host = urlsplit(shard_url(url, shard)).hostname or ""
        names += [host, f"{host}.cluster.local"] if host.endswith(".svc") else [host]
    return tuple(dict.fromkeys((*names, service, f"{service}.cluster.local")))


class CoordinatorTls:
    """The server's TLS context; a renewed certificate serves the next connection.

    `begin` it, then `follow` until cancelled.
    """

    def __init__(self, api: Api, where: SecretRef, names: Sequence[str]) -> None:
        self._api, self._where, self._names = api, where, names
        self._content: Content = {}
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3

    @property
    def authority(self) -> str:
        """The CA in PEM for agents; empty: their machine's trust store."""
        return self._content.get(CA, b"").decode("ascii", "replace")

    async def start(self) -> None:
        """Loads or creates the certificate. Raises FabricError if neither is possible."""
        self._use(await self._current())

    async def keep_current(self) -> None:
        """Reloads and renews the certificate until cancelled.

        A failure is logged and retried; the former certificate is served meanwhile.
        """
        await repeat(self._reload, POLL_SECONDS)

    async def _reload(self) -> float:
        try:
            content = await self._current()
            if content != self._content:
                self._use(content)
                log.info("the coordinator's certificate was renewed; new connections use it")
        except PlatformError as error:
            log.warning("cannot read the coordinator's certificate: %s", error)
        return POLL_SECONDS

    async def _current(self) -> Content:
        """Reads the Secret, and creates or renews it if we hold its authority."""
        now = time.time()
        found = await load_or_create_secret(
            self._api, self._where, lambda: issue_certificate({}, self._names, now), kind=_TYPE
        )
        why = renewal_reason(found, self._names, now)
        if why and is_signed_by_us(found):
            log.info("renewing the certificate in secret %s: %s", self._where, why)
            return await replaced_secret(
                self._api,
                self._where,
                lambda old: issue_certificate(old, self._names, now) if renewal_reason(old, self._names, now) else None,
            )
        if why:
            log.warning("the certificate in secret %s must be renewed by its issuer: %s", self._where, why)
        return found

    def _use(self, content: Content) -> None:
        try:
            # first into one that nobody uses: half of a bad pair must not replace what is shown
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), content[CERTIFICATE], content[KEY])
            _load(self.context, content[CERTIFICATE], content[KEY])
        except (KeyError, ssl.SSLError) as error:
            raise PlatformError(
                f"secret {self._where} has no usable {CERTIFICATE} and {KEY} ({error}); delete it, and one is created"
            ) from error
        self._content = content


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """The ssl module reads files only: this one lies in memory and is nobody else's."""
    descriptor = os.memfd_create("coordinator", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
