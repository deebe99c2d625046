"""Judges a look at a cluster.

Pure. Faults are what keeps every job from running; what keeps only some command from working is a warning.
"""

from __future__ import annotations

import re
from typing import Any

from surefoot.protocol.plain import listed
from surefoot_operator.api.spec import GROUP, TrainingJobSpec
from surefoot_operator.api.yaml_names import yaml_fields
from surefoot_operator.cli.cluster_look import ClusterLook, Object, rights_asked
from surefoot_operator.cli.doctor_network import Finding, State

_OLDEST = (1, 30)
_VERSION_LABEL = "app.kubernetes.io/version"
_INSTALL = "docs/install.md says how to install it"


def cluster_findings(look: ClusterLook, version: str) -> list[Finding]:
    """Judges everything that was read; `version` is this program's."""
    return [
        _server(look),
        *_rights(look),
        _schema(look.schema),
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


def _schema(schema: Object | str | None) -> Finding:
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
    missing = [f"spec.{name}" for name in yaml_fields(TrainingJobSpec) if name not in known]
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
