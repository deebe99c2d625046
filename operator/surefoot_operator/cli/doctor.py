"""Implements `surefoot doctor`: whether everything is there that a job needs.

Called by `main`. Looks and changes nothing, but for one object in a persistent tier that is named, which it deletes again, and with
--network a short program in workers.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from surefoot import __version__
from surefoot.errors import ConfigurationError
from surefoot.memory_server.server_process import find_program
from surefoot.protocol.text import amount, listed
from surefoot_operator.api.fields import declared_fields
from surefoot_operator.api.spec import GROUP, VERSION, PersistentTierSpec, TrainingJob, TrainingJobSpec
from surefoot_operator.cli.checkpoints import run_tool, tier_at
from surefoot_operator.cli.cluster_access import ClusterRefused, OpenCluster, Right, add_cluster, jobs_right, refused
from surefoot_operator.cli.command_base import EXIT_FAILED, EXIT_OK, UsageError
from surefoot_operator.cli.doctor_network import (
    NOT_ASKED,
    Finding,
    State,
    finding_lines,
    has_fault,
    look_at_network,
    network_findings,
)
from surefoot_operator.cli.job_files import read_job
from surefoot_operator.cli.jobs.read_jobs import listed_objects, on_cluster
from surefoot_operator.cli.tables import add_output, emit
from surefoot_operator.errors import FabricError
from surefoot_operator.optional_dependencies import lacking
from surefoot_operator.platforms.kubernetes import api_objects

# ---- what the cluster answers ----------------------------------------------------------------------------------------
# Reads what a doctor asks of a cluster: rights, CRD, operator, holders. Touches the network through a person's own
# rights. Each question is asked apart: who may read a half of it learns that half.

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
        RightsAsked("see nodes", around, False, "nodes knows neither nodes nor holders"),
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
        _known(_read_schema(cluster)),
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


async def _read_schema(cluster: OpenCluster) -> Object | None:
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


# ---- judgement of the cluster ----------------------------------------------------------------------------------------
# Judges a look at a cluster. Pure. Faults are what keeps every job from running; what keeps only some command from
# working is a warning.

_OLDEST = (1, 30)
_VERSION_LABEL = "app.kubernetes.io/version"
_INSTALL = "docs/install.md says how to install it"


def cluster_findings(look: ClusterLook, version: str) -> list[Finding]:
    """Judges everything that was read; `version` is this program's."""
    return [
        _server(look),
        *_rights(look),
        _check_schema(look.schema),
        _operator(look.operators, version),
        _leader(look.coordinators, look.operators),
        _memory_tier(look.tiers),
    ]


def no_cluster(why: str, remedy: str = "", state: State = "unknown") -> Finding:
    """Says what cannot be known without an answer of a cluster."""
    return Finding("cluster", state, f"{why}; rights, CRD, operator and memory tier cannot be known", remedy)


def _server(look: ClusterLook) -> Finding:
    if isinstance(look.version, str):
        return Finding("cluster", "unknown", f"{look.server} does not say its version: {look.version}")
    found = tuple(
        int(match[0]) if (match := re.match(r"\d+", str(look.version.get(part, "")))) else 0
        for part in ("major", "minor")
    )
    said = f"{look.server}: Kubernetes {look.version.get('gitVersion', 'of unknown version')}"
    if found == (0, 0) or found >= _OLDEST:
        return Finding("cluster", "ok", said)
    return Finding("cluster", "fault", said, f"upgrade it: the chart needs {'.'.join(map(str, _OLDEST))} or newer")


def _rights(look: ClusterLook) -> list[Finding]:
    where = f"in namespace {look.namespace}" if look.namespace else "in all namespaces"
    if isinstance(look.denied, str):
        return [Finding("rights", "unknown", f"the server does not say what you may do: {look.denied}")]
    found = []
    for one in rights_asked(look.namespace):
        lacking = look.denied.get(one.purpose, ())
        if not lacking:
            found.append(Finding(one.purpose, "ok", f"you may, {where}" if one.rights[0].namespace else "you may"))
            continue
        said = f"you may not {listed(lacking)}: {one.without}"
        ours = any(right.group == GROUP for right in one.rights)
        role = "view" if one.needed else "edit"
        remedy = (
            f"have somebody bind Kubernetes' ClusterRole {role} to you there; the chart's rbac.aggregate adds TrainingJobs to it"
            if ours
            else "have somebody bind the ClusterRole view to you there"
            if one.rights[0].namespace
            else "ask an administrator for a ClusterRole that may list nodes and pods, or do without"
        )
        found.append(Finding(one.purpose, "fault" if one.needed else "warning", said, remedy))
    return found


