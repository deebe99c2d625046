"""Defines where a holder is reached and with which credentials."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    True. A place that a fabric leaves out is unknown (silent), not gone. One a node.
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

    def same_access(self, other: HolderPlace) -> bool:
        """Whether both have the same password and authority."""
        mine = (self.admin_user, self.admin_password, self.tls_ca)
        return mine == (other.admin_user, other.admin_password, other.tls_ca)

    def same_server(self, other: HolderPlace) -> bool:
        """Whether both are the same process, which may still have its data."""
        mine = (self.node, self.host, self.port, self.process, self.running)
        return mine == (other.node, other.host, other.port, other.process, other.running)
