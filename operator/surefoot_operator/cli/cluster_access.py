"""Connects a command to the cluster of a kubeconfig or of the pod it runs in.

Reads files and uses the network. The Kubernetes client is imported only here, and only when a command needs a cluster,
so that `surefoot local` works without it.
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
from surefoot_operator.errors import PlatformError
from surefoot_operator.optional_dependencies import require_extra

if TYPE_CHECKING:
    from surefoot_operator.platforms.kubernetes.api_client import Api


_POD_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_SERVICE_HOST_VARIABLE = "KUBERNETES_SERVICE_HOST"


class ClusterNotConfigured(UsageError):
    """No cluster is configured, or its kubeconfig cannot be read."""


@dataclass(frozen=True, slots=True)
class ClusterConnection:
    """The API of a cluster, with the user's credentials, and the namespace to use."""

    api: Api
    namespace: str
    """Namespace of the command; empty for all namespaces."""
    server: str
    """URL of the API server, for messages."""


def add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", metavar="NAME", help="the job's namespace (default: the context's)")
    parser.add_argument("--context", metavar="NAME", help="a context of the kubeconfig (default: its current one)")
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="default: $KUBECONFIG, else ~/.kube/config")


@asynccontextmanager
async def open_cluster(args: argparse.Namespace) -> AsyncIterator[ClusterConnection]:
    """Connects to the cluster that the arguments choose, while the context lasts. Raises ClusterNotConfigured."""
    with require_extra("surefoot", "cli"):
        from kubernetes.aio.client import ApiClient

        from surefoot_operator.platforms.kubernetes.api_client import Api
    configuration, namespace = await _load_configuration(args)
    api = Api(ApiClient(configuration))
    try:
        all_namespaces = bool(getattr(args, "all_namespaces", False))
        chosen_namespace = "" if all_namespaces else args.namespace or namespace or "default"
        yield ClusterConnection(api, chosen_namespace, str(configuration.host))
    finally:
        await api.close()


async def _load_configuration(args: argparse.Namespace) -> tuple[Any, str]:
    """Returns the client's configuration and the namespace it names, or an empty one.

    A kubeconfig takes precedence; a command in a pod without one uses the pod's service account.
    """
    from kubernetes.aio import config
    from kubernetes.aio.client import Configuration

    configuration, load = Configuration(), cast(Any, config)  # none of the loaders has types
    file = None if args.kubeconfig is None else str(args.kubeconfig)
    source = file or os.environ.get("KUBECONFIG") or "~/.kube/config"
    has_file = bool(file or os.environ.get("KUBECONFIG")) or (Path.home() / ".kube" / "config").exists()
    if not has_file and os.environ.get(_SERVICE_HOST_VARIABLE):
        load.load_incluster_config(client_configuration=configuration)
        return configuration, _pod_namespace()
    try:
        if not has_file:
            raise OSError("it is not there")
        await load.load_kube_config(
            config_file=file, context=args.context, client_configuration=configuration, persist_config=False
        )
        contexts, current_context = load.list_kube_config_contexts(file)
    except (config.ConfigException, OSError, ValueError, TypeError, KeyError) as error:
        message = f"no cluster is configured by {source}: {error}; give --kubeconfig or --context"
        raise ClusterNotConfigured(message) from error
    chosen_context = next((context for context in contexts if context.get("name") == args.context), current_context)
    return configuration, str((chosen_context.get("context") or {}).get("namespace") or "")


def _pod_namespace() -> str:
    return _POD_NAMESPACE_FILE.read_text(encoding="utf-8").strip() if _POD_NAMESPACE_FILE.exists() else ""


# ---- cluster refusals ------------------------------------------------------------------------------------------------
# Describes rejected requests and their remedy, for all commands that use a cluster. Pure. "403 Forbidden" does not help
# a user who does not know which verb on which resource the command needs.

_MAX_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Permission:
    """A verb on a resource that a command needs."""

    verb: str
    resource: str
    namespace: str = ""
    """Namespace of the resource; empty: in the whole cluster."""
    group: str = ""
    """API group of the resource; empty: core."""

    def __str__(self) -> str:
        resource = f"{self.resource}.{self.group}" if self.group else self.resource
        where = f"in namespace {self.namespace}" if self.namespace else "in the whole cluster"
        return f"{self.verb} {resource} {where}"


class ClusterRequestFailed(RunError):
    """A cluster rejected a request, or did not answer."""


def jobs_right(verb: str, namespace: str, subresource: str = "") -> Permission:
    """Returns the permission for a verb on TrainingJobs, or on one of their subresources."""
    resource = f"trainingjobs/{subresource}" if subresource else "trainingjobs"
    return Permission(verb, resource, namespace, GROUP)


def describe_api_error(
    error: PlatformError, needed: Permission, server: str, missing: str = ""
) -> ClusterRequestFailed:
    """Turns an API error into a message with the remedy.

    Args:
        needed: Permission that the request needed.
        server: URL of the API server.
        missing: Message for a 404; empty: a general one.
    """
    code = getattr(error, "code", None)
    error_text = shorten(
        str(error).removesuffix("; trying again later"), _MAX_MESSAGE_CHARACTERS
    )  # a command does not retry
    if code == 403:
        return ClusterRequestFailed(f"you may not {needed} (403): {_permission_remedy(needed)}")
    if code == 401:
        return ClusterRequestFailed(f"{server} does not accept your credentials (401): log in again, or give --context")
    if code == 404:
        return ClusterRequestFailed(missing or f"{server} has no {needed.resource}: {error_text}")
    if code == 409:
        return ClusterRequestFailed(
            f"another client changed the job at the same time (409): run the command again; {error_text}"
        )
    if code is None:
        return ClusterRequestFailed(
            f"{error_text}. Is {server} running, and is it the cluster you mean? --context chooses another"
        )
    return ClusterRequestFailed(f"could not {needed}: {error_text}")


def _permission_remedy(needed: Permission) -> str:
    if needed.group == GROUP:
        role = "view" if needed.verb in ("get", "list", "watch") else "edit"
        return f"users with Kubernetes' role {role} there may, if the chart was installed with rbac.aggregate"
    if needed.resource.startswith("pods") or needed.resource == "events":
        return "users with Kubernetes' role view there may"
    return f"ask an administrator for a ClusterRole with the verb {needed.verb} on {needed.resource}"
