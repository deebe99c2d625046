"""Implements `surefoot doctor`, which checks everything that a job needs.

Called by `main`. It changes nothing, except that it writes and deletes one object in a persistent tier that the user
names, and with --network runs a short program in workers.
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
from surefoot_operator.cli.job_files import add_file, read_job
from surefoot_operator.cli.jobs.read_jobs import listed_objects, on_cluster
from surefoot_operator.cli.tables import add_output, emit
from surefoot_operator.errors import PlatformError
from surefoot_operator.optional_dependencies import missing_module
from surefoot_operator.platforms.kubernetes import api_objects

# ---- cluster checks --------------------------------------------------------------------------------------------------
# Checks a cluster: version, permissions, CRD, operator, leader and memory tier, over the network and with the user's
# own permissions. Each check makes its own requests, so that one that is forbidden does not prevent the others. A
# problem that keeps every job from running is a fault; one that only disables some commands is a warning.

Object = dict[str, Any]

CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.{GROUP}"
SCHEMA = f"/openapi/v3/apis/{GROUP}/{VERSION}"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
JOB_KIND = f"dev.surefoot.{VERSION}.TrainingJob"

_MIN_VERSION = (1, 30)
_INSTALL_REMEDY = "docs/install.md describes how to install it"


@dataclass(frozen=True, slots=True)
class RequiredPermissions:
    """Permissions that one purpose needs."""

    purpose: str
    """Name of the check, such as `see jobs`."""
    rights: tuple[Permission, ...]
    needed: bool
    """Whether their lack is a fault instead of a warning, because no command works without them."""
    without: str
    """Text for the user: the commands that do not work without them."""


def required_permissions(namespace: str) -> tuple[RequiredPermissions, ...]:
    """Lists the permissions that a user needs, grouped by purpose."""
    jobs = tuple(jobs_right(verb, namespace) for verb in ("get", "list"))
    changes = tuple(jobs_right(verb, namespace) for verb in ("create", "patch", "delete"))
    pods = (
        Permission("list", "pods", namespace),
        Permission("get", "pods/log", namespace),
        Permission("list", "events", namespace),
    )
    node_rights = (Permission("list", "nodes"), Permission("list", "pods"))
    return (
        RequiredPermissions("see jobs", jobs, True, "no command can read a job"),
        RequiredPermissions("run jobs", changes, False, "kubectl apply, suspend, resume and delete are refused"),
        RequiredPermissions("see workers", pods, False, "describe has no workers and events, and logs nothing"),
        RequiredPermissions("see nodes", node_rights, False, "`surefoot nodes` shows neither nodes nor memory servers"),
    )


async def check_cluster(cluster: ClusterConnection) -> list[Finding]:
    """Runs all checks of a cluster concurrently. Raises ClusterRequestFailed if the server does not answer at all."""
    server = await _check_server(cluster)
    checks = await asyncio.gather(
        _or_unknown("rights", _check_rights(cluster)),
        _or_unknown("CRD", _check_crd(cluster)),
        _or_unknown("operator", _check_operator(cluster)),
        _or_unknown("leader", _check_leader(cluster)),
        _or_unknown("memory tier", _check_memory_tier(cluster)),
    )
    return [server, *(finding for findings in checks for finding in findings)]


async def _or_unknown(check: str, findings: Awaitable[list[Finding]]) -> list[Finding]:
    """Awaits a check; if one of its requests fails, returns a finding `unknown` with the reason."""
    try:
        return await findings
    except ClusterRequestFailed as error:
        return [Finding(check, "unknown", str(error))]


def no_cluster(why: str, remedy: str = "", state: State = "unknown") -> Finding:
    """Returns the finding in place of all cluster checks, if no cluster can be asked."""
    return Finding("cluster", state, f"{why}; rights, CRD, operator and memory tier cannot be known", remedy)


async def _check_server(cluster: ClusterConnection) -> Finding:
    """Checks the Kubernetes version. Raises ClusterRequestFailed if the server does not answer."""
    try:
        version = await cluster.api.get("/version")
    except PlatformError as error:
        if getattr(error, "code", None) is None:
            raise describe_api_error(error, Permission("get", "version"), cluster.server) from error
        return Finding("cluster", "unknown", f"{cluster.server} did not return its version: {error}")
    number_matches = [re.match(r"\d+", str(version.get(part, ""))) for part in ("major", "minor")]
    version_text = f"{cluster.server}: Kubernetes {version.get('gitVersion', 'of unknown version')}"
    if not all(number_matches) or tuple(int(number[0]) for number in number_matches if number) >= _MIN_VERSION:
        return Finding("cluster", "ok", version_text)
    return Finding(
        "cluster", "fault", version_text, f"upgrade it: the chart needs {'.'.join(map(str, _MIN_VERSION))} or newer"
    )


async def _check_rights(cluster: ClusterConnection) -> list[Finding]:
    required = required_permissions(cluster.namespace)
    try:
        answers = iter(
            await asyncio.gather(
                *(_is_allowed(cluster, right) for requirement in required for right in requirement.rights)
            )
        )
    except ClusterRequestFailed as error:
        return [Finding("rights", "unknown", f"the server did not return your permissions: {error}")]
    return [
        _judge_rights(requirement, [right for right in requirement.rights if not next(answers)], cluster)
        for requirement in required
    ]


def _judge_rights(required: RequiredPermissions, denied: Sequence[Permission], cluster: ClusterConnection) -> Finding:
    """Judges the denied permissions of one purpose."""
    right = required.rights[0]
    if not denied:
        scope_text = f"in namespace {cluster.namespace}" if cluster.namespace else "in all namespaces"
        return Finding(required.purpose, "ok", f"you may, {scope_text}" if right.namespace else "you may")
    remedy = "ask an administrator for a ClusterRole that may list nodes and pods, or do without"
    if right.group == GROUP:
        role = "view" if required.needed else "edit"
        remedy = f"ask an administrator to bind Kubernetes' ClusterRole {role} to you there; the chart's rbac.aggregate adds TrainingJobs to it"
    elif right.namespace:
        remedy = "ask an administrator to bind the ClusterRole view to you there"
    denied_text = f"you may not {join_names(denied)}: {required.without}"
    return Finding(required.purpose, "fault" if required.needed else "warning", denied_text, remedy)


async def _is_allowed(cluster: ClusterConnection, right: Permission) -> bool:
    """Asks the API server whether the user has a permission."""
    resource, _, subresource = right.resource.partition("/")
    optional = {"subresource": subresource, "namespace": right.namespace}
    request = {
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
        review = await cluster.api.post(REVIEWS, request)
    except PlatformError as error:
        permission = Permission("create", "selfsubjectaccessreviews", group="authorization.k8s.io")
        raise describe_api_error(error, permission, cluster.server) from error
    return bool(review.get("status", {}).get("allowed"))


async def _check_crd(cluster: ClusterConnection) -> list[Finding]:
    """Compares the installed schema with this version, from the CRD or else from the published OpenAPI document.

    Reading the CRD needs a permission that many users lack; every user may read the OpenAPI document.
    """
    schema = None
    for path in (CRD, SCHEMA):
        try:
            schema = _schema_in(await cluster.api.get(path))
            break
        except PlatformError as error:
            if getattr(error, "code", None) == 404:
                return [Finding("CRD", "fault", f"trainingjobs.{GROUP} is not installed", _INSTALL_REMEDY)]
            refusal = error
    if schema is None:
        permission = Permission("get", "customresourcedefinitions", group="apiextensions.k8s.io")
        raise describe_api_error(refusal, permission, cluster.server) from refusal
    if missing := missing_fields(schema):
        text = f"trainingjobs.{GROUP} is older than this surefoot: it lacks {join_names(missing)}"
        remedy = "kubectl apply --server-side -f manifests/crd.yaml, or upgrade the chart"
        return [Finding("CRD", "warning", text, remedy)]
    return [Finding("CRD", "ok", f"trainingjobs.{GROUP} has every field that this surefoot knows")]


def _schema_in(document: Object) -> Object:
    """Returns the schema of TrainingJob in the CRD or in the OpenAPI document; empty if it contains none."""
    versions = [version for version in document.get("spec", {}).get("versions", ()) if version.get("name") == VERSION]
    if versions:
        schema: Object = versions[0].get("schema", {}).get("openAPIV3Schema", {})
    else:
        schema = document.get("components", {}).get("schemas", {}).get(JOB_KIND, {})
    return schema


def missing_fields(schema: Object) -> list[str]:
    """Lists fields of this version that an installed schema lacks, such as `spec.suspend`."""
    known_fields = _properties(schema, "spec")
    missing = [f"spec.{name}" for name in declared_fields(TrainingJobSpec) if name not in known_fields]
    return missing + ([] if "schemaVersion" in _properties(schema, "status") else ["status.schemaVersion"])


def _properties(schema: Object, part: str) -> Object:
    field_schema: Any = (schema.get("properties") or {}).get(part) or {}
    return field_schema.get("properties") or {}


async def _check_operator(cluster: ClusterConnection) -> list[Finding]:
    """Checks that exactly one operator is installed, is ready and has this version."""
    permission = Permission("list", "deployments", group="apps")
    deployments = await listed_objects(
        cluster, "/apis/apps/v1/deployments", permission, {"labelSelector": f"{api_objects.PART_LABEL}=operator"}
    )
    if not deployments:
        return [
            Finding(
                "operator", "fault", "no Deployment of surefoot-operator: jobs stay without a state", _INSTALL_REMEDY
            )
        ]
    states = [
        (
            _int_field(deployment, "status", "readyReplicas"),
            _int_field(deployment, "spec", "replicas", 1),
            _chart_version(deployment),
        )
        for deployment in deployments
    ]
    text = "; ".join(
        f"{_qualified_name(deployment)} {version or 'of unknown version'}, {ready} of {desired} ready"
        for deployment, (ready, desired, version) in zip(deployments, states, strict=True)
    )
    # Judge the most serious problem only: several operators, then readiness, then the version.
    if len(deployments) > 1:
        text = f"{len(deployments)} operators manage the same jobs: {text}"
        return [Finding("operator", "warning", text, "uninstall all but one")]
    [(ready, desired, version)] = states
    if ready < desired or ready == 0:
        namespace, _, name = _qualified_name(deployments[0]).partition("/")
        command = f"kubectl -n {namespace} describe deployment {name}"
        return [Finding("operator", "warning" if ready else "fault", text, command)]
    if version not in (None, __version__):
        remedy = f"pip install surefoot=={version}, or upgrade the chart"
        return [Finding("operator", "warning", f"{text}; this surefoot is {__version__}", remedy)]
    return [Finding("operator", "ok", text)]


def _chart_version(deployment: Object) -> Any:
    return deployment["metadata"].get("labels", {}).get("app.kubernetes.io/version")


async def _check_leader(cluster: ClusterConnection) -> list[Finding]:
    """Checks that each coordinator Service selects a pod: the leading operator, which agents connect to."""
    permission = Permission("list", "endpointslices", group="discovery.k8s.io")
    slices = await listed_objects(
        cluster, SLICES, permission, {"labelSelector": f"{api_objects.PART_LABEL}=coordinator"}
    )
    addresses: dict[tuple[str, str], list[str]] = {}
    for endpoint_slice in slices:
        namespace = str(endpoint_slice["metadata"].get("namespace"))
        service = (endpoint_slice["metadata"].get("labels") or {}).get("kubernetes.io/service-name", "")
        addresses.setdefault((namespace, service), []).extend(
            f"{address} of {namespace}"
            for endpoint in endpoint_slice.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready") is not False
            for address in endpoint.get("addresses", ())
        )
    leaders = sorted({leader for service_addresses in addresses.values() for leader in service_addresses})
    services_without_leader = sorted(
        service for (_, service), service_addresses in addresses.items() if not service_addresses
    )
    if leaders and not services_without_leader:
        return [Finding("leader", "ok", f"agents are sent to {join_names(leaders)}")]
    if leaders:
        text = f"no operator leads the jobs whose agents ask Service {join_names(services_without_leader)}"
        return [Finding("leader", "fault", text, "the logs of the operator's pods: docs/operator.md#shards")]
    text = "no operator leads, so the coordinator's Service has no endpoint for agents"
    remedy = "kubectl get pods -A -l surefoot.dev/part=operator -L surefoot.dev/leader, and the logs of one: docs/operator.md#who-leads"
    return [Finding("leader", "fault", text, remedy)]


async def _check_memory_tier(cluster: ClusterConnection) -> list[Finding]:
    """Checks that the memory servers of all chosen nodes are ready."""
    permission = Permission("list", "daemonsets", group="apps")
    daemon_sets = await listed_objects(
        cluster, "/apis/apps/v1/daemonsets", permission, {"labelSelector": api_objects.MEMORY_SERVER_SELECTOR}
    )
    if not daemon_sets:
        text = "no DaemonSet of memory servers: checkpoints are kept only in the persistent tier"
        return [Finding("memory tier", "warning", text, "install the chart with memoryTier.enabled")]
    desired, ready = (
        sum(_int_field(daemon_set, "status", name) for daemon_set in daemon_sets)
        for name in ("desiredNumberScheduled", "numberReady")
    )
    text = f"{join_names([_qualified_name(daemon_set) for daemon_set in daemon_sets])}: {ready} of {desired} memory servers ready"
    if desired == 0:
        remedy = "see memoryTier.nodeSelector and tolerations of the chart"
        return [Finding("memory tier", "fault", f"{text}: no node is chosen", remedy)]
    if ready >= desired:
        return [Finding("memory tier", "ok", text)]
    namespace = _qualified_name(daemon_sets[0]).partition("/")[0]
    command = f"kubectl -n {namespace} get pods -l surefoot.dev/part=memory-tier -o wide"
    return [Finding("memory tier", "warning" if ready else "fault", text, command)]


def _qualified_name(document: Object) -> str:
    return f"{document['metadata'].get('namespace')}/{document['metadata'].get('name')}"


def _int_field(document: Object, part: str, name: str, default: int = 0) -> int:
    value = (document.get(part) or {}).get(name, default)
    return value if isinstance(value, int) else default


# ---- machine checks --------------------------------------------------------------------------------------------------
# Checks this machine: versions, extras, Redis and memory, without importing torch or the Kubernetes client. Jobs in a
# cluster need none of these, so a problem that only concerns `surefoot local` is at most a warning.

_MIN_BYTES = 2 << 30
"""Memory below which `surefoot local` is unlikely to run; torch alone takes half of it."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def check_machine(job: TrainingJob | None) -> list[Finding]:
    """Checks this machine. `job`: the job to run here, whose memory limit is checked; None: no job is known."""
    return [
        Finding("surefoot", "ok", f"{__version__} on Python {platform.python_version()}"),
        _check_commands(),
        _check_torch(),
        _check_redis(),
        memory_finding(
            available_bytes(_read_or_empty(_MEMINFO), _read_or_empty(_CGROUP_LIMIT), _read_or_empty(_CGROUP_USED)), job
        ),
    ]


