"""Opens a kubeconfig's cluster for one command.

Touches files and the network. The Kubernetes client is imported here alone, when a command asks a cluster: `surefoot local` needs none.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from surefoot.protocol.text import shorten
from surefoot_operator.api.spec import GROUP
from surefoot_operator.cli.command_base import RunError, UsageError
from surefoot_operator.errors import FabricError
from surefoot_operator.optional_dependencies import needing

if TYPE_CHECKING:
    from surefoot_operator.platforms.kubernetes.api_client import Api


_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_IN_A_POD = "KUBERNETES_SERVICE_HOST"


class NoCluster(UsageError):
    """No cluster is configured, or not readably."""


@dataclass(frozen=True, slots=True)
class OpenCluster:
    """A cluster's API under a person's rights, and the namespace meant."""

    api: Api
    namespace: str
    """Empty: all."""
    server: str


def add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", metavar="NAME", help="the job's namespace (default: the context's)")
    parser.add_argument("--context", metavar="NAME", help="a context of the kubeconfig (default: its current one)")
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="default: $KUBECONFIG, else ~/.kube/config")


@asynccontextmanager
async def opened(args: argparse.Namespace) -> AsyncIterator[OpenCluster]:
    """Connects to the cluster that was chosen, for the length of a command. Raises NoCluster."""
    with needing("surefoot", "cli"):
        from kubernetes.aio.client import ApiClient

        from surefoot_operator.platforms.kubernetes.api_client import Api
    configuration, namespace = await _configuration(args)
    api = Api(ApiClient(configuration))
    try:
        everywhere = bool(getattr(args, "all_namespaces", False))
        namespace_shown = "" if everywhere else args.namespace or namespace or "default"
        yield OpenCluster(api, namespace_shown, str(configuration.host))
    finally:
        await api.close()


async def _configuration(args: argparse.Namespace) -> tuple[Any, str]:
    """The client's configuration, and the namespace that it names."""
    from kubernetes.aio import config
    from kubernetes.aio.client import Configuration

    configuration, load = Configuration(), cast(Any, config)  # none of the loaders has types
    file = None if args.kubeconfig is None else str(args.kubeconfig)
    where = file or os.environ.get("KUBECONFIG") or "~/.kube/config"
    has_file = bool(file or os.environ.get("KUBECONFIG")) or (Path.home() / ".kube" / "config").exists()
    if not has_file and os.environ.get(_IN_A_POD):
        load.load_incluster_config(client_configuration=configuration)
        return configuration, _namespace_of_the_pod()
    try:
        if not has_file:
            raise OSError("it is not there")
        await load.load_kube_config(
            config_file=file, context=args.context, client_configuration=configuration, persist_config=False
        )
        contexts, current = load.list_kube_config_contexts(file)
    except (config.ConfigException, OSError, ValueError, TypeError, KeyError) as error:
        message = f"no cluster is configured by {where}: {error}; give --kubeconfig or --context"
        raise NoCluster(message) from error
    chosen = next((one for one in contexts if one.get("name") == args.context), current)
    return configuration, str((chosen.get("context") or {}).get("namespace") or "")


def _namespace_of_the_pod() -> str:
    return _POD_NAMESPACE.read_text(encoding="utf-8").strip() if _POD_NAMESPACE.exists() else ""


# ---- cluster refusals ------------------------------------------------------------------------------------------------
# Says what a cluster refused, and what to do about it. Pure; called by every command that asks a cluster. "403
# Forbidden" helps nobody who does not know which verb on which resource a command needs.

_SAID = 300


@dataclass(frozen=True, slots=True)
class Right:
    """A verb on a resource that a command needs."""

    verb: str
    resource: str
    namespace: str = ""
    """Empty: in the whole cluster."""
    group: str = ""

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
    """Words an API error for a person: what the call needed, and what a 404 (`missing`) means here."""
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


def _who_gives(needed: Right) -> str:
    if needed.group == GROUP:
        role = "view" if needed.verb in ("get", "list", "watch") else "edit"
        return f"whoever has Kubernetes' role {role} there may, where the chart was installed with rbac.aggregate"
    if needed.resource.startswith("pods") or needed.resource == "events":
        return "whoever has Kubernetes' role view there may"
    return f"ask an administrator for a ClusterRole with the verb {needed.verb} on {needed.resource}"
