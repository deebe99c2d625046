"""Implements `surefoot doctor`: whether everything is there that a job needs.

Called by `main`. Looks and changes nothing, but for one object in a persistent tier that is named, which it deletes again, and with
--network a short program in workers.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from surefoot import __version__
from surefoot.errors import ConfigurationError
from surefoot.memory_server.server_process import find_server_program
from surefoot.protocol.text import format_bytes, join_names
from surefoot_operator.api.fields import declared_fields
from surefoot_operator.api.spec import GROUP, VERSION, PersistentTierSpec, TrainingJob, TrainingJobSpec
from surefoot_operator.cli.checkpoints import run_tool, tier_at
from surefoot_operator.cli.cluster_access import (
    ClusterConnection,
    ClusterRequestFailed,
    Permission,
    add_cluster,
    describe_api_error,
    jobs_right,
)
from surefoot_operator.cli.command_base import EXIT_FAILED, EXIT_OK, UsageError
from surefoot_operator.cli.doctor_network import (
    NOT_CHECKED,
    Finding,
    State,
    check_network,
    finding_lines,
    has_fault,
)
from surefoot_operator.cli.job_files import read_job
from surefoot_operator.cli.jobs.read_jobs import listed_objects, on_cluster
from surefoot_operator.cli.tables import add_output, emit
from surefoot_operator.errors import PlatformError
from surefoot_operator.optional_dependencies import missing_module
from surefoot_operator.platforms.kubernetes import api_objects

# ---- cluster checks --------------------------------------------------------------------------------------------------
# Checks a cluster: version, rights, CRD, operator, leader, memory tier. Touches the network through a person's own rights.
# Each question is asked apart: who may read a half of it learns that half. Faults are what keeps every job from running;
# what keeps only some command from working is a warning.

Object = dict[str, Any]

CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.{GROUP}"
SCHEMA = f"/openapi/v3/apis/{GROUP}/{VERSION}"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
JOB_KIND = f"dev.surefoot.{VERSION}.TrainingJob"

_MIN_VERSION = (1, 30)
_INSTALL = "docs/install.md says how to install it"


@dataclass(frozen=True, slots=True)
class RequiredPermissions:
    """Rights for one purpose; `needed`: nothing works without them."""

    purpose: str
    rights: tuple[Permission, ...]
    needed: bool
    without: str
    """What does not work without them."""


def required_permissions(namespace: str) -> tuple[RequiredPermissions, ...]:
    """Lists what a person needs, by what they do."""
    jobs = tuple(jobs_right(verb, namespace) for verb in ("get", "list"))
    changes = tuple(jobs_right(verb, namespace) for verb in ("create", "patch", "delete"))
    pods = (
        Permission("list", "pods", namespace),
        Permission("get", "pods/log", namespace),
        Permission("list", "events", namespace),
    )
    around = (Permission("list", "nodes"), Permission("list", "pods"))
    return (
        RequiredPermissions("see jobs", jobs, True, "no command can look at a job"),
        RequiredPermissions("run jobs", changes, False, "kubectl apply, suspend, resume and delete are refused"),
        RequiredPermissions("see workers", pods, False, "describe has no workers and events, and logs nothing"),
        RequiredPermissions("see nodes", around, False, "nodes knows neither nodes nor holders"),
    )


async def check_cluster(cluster: ClusterConnection) -> list[Finding]:
    """Asks everything at once. Raises ClusterRefused if the server is silent."""
    server = await _check_server(cluster)
    checks = await asyncio.gather(
        _known("rights", _check_rights(cluster)),
        _known("CRD", _check_crd(cluster)),
        _known("operator", _check_operator(cluster)),
        _known("leader", _check_leader(cluster)),
        _known("memory tier", _check_memory_tier(cluster)),
    )
    return [server, *(finding for findings in checks for finding in findings)]


async def _known(check: str, findings: Awaitable[list[Finding]]) -> list[Finding]:
    try:
        return await findings
    except ClusterRequestFailed as error:
        return [Finding(check, "unknown", str(error))]


def no_cluster(why: str, remedy: str = "", state: State = "unknown") -> Finding:
    """Says what cannot be known without an answer of a cluster."""
    return Finding("cluster", state, f"{why}; rights, CRD, operator and memory tier cannot be known", remedy)


async def _check_server(cluster: ClusterConnection) -> Finding:
    try:
        version = await cluster.api.get("/version")
    except PlatformError as error:
        if getattr(error, "code", None) is None:
            raise describe_api_error(error, Permission("get", "version"), cluster.server) from error
        return Finding("cluster", "unknown", f"{cluster.server} does not say its version: {error}")
    numbers = [re.match(r"\d+", str(version.get(part, ""))) for part in ("major", "minor")]
    said = f"{cluster.server}: Kubernetes {version.get('gitVersion', 'of unknown version')}"
    if not all(numbers) or tuple(int(number[0]) for number in numbers if number) >= _MIN_VERSION:
        return Finding("cluster", "ok", said)
    return Finding("cluster", "fault", said, f"upgrade it: the chart needs {'.'.join(map(str, _MIN_VERSION))} or newer")


async def _check_rights(cluster: ClusterConnection) -> list[Finding]:
    asked = required_permissions(cluster.namespace)
    try:
        answers = iter(await asyncio.gather(*(_may(cluster, right) for one in asked for right in one.rights)))
    except ClusterRequestFailed as error:
        return [Finding("rights", "unknown", f"the server does not say what you may do: {error}")]
    return [_judge_rights(one, [right for right in one.rights if not next(answers)], cluster) for one in asked]


def _judge_rights(asked: RequiredPermissions, denied: Sequence[Permission], cluster: ClusterConnection) -> Finding:
    right = asked.rights[0]
    if not denied:
        where = f"in namespace {cluster.namespace}" if cluster.namespace else "in all namespaces"
        return Finding(asked.purpose, "ok", f"you may, {where}" if right.namespace else "you may")
    remedy = "ask an administrator for a ClusterRole that may list nodes and pods, or do without"
    if right.group == GROUP:
        role = "view" if asked.needed else "edit"
        remedy = f"have somebody bind Kubernetes' ClusterRole {role} to you there; the chart's rbac.aggregate adds TrainingJobs to it"
    elif right.namespace:
        remedy = "have somebody bind the ClusterRole view to you there"
    said = f"you may not {join_names(denied)}: {asked.without}"
    return Finding(asked.purpose, "fault" if asked.needed else "warning", said, remedy)


async def _may(cluster: ClusterConnection, right: Permission) -> bool:
    resource, _, subresource = right.resource.partition("/")
    optional = {"subresource": subresource, "namespace": right.namespace}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "metadata": {},
        "spec": {
            "resourceAttributes": {
                "verb": right.verb,
                "group": right.group,
                "resource": resource,
                **{name: value for name, value in optional.items() if value},
            }
        },
    }
    try:
        answer = await cluster.api.post(REVIEWS, body)
    except PlatformError as error:
        needed = Permission("create", "selfsubjectaccessreviews", group="authorization.k8s.io")
        raise describe_api_error(error, needed, cluster.server) from error
    return bool(answer.get("status", {}).get("allowed"))


async def _check_crd(cluster: ClusterConnection) -> list[Finding]:
    """By the CRD; who may not read it by what the server publishes of it to everybody."""
    schema = None
    for path in (CRD, SCHEMA):
        try:
            schema = _schema_in(await cluster.api.get(path))
            break
        except PlatformError as error:
            if getattr(error, "code", None) == 404:
                return [Finding("CRD", "fault", f"trainingjobs.{GROUP} is not installed", _INSTALL)]
            refusal = error
    if schema is None:
        needed = Permission("get", "customresourcedefinitions", group="apiextensions.k8s.io")
        raise describe_api_error(refusal, needed, cluster.server) from refusal
    if missing := missing_fields(schema):
        said = f"trainingjobs.{GROUP} is older than this surefoot: it lacks {join_names(missing)}"
        remedy = "kubectl apply --server-side -f manifests/crd.yaml, or upgrade the chart"
        return [Finding("CRD", "warning", said, remedy)]
    return [Finding("CRD", "ok", f"trainingjobs.{GROUP} has every field that this surefoot knows")]


def _schema_in(document: Object) -> Object:
    """TrainingJob's schema in the CRD, or in what the server publishes."""
    served = [one for one in document.get("spec", {}).get("versions", ()) if one.get("name") == VERSION]
    if served:
        found: Object = served[0].get("schema", {}).get("openAPIV3Schema", {})
    else:
        found = document.get("components", {}).get("schemas", {}).get(JOB_KIND, {})
    return found