def _check_commands() -> Finding:
    if (missing := missing_module("cli")) is not None:
        return Finding("commands", "warning", f"commands for clusters cannot run here: {missing}")
    return Finding("commands", "ok", "all that the commands for clusters import is installed")


def _check_torch() -> Finding:
    """Checks that torch and the runtime are installed, without importing them."""
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
    """Judges the memory available to `surefoot local`.

    Args:
        available: Bytes; None if they are not known.
        job: Job whose memory servers must fit; None: check only a minimum.
    """
    if available is None:
        return Finding("memory", "unknown", "this system does not report how much memory is available")
    text = f"{format_bytes(available)} available here for trainers, staging and memory servers of surefoot local"
    limit = job.spec.checkpoint.memory.size_limit_bytes if job is not None else None
    if job is not None and limit is not None:
        nodes = job.spec.replicas + job.spec.spares
        text = f"{text}; the job's {nodes} memory servers may take {format_bytes(limit)} each"
        if limit * nodes > available:
            remedy = "give surefoot local fewer --nodes, or lower checkpoint.memory.sizeLimit in a copy of the job"
            return Finding("memory", "warning", text, remedy)
    if available < _MIN_BYTES:
        return Finding("memory", "warning", text, "end other programs, or run the job on a cluster")
    return Finding("memory", "ok", text)