def _check_schema(schema: Object | str | None) -> Finding:
    if isinstance(schema, str):
        return Finding("CRD", "unknown", schema)
    if schema is None:
        return Finding("CRD", "fault", f"trainingjobs.{GROUP} is not installed", _INSTALL)
    missing = missing_fields(schema)
    if not missing:
        return Finding("CRD", "ok", f"trainingjobs.{GROUP} has every field that this surefoot knows")
    said = f"trainingjobs.{GROUP} is older than this surefoot: it lacks {listed(missing)}"
    return Finding("CRD", "warning", said, "kubectl apply --server-side -f manifests/crd.yaml, or upgrade the chart")


def missing_fields(schema: Object) -> list[str]:
    """Names fields of this version that a schema lacks."""
    known = _properties(schema, "spec")
    missing = [f"spec.{name}" for name in declared_fields(TrainingJobSpec) if name not in known]
    return missing + ([] if "schemaVersion" in _properties(schema, "status") else ["status.schemaVersion"])


def _properties(schema: Object, part: str) -> Object:
    found: Any = (schema.get("properties") or {}).get(part) or {}
    return found.get("properties") or {}


def _operator(found: tuple[Object, ...] | str, version: str) -> Finding:
    if isinstance(found, str):
        return Finding("operator", "unknown", found)
    if not found:
        said = "no Deployment of surefoot-operator: jobs stay without a state"
        return Finding("operator", "fault", said, _INSTALL)
    told = []
    for one in found:
        metadata, wanted, ready = (
            one["metadata"],
            _number(one, "spec", "replicas", 1),
            _number(one, "status", "readyReplicas"),
        )
        told.append(
            (
                f"{metadata.get('namespace')}/{metadata.get('name')}",
                ready,
                wanted,
                metadata.get("labels", {}).get(_VERSION_LABEL),
            )
        )
    said = "; ".join(
        f"{name} {of or 'of unknown version'}, {ready} of {wanted} ready" for name, ready, wanted, of in told
    )
    first = told[0]
    look = f"kubectl -n {first[0].partition('/')[0]} describe deployment {first[0].partition('/')[2]}"
    if len(told) > 1:
        return Finding(
            "operator", "warning", f"{len(told)} operators look after the same jobs: {said}", "uninstall all but one"
        )
    if first[1] == 0:
        return Finding("operator", "fault", said, look)
    if first[1] < first[2]:
        return Finding("operator", "warning", said, look)
    if first[3] not in (None, version):
        said = f"{said}; this surefoot is {version}"
        return Finding("operator", "warning", said, f"pip install surefoot=={first[3]}, or upgrade the chart")
    return Finding("operator", "ok", said)


def _leader(slices: tuple[Object, ...] | str, operators: tuple[Object, ...] | str) -> Finding:
    """Agents reach the pod that the coordinator's Service selects: the one that leads."""
    if isinstance(slices, str):
        return Finding("leader", "unknown", slices)
    found: dict[tuple[str, str], list[str]] = {}
    for one in slices:
        metadata = one["metadata"]
        service = (metadata.get("labels") or {}).get("kubernetes.io/service-name", "")
        told = found.setdefault((str(metadata.get("namespace")), service), [])
        told += [
            f"{address} of {metadata.get('namespace')}"
            for endpoint in one.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready") is not False
            for address in endpoint.get("addresses", ())
        ]
    everywhere = sorted({told for led in found.values() for told in led})
    unled = sorted(service for (_, service), led in found.items() if not led)
    if everywhere and not unled:
        return Finding("leader", "ok", f"agents are sent to {listed(everywhere)}")
    if everywhere:
        said = f"no operator leads the jobs whose agents ask Service {listed(unled)}"
        return Finding("leader", "fault", said, "the logs of the operator's pods: docs/operator.md#shards")
    if operators == ():
        return Finding("leader", "unknown", "there is no operator that could lead")
    remedy = "kubectl get pods -A -l surefoot.dev/part=operator -L surefoot.dev/leader, and the logs of one: docs/operator.md#who-leads"
    return Finding(
        "leader", "fault", "no operator leads, so agents find nobody behind the coordinator's Service", remedy
    )


