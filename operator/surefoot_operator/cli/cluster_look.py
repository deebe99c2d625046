"""Reads what a doctor asks of a cluster: rights, CRD, operator, holders.

Touches the network through a person's own rights. Each question is asked apart: who may read a half of it learns that half.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from surefoot_operator.api.spec import GROUP, VERSION
from surefoot_operator.cli.cluster_access import OpenCluster
from surefoot_operator.cli.cluster_refusals import ClusterRefused, Right, jobs_right, refused
from surefoot_operator.cli.jobs.cluster_reads import listed_objects
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes import api_objects

Object = dict[str, Any]
T = TypeVar("T")

CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.{GROUP}"
SCHEMA = f"/openapi/v3/apis/{GROUP}/{VERSION}"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
OPERATOR_PART = f"{api_objects.PART}=operator"
COORDINATOR_PART = f"{api_objects.PART}=coordinator"
JOB_KIND = f"dev.surefoot.{VERSION}.TrainingJob"


@dataclass(frozen=True, slots=True)
class RightsAsked:
    """Rights for one purpose; `needed`: nothing works without them."""

    purpose: str
    rights: tuple[Right, ...]
    needed: bool
    without: str
    """What does not work without them."""


@dataclass(frozen=True, slots=True)
class ClusterLook:
    """What one look at a cluster has found.

    A str is why something is not known.
    """

    server: str
    namespace: str
    version: Object | str
    schema: Object | str | None
    """TrainingJob's properties; None: it is not installed."""
    operators: tuple[Object, ...] | str
    """Deployments."""
    tiers: tuple[Object, ...] | str
    """DaemonSets."""
    coordinators: tuple[Object, ...] | str
    """EndpointSlices of the Service by which agents find the operator that leads."""
    denied: dict[str, tuple[str, ...]] | str
    """Purpose -> rights that are lacking."""


def rights_asked(namespace: str) -> tuple[RightsAsked, ...]:
    """Lists what a person needs, by what they do."""
    jobs = tuple(jobs_right(verb, namespace) for verb in ("get", "list"))
    changes = tuple(jobs_right(verb, namespace) for verb in ("create", "patch", "delete"))
    pods = (Right("list", "pods", namespace), Right("get", "pods/log", namespace), Right("list", "events", namespace))
    around = (Right("list", "nodes"), Right("list", "pods"))
    return (
        RightsAsked("see jobs", jobs, True, "no command can look at a job"),
        RightsAsked("run jobs", changes, False, "kubectl apply, suspend, resume and delete are refused"),
        RightsAsked("see workers", pods, False, "describe has no workers and events, and logs nothing"),
        RightsAsked("see nodes", around, False, "nodes and explain know neither nodes nor holders"),
    )


async def look_at(cluster: OpenCluster) -> ClusterLook:
    """Asks everything at once. Raises ClusterRefused if the server is silent."""
    try:
        version: Object | str = await cluster.api.get("/version")
    except FabricError as error:
        if getattr(error, "code", None) is None:
            raise refused(error, Right("get", "version"), cluster.server) from error
        version = str(error)
    schema, operators, tiers, coordinators, denied = await asyncio.gather(
        _known(_schema(cluster)),
        _known(_listed(cluster, "deployments", OPERATOR_PART, "the operator")),
        _known(_listed(cluster, "daemonsets", api_objects.HOLDER_SELECTOR, "the memory tier")),
        _known(_coordinators(cluster)),
        _known(_denied(cluster)),
    )
    return ClusterLook(cluster.server, cluster.namespace, version, schema, operators, tiers, coordinators, denied)


async def _known(call: Awaitable[T]) -> T | str:
    try:
        return await call
    except ClusterRefused as error:
        return str(error)


async def _schema(cluster: OpenCluster) -> Object | None:
    """By the CRD; who may not read it by what the server publishes of it to everybody."""
    try:
        found = await cluster.api.get(CRD)
    except FabricError as error:
        if getattr(error, "code", None) == 404:
            return None
        return await _published_schema(cluster)
    served = [one for one in found.get("spec", {}).get("versions", ()) if one.get("name") == VERSION]
    schema: Object = served[0].get("schema", {}).get("openAPIV3Schema", {}) if served else {}
    return schema


async def _published_schema(cluster: OpenCluster) -> Object | None:
    try:
        found = await cluster.api.get(SCHEMA)
    except FabricError as error:
        if getattr(error, "code", None) == 404:
            return None
        needed = Right("get", "customresourcedefinitions", group="apiextensions.k8s.io")
        raise refused(error, needed, cluster.server) from error
    schema: Object = found.get("components", {}).get("schemas", {}).get(JOB_KIND, {})
    return schema


async def _listed(cluster: OpenCluster, kind: str, selector: str, why: str) -> tuple[Object, ...]:
    needed = Right("list", kind, group="apps", why=why)
    return tuple(await listed_objects(cluster, f"/apis/apps/v1/{kind}", needed, {"labelSelector": selector}))


async def _coordinators(cluster: OpenCluster) -> tuple[Object, ...]:
    needed = Right("list", "endpointslices", group="discovery.k8s.io", why="the operator that leads")
    return tuple(await listed_objects(cluster, SLICES, needed, {"labelSelector": COORDINATOR_PART}))


async def _denied(cluster: OpenCluster) -> dict[str, tuple[str, ...]]:
    asked = rights_asked(cluster.namespace)
    answers = await asyncio.gather(*(_may(cluster, right) for one in asked for right in one.rights))
    given = iter(answers)
    return {one.purpose: tuple(str(right) for right in one.rights if not next(given)) for one in asked}


async def _may(cluster: OpenCluster, right: Right) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "verb": right.verb,
        "group": right.group,
        "resource": resource,
        **({"subresource": subresource} if subresource else {}),
        **({"namespace": right.namespace} if right.namespace else {}),
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "metadata": {},
        "spec": {"resourceAttributes": attributes},
    }
    try:
        answer = await cluster.api.post(REVIEWS, body)
    except FabricError as error:
        needed = Right("create", "selfsubjectaccessreviews", group="authorization.k8s.io")
        raise refused(error, needed, cluster.server) from error
    return bool(answer.get("status", {}).get("allowed"))
