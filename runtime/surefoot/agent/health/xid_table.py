"""Tells which Xids name hardware, and which a program.

Pure data. Sources: NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), the codes that
its device plugin takes for applications' (github.com/NVIDIA/k8s-device-plugin, `additionalxids`), those for which the EKS
node monitoring agent has a node repaired (github.com/aws/eks-node-monitoring-agent, `WellKnownXidCodes`). Where they
disagree, or a code is not listed, nobody is blamed. docs/node-health.md has the table, held by a test.
"""

from __future__ import annotations

from surefoot.protocol.node_findings import Blame, NodeFinding

XIDS: dict[int, tuple[Blame, str]] = {
    13: ("application", "graphics engine exception, as by an access out of bounds"),
    31: ("application", "GPU memory page fault"),
    32: ("unknown", "invalid or corrupted push buffer stream"),
    43: ("application", "a channel was reset: the program's kernel failed"),
    45: ("application", "the program's channels were torn down, as after an earlier error"),
    46: ("node", "GPU stopped processing"),
    48: ("node", "double-bit ECC error"),
    54: ("node", "auxiliary power is not connected"),
    62: ("node", "internal micro-controller halt"),
    63: ("unknown", "a memory row is recorded for remapping at the next reset"),
    64: ("node", "a memory row could not be remapped"),
    68: ("application", "video processor exception"),
    74: ("node", "NVLink error"),
    79: ("node", "GPU has fallen off the bus"),
    92: ("unknown", "high rate of corrected ECC errors"),
    94: ("unknown", "contained ECC error: the program that used the memory ends, the GPU goes on"),
    95: ("node", "uncontained ECC error"),
    109: ("unknown", "context switch timeout"),
    110: ("node", "security fault"),
    119: ("node", "GSP does not answer"),
    120: ("node", "GSP error"),
    136: ("node", "link training failed"),
    140: ("node", "unrecovered ECC error"),
    142: ("node", "GPU initialization error"),
    143: ("node", "GPU initialization failure"),
    154: ("unknown", "the recovery action changed"),
    158: ("node", "fatal timeout"),
}


def xid_finding(code: int, device: str) -> NodeFinding:
    """The finding for one Xid event on a device."""
    blame, meaning = XIDS.get(code, ("unknown", "a code that is not in the table"))
    return NodeFinding(f"GpuXid{code}", f"{device} reported Xid {code}: {meaning}", blame)