def available_bytes(meminfo: str, limit: str, used: str) -> int | None:
    """Returns the bytes of memory that machine and container still allow; None if neither is known.

    Arguments are the contents of /proc/meminfo and of the cgroup's memory.max and memory.current, or empty.
    """
    match = re.search(r"^MemAvailable:\s+(\d+)", meminfo, re.MULTILINE)
    amounts = [] if match is None else [int(match[1]) * 1024]
    if limit.strip().isdigit() and used.strip().isdigit():
        amounts.append(max(0, int(limit) - int(used)))
    return min(amounts, default=None)


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""  # another system or cgroup version: `available_bytes` treats an empty text as not known


# ---- tier check ------------------------------------------------------------------------------------------------------
# Checks that a persistent tier can be used from this machine. Runs `surefoot.tools.check_tier` in a child process with
# a timeout. Workers use the tier with their own identity and network, so the result holds only for this machine.

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
    """Writes, reads and deletes an object in a tier, and judges the result."""
    tool_result = run_tool("check_tier", tier, [], PROBE_SECONDS)
    if problem := tool_result.get("problem"):
        step = str(tool_result.get("step", ""))
        remedy = _REMEDIES.get(step, "")
        return Finding("persistent tier", "fault", f"{tier.uri}: {f'{step}: ' if step else ''}{problem}", remedy)
    seconds_by_operation = {name: float(tool_result[f"{name}_seconds"]) for name in ("write", "read", "delete")}
    times_text = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in seconds_by_operation.items())
    text = f"{tool_result['place']}: {times_text}, of 4 KiB from this machine"
    if max(seconds_by_operation.values()) > _SLOW_SECONDS:
        return Finding("persistent tier", "warning", text, "see the way there: a save of many objects will be slow")
    return Finding("persistent tier", "ok", text)


