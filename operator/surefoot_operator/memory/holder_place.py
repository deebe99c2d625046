"""Defines where a holder is reached and with which credentials."""

from __future__ import annotations

from dataclasses import dataclass, field

from surefoot.protocol.identities import ServerId

ServerProcess = tuple[ServerId, str, int, str, bool]
"""Names one run of one server, at one address."""


@dataclass(slots=True)
class TierAccess:
    """The operator's current credentials for every holder.

    Its owner updates it when a Secret changes; every observation reads it.
    """

    user: str = "default"
    password: str = field(default="", repr=False)
    authority: str = field(default="", repr=False)
    """PEM, by which holders that speak TLS are verified."""


@dataclass(frozen=True, slots=True)
class HolderPlace:
    """One holder's address and credentials; its instance is asked for there.

    `process` names one run of the server as the fabric knows it (pid and start time, container id): another value means
    that what was held there before is lost. `running` False means known to be dead; a frozen or unreachable one stays
    True. A place that a fabric leaves out is unknown (silent), not gone. One a server
    of a node.
    """

    node: str
    domain: str
    host: str
    port: int
    process: str
    running: bool = True
    admin_user: str = "default"
    admin_password: str = field(default="", repr=False)
    tls_ca: str | None = field(default=None, repr=False)
    """PEM of the authority of a server that speaks TLS; None: it does not."""
    settling: bool = False
    """Its pod is not Ready: a companion may be about to touch its memory, before any job uses it."""
    server: int = 0
    """Which of its node's servers it is."""
    servers: int = 1
    """That its node runs, whether or not they do at present."""

    @property
    def server_id(self) -> ServerId:
        """Where an instance follows another."""
        return ServerId(self.node, self.server)

    def same_access(self, other: HolderPlace) -> bool:
        """Whether both have the same password and authority."""
        mine = (self.admin_user, self.admin_password, self.tls_ca)
        return mine == (other.admin_user, other.admin_password, other.tls_ca)

    @property
    def server_process(self) -> ServerProcess:
        """One run of the server, which may still have its data."""
        return self.server_id, self.host, self.port, self.process, self.running

    def same_server(self, other: HolderPlace) -> bool:
        """Whether both are the same process, which may still have its data."""
        return self.server_process == other.server_process