def missing_fields(schema: Object) -> list[str]:
    """Names fields of this version that a schema lacks."""
    known = _properties(schema, "spec")
    missing = [f"spec.{name}" for name in declared_fields(TrainingJobSpec) if name not in known]
    return missing + ([] if "schemaVersion" in _properties(schema, "status") else ["status.schemaVersion"])


def _properties(schema: Object, part: str) -> Object:
    found: Any = (schema.get("properties") or {}).get(part) or {}
    return found.get("properties") or {}


async def _check_operator(cluster: ClusterConnection) -> list[Finding]:
    needed = Permission("list", "deployments", group="apps")
    found = await listed_objects(
        cluster, "/apis/apps/v1/deployments", needed, {"labelSelector": f"{api_objects.PART_LABEL}=operator"}
    )
    if not found:
        return [Finding("operator", "fault", "no Deployment of surefoot-operator: jobs stay without a state", _INSTALL)]
    parts = [
        (_number(one, "status", "readyReplicas"), _number(one, "spec", "replicas", 1), _chart_version(one))
        for one in found
    ]
    said = "; ".join(
        f"{_name(one)} {version or 'of unknown version'}, {ready} of {wanted} ready"
        for one, (ready, wanted, version) in zip(found, parts, strict=True)
    )
    if len(found) > 1:
        said = f"{len(found)} operators look after the same jobs: {said}"
        return [Finding("operator", "warning", said, "uninstall all but one")]
    [(ready, wanted, version)] = parts
    if ready < wanted or ready == 0:
        namespace, _, name = _name(found[0]).partition("/")
        look = f"kubectl -n {namespace} describe deployment {name}"
        return [Finding("operator", "warning" if ready else "fault", said, look)]
    if version not in (None, __version__):
        remedy = f"pip install surefoot=={version}, or upgrade the chart"
        return [Finding("operator", "warning", f"{said}; this surefoot is {__version__}", remedy)]
    return [Finding("operator", "ok", said)]


