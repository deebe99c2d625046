"""Judges who reaches whom.

Pure. A worker that does not reach its operator, or other workers, trains nothing; one that misses some holders saves to fewer.
"""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.protocol.plain import listed
from surefoot_operator.cli.doctor_network import Finding, State
from surefoot_operator.cli.network_look import NetworkLook, Way

NOT_ASKED = Finding(
    "network",
    "unknown",
    "who reaches whom was not tried",
    "give --network while a job runs: it runs a short program in one worker on each node",
)
_SHOWN = 5
_NAMES = {"coordinator": "to the operator", "holder": "to holders", "worker": "between workers"}
_NODES = "see what stands between these nodes (security groups, firewalls, the network plugin's pods there)"
_REMEDIES = {
    ("coordinator", "resolve"): "see the cluster's DNS: kubectl -n kube-system get pods -l k8s-app=kube-dns",
    (
        "coordinator",
        "connect",
    ): "see that an operator leads, and that NetworkPolicies let pods with surefoot.dev/part=worker out to its port 8443",
    (
        "coordinator",
        "verify",
    ): "the operator's certificate is of another authority than the worker was given: see docs/security.md, then replace the worker",
    (
        "holder",
        "connect",
    ): f"{_NODES}, and NetworkPolicies: pods with surefoot.dev/part=worker must reach the port redis of surefoot.dev/part=memory-tier",
    (
        "worker",
        "connect",
    ): f"{_NODES}, and NetworkPolicies of the job's namespace: its workers must reach each other at any port",
}


def network_findings(look: NetworkLook) -> list[Finding]:
    """Judges each kind of way, and names workers that gave no answer."""
    found = [_of_kind(kind, ways) for kind in _NAMES if (ways := [way for way in look.ways if way.kind == kind])]
    if look.unasked:
        remedy = "the worker's image needs python3 on its PATH, and you the right to create pods/exec there"
        found.append(Finding("network", "unknown", listed(look.unasked, _SHOWN), remedy))
    elif not look.ways:
        remedy = "kubectl apply -f examples/cluster/minimal.yaml, and ask again while it runs; -n names its namespace"
        found.append(Finding("network", "unknown", "no worker runs here from which it could be tried", remedy))
    return found


def _of_kind(kind: str, ways: Sequence[Way]) -> Finding:
    name = f"network {_NAMES[kind]}"
    failed = [way for way in ways if way.seconds is None]
    if not failed:
        slowest = max(way.seconds or 0.0 for way in ways)
        sources = len({way.source for way in ways})
        said = f"{len(ways)} ways from {sources} nodes are open, the slowest in {1000 * slowest:.0f} ms"
        return Finding(name, "ok", said)
    said = f"{len(failed)} of {len(ways)} ways fail: {listed(_told(failed), _SHOWN)}"
    remedy = _REMEDIES.get((kind, failed[0].step)) or _REMEDIES[kind, "connect"]
    return Finding(name, _state(kind, ways), said, remedy)


def _state(kind: str, ways: Sequence[Way]) -> State:
    if kind != "holder":
        return "fault"
    reached = {way.source for way in ways if way.seconds is not None}
    return "warning" if reached == {way.source for way in ways} else "fault"


def _told(failed: Sequence[Way]) -> list[str]:
    """Ways by where they lead and why they fail: one node behind a wall is one sentence."""
    sources: dict[tuple[str, str, str], list[str]] = {}
    for way in failed:
        sources.setdefault((way.target, way.address, way.problem), []).append(way.source)
    return [
        f"from {listed(sorted(names), _SHOWN)} to {target}{'' if target == address else f' ({address})'}: {problem}"
        for (target, address, problem), names in sorted(sources.items())
    ]