# ---- doctor ----------------------------------------------------------------------------------------------------------


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", nargs="?", metavar="WHERE", help="a persistent tier: a folder, file:///… or s3://…")
    add_file(parser, "or the TrainingJob that names one; - reads standard input")
    parser.add_argument("--endpoint", metavar="URL", help="of an S3 service other than AWS (with WHERE)")
    parser.add_argument("--region", metavar="NAME", help="the bucket's region (with WHERE)")
    parser.add_argument(
        "--network", action="store_true", help="try the network from a running worker on each node (pods/exec)"
    )
    parser.add_argument("--no-cluster", action="store_true", help="check this machine and the tier alone")
    add_cluster(parser)
    add_output(parser, ("json", "yaml"))


def run_doctor(args: argparse.Namespace) -> int:
    """Runs every check; returns EXIT_FAILED if one of them found a fault."""
    if args.where is not None and args.file is not None:
        raise UsageError("doctor needs either a folder or URI, or -f JOB.yaml")
    if args.network and args.no_cluster:
        raise UsageError("doctor --network asks workers of a cluster: leave --no-cluster out")
    job = None if args.file is None else read_job(args.file)
    tier = tier_at(args.where, args.endpoint, args.region) if args.where is not None else None
    findings = [*check_machine(job), *_cluster_findings(args), _tier_finding(job, tier)]
    emit(findings, args.output, lambda wide: finding_lines(findings))
    return EXIT_FAILED if has_fault(findings) else EXIT_OK