def _chart_version(deployment: Object) -> Any:
    return deployment["metadata"].get("labels", {}).get("app.kubernetes.io/version")


async def _check_leader(cluster: ClusterConnection) -> list[Finding]:
    """Agents reach the pod that the coordinator's Service selects: the one that leads."""
    needed = Permission("list", "endpointslices", group="discovery.k8s.io")
    slices = await listed_objects(cluster, SLICES, needed, {"labelSelector": f"{api_objects.PART_LABEL}=coordinator"})
    addresses: dict[tuple[str, str], list[str]] = {}
    for one in slices:
        namespace = str(one["metadata"].get("namespace"))
        service = (one["metadata"].get("labels") or {}).get("kubernetes.io/service-name", "")
        addresses.setdefault((namespace, service), []).extend(
            f"{address} of {namespace}"
            for endpoint in one.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready") is not False
            for address in endpoint.get("addresses", ())
        )
    leaders = sorted({leader for led in addresses.values() for leader in led})
    unled = sorted(service for (_, service), led in addresses.items() if not led)
    if leaders and not unled:
        return [Finding("leader", "ok", f"agents are sent to {join_names(leaders)}")]
    if leaders:
        said = f"no operator leads the jobs whose agents ask Service {join_names(unled)}"
        return [Finding("leader", "fault", said, "the logs of the operator's pods: docs/operator.md#shards")]
    said = "no operator leads, so agents find nobody behind the coordinator's Service"
    remedy = "kubectl get pods -A -l surefoot.dev/part=operator -L surefoot.dev/leader, and the logs of one: docs/operator.md#who-leads"
    return [Finding("leader", "fault", said, remedy)]


async def _check_memory_tier(cluster: ClusterConnection) -> list[Finding]:
    needed = Permission("list", "daemonsets", group="apps")
    found = await listed_objects(
        cluster, "/apis/apps/v1/daemonsets", needed, {"labelSelector": api_objects.MEMORY_SERVER_SELECTOR}
    )
    if not found:
        said = "no DaemonSet of holders: checkpoints are kept in the persistent tier alone"
        return [Finding("memory tier", "warning", said, "install the chart with memoryTier.enabled")]
    wanted, ready = (
        sum(_number(one, "status", name) for one in found) for name in ("desiredNumberScheduled", "numberReady")
    )
    said = f"{join_names([_name(one) for one in found])}: {ready} of {wanted} holders ready"
    if wanted == 0:
        remedy = "see memoryTier.nodeSelector and tolerations of the chart"
        return [Finding("memory tier", "fault", f"{said}: no node is chosen", remedy)]
    if ready >= wanted:
        return [Finding("memory tier", "ok", said)]
    namespace = _name(found[0]).partition("/")[0]
    look = f"kubectl -n {namespace} get pods -l surefoot.dev/part=memory-tier -o wide"
    return [Finding("memory tier", "warning" if ready else "fault", said, look)]


def _name(of: Object) -> str:
    return f"{of['metadata'].get('namespace')}/{of['metadata'].get('name')}"


def _number(of: Object, part: str, name: str, default: int = 0) -> int:
    found = (of.get(part) or {}).get(name, default)
    return found if isinstance(found, int) else default


