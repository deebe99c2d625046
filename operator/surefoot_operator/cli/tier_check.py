"""Checks that a persistent tier can be used from here.

Runs `surefoot.tools.probe` in a child process, bounded by time. Workers reach the tier with their own identity and network: what is
said is said of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot_operator.api.spec import PersistentTierSpec
from surefoot_operator.cli.doctor_network import Finding
from surefoot_operator.cli.tools import run_tool

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
    return tier_finding(tier.uri, run_tool("probe", tier, [], PROBE_SECONDS))


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