def _memory_tier(found: tuple[Object, ...] | str) -> Finding:
    if isinstance(found, str):
        return Finding("memory tier", "unknown", found)
    if not found:
        said = "no DaemonSet of holders: checkpoints are kept in the persistent tier alone"
        return Finding("memory tier", "warning", said, "install the chart with memoryTier.enabled")
    wanted, ready = (
        sum(_number(one, "status", name) for one in found) for name in ("desiredNumberScheduled", "numberReady")
    )
    names = [f"{one['metadata'].get('namespace')}/{one['metadata'].get('name')}" for one in found]
    said = f"{listed(names)}: {ready} of {wanted} holders ready"
    namespace = names[0].partition("/")[0]
    look = f"kubectl -n {namespace} get pods -l surefoot.dev/part=memory-tier -o wide"
    if wanted == 0:
        return Finding(
            "memory tier",
            "fault",
            f"{said}: no node is chosen",
            "see memoryTier.nodeSelector and tolerations of the chart",
        )
    if ready == 0:
        return Finding("memory tier", "fault", said, look)
    return Finding("memory tier", "ok", said) if ready >= wanted else Finding("memory tier", "warning", said, look)


def _number(of: Object, part: str, name: str, default: int = 0) -> int:
    found = (of.get(part) or {}).get(name, default)
    return found if isinstance(found, int) else default


# ---- judgement of this machine ---------------------------------------------------------------------------------------
# Checks this machine: versions, extras, Redis, memory. `look_here` touches the machine; what is judged of it is pure. A
# cluster's jobs need none of this but the command itself: what only `surefoot local` needs is at most a warning.

_LEAST_BYTES = 2 << 30
"""torch alone takes half of it."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, slots=True)
class MachineLook:
    """What this machine has."""

    surefoot: str
    python: str
    torch: str | None
    """Its version; None: not installed."""
    redis: str | None
    """The server's program; None: there is none."""
    redis_problem: str
    lacking: dict[str, str]
    """Extra -> what it lacks."""
    available_bytes: int | None


def look_here() -> MachineLook:
    """Looks at this machine; imports neither torch nor a client."""
    redis, problem = None, ""
    try:
        redis = find_program()
    except ConfigurationError as error:
        problem = str(error)
    missing = {extra: said for extra in ("cli", "runtime") if (said := lacking(extra)) is not None}
    return MachineLook(
        surefoot=__version__,
        python=platform.python_version(),
        torch=_version_of("torch"),
        redis=redis,
        redis_problem=problem,
        lacking=missing,
        available_bytes=available_bytes(_read(_MEMINFO), _read(_CGROUP_LIMIT), _read(_CGROUP_USED)),
    )


def machine_findings(look: MachineLook, job: TrainingJob | None) -> list[Finding]:
    """Judges this machine; `job`: of a file that was given."""
    runtime = look.lacking.get("runtime")
    return [
        Finding("surefoot", "ok", f"{look.surefoot} on Python {look.python}"),
        _extra("commands", look.lacking.get("cli"), "all that the commands for clusters import is installed"),
        Finding("torch", "ok", look.torch or "")
        if look.torch is not None and runtime is None
        else Finding("torch", "warning", f"surefoot local and checkpoints cannot run here: {runtime or 'no torch'}"),
        Finding("redis", "ok", look.redis)
        if look.redis is not None
        else Finding("redis", "warning", f"surefoot local cannot run here: {look.redis_problem}"),
        memory_finding(look.available_bytes, job),
    ]


def memory_finding(available: int | None, job: TrainingJob | None) -> Finding:
    """Judges the memory for staging and holders of `surefoot local`."""
    if available is None:
        return Finding("memory", "unknown", "this system does not say how much memory is available")
    said = f"{amount(available)} available here for trainers, staging and holders of surefoot local"
    limit = job.spec.checkpoint.memory.size_limit_bytes if job is not None else None
    if job is not None and limit is not None:
        nodes = job.spec.replicas + job.spec.spares
        said = f"{said}; the job's {nodes} holders may take {amount(limit)} each"
        if limit * nodes > available:
            remedy = "give surefoot local fewer --nodes, or lower checkpoint.memory.sizeLimit in a copy of the job"
            return Finding("memory", "warning", said, remedy)
    if available < _LEAST_BYTES:
        return Finding("memory", "warning", said, "end other programs, or run the job on a cluster")
    return Finding("memory", "ok", said)


def available_bytes(meminfo: str, limit: str, used: str) -> int | None:
    """The memory that machine and container leave to be taken."""
    found = None
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if name == "MemAvailable" and parts and parts[0].isdigit():
            found = int(parts[0]) * 1024
    if limit.strip().isdigit() and used.strip().isdigit():
        left = max(0, int(limit) - int(used))
        found = left if found is None else min(found, left)
    return found


def _extra(check: str, missing: str | None, said: str) -> Finding:
    return (
        Finding(check, "ok", said)
        if missing is None
        else Finding(check, "warning", f"commands for clusters cannot run here: {missing}")
    )


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""  # another system, or another cgroup version: `available_bytes` says what is not known