# ---- machine checks --------------------------------------------------------------------------------------------------
# Checks this machine: versions, extras, Redis, memory. Imports neither torch nor a client. A cluster's jobs need none of
# this but the command itself: what only `surefoot local` needs is at most a warning.

_MIN_BYTES = 2 << 30
"""torch alone takes half of it."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def check_machine(job: TrainingJob | None) -> list[Finding]:
    """Checks this machine; `job`: of a file that was given."""
    return [
        Finding("surefoot", "ok", f"{__version__} on Python {platform.python_version()}"),
        _check_commands(),
        _check_torch(),
        _check_redis(),
        memory_finding(available_bytes(_read(_MEMINFO), _read(_CGROUP_LIMIT), _read(_CGROUP_USED)), job),
    ]


def _check_commands() -> Finding:
    if (missing := missing_module("cli")) is not None:
        return Finding("commands", "warning", f"commands for clusters cannot run here: {missing}")
    return Finding("commands", "ok", "all that the commands for clusters import is installed")


def _check_torch() -> Finding:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = ""
    missing = missing_module("runtime") or ("" if version else "no torch")
    if missing:
        return Finding("torch", "warning", f"surefoot local and checkpoints cannot run here: {missing}")
    return Finding("torch", "ok", version)


def _check_redis() -> Finding:
    try:
        return Finding("redis", "ok", find_server_program())
    except ConfigurationError as error:
        return Finding("redis", "warning", f"surefoot local cannot run here: {error}")


def memory_finding(available: int | None, job: TrainingJob | None) -> Finding:
    """Judges the memory for staging and holders of `surefoot local`."""
    if available is None:
        return Finding("memory", "unknown", "this system does not say how much memory is available")
    said = f"{format_bytes(available)} available here for trainers, staging and holders of surefoot local"
    limit = job.spec.checkpoint.memory.size_limit_bytes if job is not None else None
    if job is not None and limit is not None:
        nodes = job.spec.replicas + job.spec.spares
        said = f"{said}; the job's {nodes} holders may take {format_bytes(limit)} each"
        if limit * nodes > available:
            remedy = "give surefoot local fewer --nodes, or lower checkpoint.memory.sizeLimit in a copy of the job"
            return Finding("memory", "warning", said, remedy)
    if available < _MIN_BYTES:
        return Finding("memory", "warning", said, "end other programs, or run the job on a cluster")
    return Finding("memory", "ok", said)


def available_bytes(meminfo: str, limit: str, used: str) -> int | None:
    """The memory that machine and container leave to be taken."""
    match = re.search(r"^MemAvailable:\s+(\d+)", meminfo, re.MULTILINE)
    amounts = [] if match is None else [int(match[1]) * 1024]
    if limit.strip().isdigit() and used.strip().isdigit():
        amounts.append(max(0, int(limit) - int(used)))
    return min(amounts, default=None)


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
    found = run_tool("check_tier", tier, [], PROBE_SECONDS)
    if problem := found.get("problem"):
        step = str(found.get("step", ""))
        remedy = _REMEDIES.get(step, "")
        return Finding("persistent tier", "fault", f"{tier.uri}: {f'{step}: ' if step else ''}{problem}", remedy)
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
    found = [*check_machine(job), *_of_cluster(given), _of_tier(job, tier)]
    emit(found, given.output, lambda wide: finding_lines(found))
    return EXIT_FAILED if has_fault(found) else EXIT_OK


def _of_cluster(given: argparse.Namespace) -> list[Finding]:
    if given.no_cluster:
        return [no_cluster("no cluster was asked (--no-cluster)")]
    if (missing := missing_module("cli")) is not None:
        return [no_cluster(missing)]
    try:
        found = on_cluster(given, check_cluster)
        return [*found, *(on_cluster(given, check_network) if given.network else [NOT_CHECKED])]
    except UsageError as error:  # none is configured: fine for who runs `surefoot local` alone
        if given.context is not None or given.kubeconfig is not None:
            raise
        why = str(error).partition("; give ")[0]
        return [no_cluster(why, "give --kubeconfig or --context; surefoot local needs no cluster")]
    except ClusterRequestFailed as error:
        return [no_cluster(str(error), state="fault")]


def _of_tier(job: TrainingJob | None, tier: PersistentTierSpec | None) -> Finding:
    tier = tier or (job.spec.checkpoint.persistent if job is not None else None)
    if tier is not None:
        return probed(tier)
    if job is not None:
        said = "the job has no spec.checkpoint.persistent: what every holder loses is lost"
        return Finding("persistent tier", "warning", said, "give it one, or know that no checkpoint outlives the job")
    return Finding("persistent tier", "unknown", "none was named: give WHERE or -f JOB.yaml")