def _cluster_findings(args: argparse.Namespace) -> list[Finding]:
    if args.no_cluster:
        return [no_cluster("no cluster was asked (--no-cluster)")]
    if (missing := missing_module("cli")) is not None:
        return [no_cluster(missing)]
    try:
        findings = on_cluster(args, check_cluster)
        return [*findings, *(on_cluster(args, check_network) if args.network else [NOT_CHECKED])]
    except UsageError as error:  # no cluster is configured, which is fine for users of only `surefoot local`
        if args.context is not None or args.kubeconfig is not None:
            raise
        why = str(error).partition("; give ")[0]
        return [no_cluster(why, "give --kubeconfig or --context; surefoot local needs no cluster")]
    except ClusterRequestFailed as error:
        return [no_cluster(str(error), state="fault")]


def _tier_finding(job: TrainingJob | None, tier: PersistentTierSpec | None) -> Finding:
    """Probes the tier that the user or the job names; without one, returns a finding about that."""
    tier = tier or (job.spec.checkpoint.persistent if job is not None else None)
    if tier is not None:
        return probed(tier)
    if job is not None:
        text = "the job has no spec.checkpoint.persistent: a checkpoint that every memory server loses is lost"
        return Finding("persistent tier", "warning", text, "give it one, or know that no checkpoint outlives the job")
    return Finding("persistent tier", "unknown", "none was named: give WHERE or -f JOB.yaml")