# ---- tier check ------------------------------------------------------------------------------------------------------
# Checks that a persistent tier can be used from here. Runs `surefoot.tools.check_tier` in a child process, bounded by time.
# Workers reach the tier with their own identity and network: what is said is said of this machine.

PROBE_SECONDS = 60.0
_SLOW_SECONDS = 2.0
_REMEDIES = {
    "open": "see the address, and the credentials in this shell's environment",
    "write": "give this identity the right to put objects there, or see whether the place is full or read-only",
    "read": "give this identity the right to get objects there",
    "delete": "give this identity the right to delete objects there: else old checkpoints are never removed;"
    " delete the object below .probe-… by hand",
}


def probed(tier: PersistentTierSpec) -> Finding:
    """Probes a tier and judges what came of it."""
    return tier_finding(tier.uri, run_tool("check_tier", tier, [], PROBE_SECONDS))


def tier_finding(uri: str, found: Mapping[str, Any]) -> Finding:
    """Judges a probe's result."""
    if problem := found.get("problem"):
        step = str(found.get("step", ""))
        remedy = _REMEDIES.get(step, "")
        return Finding("persistent tier", "fault", f"{uri}: {f'{step}: ' if step else ''}{problem}", remedy)
    times = {name: float(found[f"{name}_seconds"]) for name in ("write", "read", "delete")}
    told = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in times.items())
    said = f"{found['place']}: {told}, of 4 KiB from this machine"
    if max(times.values()) > _SLOW_SECONDS:
        return Finding("persistent tier", "warning", said, "see the way there: a save of many objects will be slow")
    return Finding("persistent tier", "ok", said)


# ---- doctor ----------------------------------------------------------------------------------------------------------


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", nargs="?", metavar="WHERE", help="a persistent tier: a folder, file:///… or s3://…")
    parser.add_argument("-f", "--file", type=Path, metavar="JOB.yaml", help="or the TrainingJob that names one")
    parser.add_argument("--endpoint", metavar="URL", help="of an S3 service other than AWS (beside WHERE)")
    parser.add_argument("--region", metavar="NAME", help="the bucket's region (beside WHERE)")
    parser.add_argument(
        "--network", action="store_true", help="try the network from a running worker on each node (pods/exec)"
    )
    parser.add_argument("--no-cluster", action="store_true", help="check this machine and the tier alone")
    add_cluster(parser)
    add_output(parser, ("json", "yaml"))


def run_doctor(given: argparse.Namespace) -> int:
    """Runs every check; 1 where one of them found a fault."""
    if given.where is not None and given.file is not None:
        raise UsageError("doctor needs either a folder or URI, or -f JOB.yaml")
    if given.network and given.no_cluster:
        raise UsageError("doctor --network asks workers of a cluster: leave --no-cluster out")
    job = None if given.file is None else read_job(given.file)
    tier = tier_at(given.where, given.endpoint, given.region) if given.where is not None else None
    found = [
        *machine_findings(look_here(), job),
        *_of_cluster(given),
        _of_tier(job, tier),
    ]
    emit(found, given.output, lambda wide: finding_lines(found))
    return EXIT_FAILED if has_fault(found) else EXIT_OK


def _of_cluster(given: argparse.Namespace) -> list[Finding]:
    if given.no_cluster:
        return [no_cluster("no cluster was asked (--no-cluster)")]
    if (missing := lacking("cli")) is not None:
        return [no_cluster(missing)]
    try:
        found = cluster_findings(on_cluster(given, look_at), __version__)
        return [*found, *(network_findings(on_cluster(given, look_at_network)) if given.network else [NOT_ASKED])]
    except UsageError as error:  # none is configured: fine for who runs `surefoot local` alone
        if given.context is not None or given.kubeconfig is not None:
            raise
        why = str(error).partition("; give ")[0]
        return [no_cluster(why, "give --kubeconfig or --context; surefoot local needs no cluster")]
    except ClusterRefused as error:
        return [no_cluster(str(error), state="fault")]


def _of_tier(job: TrainingJob | None, tier: PersistentTierSpec | None) -> Finding:
    tier = tier or (job.spec.checkpoint.persistent if job is not None else None)
    if tier is not None:
        return probed(tier)
    if job is not None:
        said = "the job has no spec.checkpoint.persistent: what every holder loses is lost"
        return Finding("persistent tier", "warning", said, "give it one, or know that no checkpoint outlives the job")
    return Finding("persistent tier", "unknown", "none was named: give WHERE or -f JOB.yaml")
