"""Keeps the coordinator's TLS certificate in a Secret shared by all replicas.

Touches the API server; called by the composition root. A Secret from elsewhere (cert-manager, say) is used as it is;
our own is created, and renewed in time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from surefoot_operator.controller.credentials import certificates
from surefoot_operator.controller.credentials.certificates import CA, CERTIFICATE, KEY
from surefoot_operator.controller.credentials.secrets import Content, SecretAt, kept_secret, replaced_secret
from surefoot_operator.controller.leader.shards import shard_url
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes.api_client import Api

log = logging.getLogger(__name__)

LOOK_SECONDS = 600.0
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

    def __init__(self, api: Api, where: SecretAt, names: Sequence[str]) -> None:
        self._api, self._where, self._names = api, where, names
        self._content: Content = {}
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3

    @property
    def authority(self) -> str:
        """The CA in PEM for agents; empty: their machine's trust store."""
        return self._content.get(CA, b"").decode("ascii", "replace")

    async def begin(self) -> None:
        """Loads or creates the certificate. Raises FabricError if neither is possible."""
        self._use(await self._current())

    async def follow(self) -> None:
        """Reloads and renews the certificate until cancelled.

        A failure is logged and retried; the former certificate is served meanwhile.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS * random.uniform(0.75, 1.0))
            try:
                content = await self._current()
                if content != self._content:
                    self._use(content)
                    log.info("the coordinator's certificate was renewed; new connections use it")
            except FabricError as error:
                log.warning("cannot read the coordinator's certificate: %s", error)

    async def _current(self) -> Content:
        """Reads the Secret, and creates or renews it if we hold its authority."""
        now = time.time()
        found = await kept_secret(self._api, self._where, lambda: certificates.made({}, self._names, now), kind=_TYPE)
        why = certificates.why_anew(found, self._names, now)
        if why and certificates.is_ours(found):
            log.info("renewing the certificate in secret %s: %s", self._where, why)
            return await replaced_secret(
                self._api,
                self._where,
                lambda old: (
                    certificates.made(old, self._names, now) if certificates.why_anew(old, self._names, now) else None
                ),
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
            raise FabricError(
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
