"""Says what a cluster refused, and what to do about it.

Pure; called by every command that asks a cluster. "403 Forbidden" helps nobody who does not know which verb on which resource a
command needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.protocol.plain import shorten
from surefoot_operator.api.spec import GROUP
from surefoot_operator.cli.cli_errors import RunError
from surefoot_operator.errors import FabricError

_SAID = 300


@dataclass(frozen=True, slots=True)
class Right:
    """A verb on a resource that a command needs."""

    verb: str
    resource: str
    namespace: str = ""
    """Empty: in the whole cluster."""
    group: str = ""
    why: str = ""
    """What it is wanted for, in a few words."""

    def __str__(self) -> str:
        resource = f"{self.resource}.{self.group}" if self.group else self.resource
        where = f"in namespace {self.namespace}" if self.namespace else "in the whole cluster"
        return f"{self.verb} {resource} {where}"


class ClusterRefused(RunError):
    """A cluster refused a call, or did not answer."""


def jobs_right(verb: str, namespace: str, subresource: str = "") -> Right:
    resource = f"trainingjobs/{subresource}" if subresource else "trainingjobs"
    return Right(verb, resource, namespace, GROUP)


def refused(error: FabricError, needed: Right, server: str, missing: str = "") -> ClusterRefused:
    """Words an API error for a person.

    Args:
        error: `ApiRefused` or `ApiSilent`; of the former `code` tells what it was.
        needed: what the call was for.
        server: the API server's address.
        missing: what a 404 means here.
    """
    code = getattr(error, "code", None)
    said = shorten(str(error).removesuffix("; trying again later"), _SAID)  # a command tries once
    if code == 403:
        return ClusterRefused(f"you may not {needed} (403): {_who_gives(needed)}")
    if code == 401:
        return ClusterRefused(f"{server} does not accept your credentials (401): log in again, or give --context")
    if code == 404:
        return ClusterRefused(missing or f"{server} has no {needed.resource}: {said}")
    if code == 409:
        return ClusterRefused(f"somebody else changed the job meanwhile (409): give the command again; {said}")
    if code is None:
        return ClusterRefused(f"{said}. Is {server} running, and is it the cluster you mean? --context chooses another")
    return ClusterRefused(f"could not {needed}: {said}")


def without_crd(server: str) -> str:
    """The meaning of a 404 where TrainingJobs are listed."""
    return (
        f"{server} knows no TrainingJobs: the CRD trainingjobs.{GROUP} is not installed there, or this is another cluster;"
        " docs/install.md says how to install it"
    )


def _who_gives(needed: Right) -> str:
    if needed.group == GROUP:
        role = "view" if needed.verb in ("get", "list", "watch") else "edit"
        return f"whoever has Kubernetes' role {role} there may, where the chart was installed with rbac.aggregate"
    if needed.resource.startswith("pods") or needed.resource == "events":
        return "whoever has Kubernetes' role view there may"
    return f"ask an administrator for a ClusterRole with the verb {needed.verb} on {needed.resource}"
