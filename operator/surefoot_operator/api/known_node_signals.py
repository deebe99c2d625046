"""Lists what others write on nodes, and what it means.

Pure data; used by `observations` where a job names no signals of its own. docs/node-health.md has the same table, and a test
holds the two together. A word that means less than a sick node (a counter, a monitor that lost its own line, a
diagnosis that its writer does not act upon) is shown beside the node and moves nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surefoot_operator.api.spec import NodeSignals

SignalMeaning = Literal["ends", "sick", "shown"]
"""ends: somebody will take the node away; sick: it is not fit for work; shown: too little to move anybody."""


@dataclass(frozen=True, slots=True)
class KnownNodeSignal:
    """One taint key, `key=value` label or `Type=Status` condition."""

    kind: Literal["taint", "label", "condition"]
    name: str
    meaning: SignalMeaning


@dataclass(frozen=True, slots=True)
class NodeSignalSource:
    """A program that writes words on nodes, and where it says so."""

    name: str
    source: str
    signals: tuple[KnownNodeSignal, ...]


def _all(
    kind: Literal["taint", "label", "condition"], meaning: SignalMeaning, *names: str
) -> tuple[KnownNodeSignal, ...]:
    return tuple(KnownNodeSignal(kind, name, meaning) for name in names)


def _labels(meaning: SignalMeaning, key: str, *values: str) -> tuple[KnownNodeSignal, ...]:
    return _all("label", meaning, *(f"{key}={value}" for value in values))


_UPGRADE_LEAVES = (
    "node-maintenance-required", "cordon-required", "wait-for-jobs-required", "pod-deletion-required", "drain-required",
)  # fmt: skip
"""States in which a driver's upgrade waits for pods to go. All nodes are `upgrade-required` at once, and few at a time go on."""

WRITERS = (
    NodeSignalSource("Surefoot", "#what-others-hear", _all("condition", "sick", "SurefootUnhealthy=True")),
    NodeSignalSource(
        "Cluster autoscaler",
        "https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md",
        _all("taint", "ends", "ToBeDeletedByClusterAutoscaler"),
    ),
    NodeSignalSource(
        "Karpenter",
        "https://karpenter.sh/docs/concepts/disruption/",
        _all("taint", "ends", "karpenter.sh/disrupted"),
    ),
    NodeSignalSource(
        "Node Problem Detector",
        "https://github.com/kubernetes/node-problem-detector/tree/master/config",
        (
            *_all("condition", "sick", "KernelDeadlock=True", "ReadonlyFilesystem=True", "XfsShutdown=True"),
            *_all("condition", "sick", "CperHardwareErrorFatal=True"),
            *_all("condition", "shown", "CorruptDockerOverlay2=True", "KubeletUnhealthy=True"),
            *_all(
                "condition", "shown", "ContainerRuntimeUnhealthy=True", "NTPProblem=True", "FrequentKubeletRestart=True"
            ),
            *_all("condition", "shown", "FrequentDockerRestart=True", "FrequentContainerdRestart=True"),
            *_all("condition", "shown", "FrequentUnregisterNetDevice=True"),
        ),
    ),
    NodeSignalSource(
        "NVSentinel",
        "https://docs.nvidia.com/nvsentinel/getting-started/integrations",
        (
            *_labels("sick", "dgxc.nvidia.com/nvsentinel-state", "quarantined", "draining", "drain-succeeded"),
            *_labels("sick", "dgxc.nvidia.com/nvsentinel-state", "drain-failed", "remediating", "remediation-failed"),
            *_all(
                "taint",
                "sick",
                "nvidia.com/gpu-xid-error",
                "nvidia.com/gpu-nvlink-error",
                "nvidia.com/syslog-xid-error",
            ),
            *_all("taint", "sick", "nvidia.com/gpu-error"),
            *_all(
                "condition", "sick", "GpuMemWatch=True", "GpuPcieWatch=True", "GpuInforomWatch=True", "GpuSmWatch=True"
            ),
            *_all("condition", "sick", "GpuNvlinkWatch=True", "GpuMcuWatch=True", "GpuPmuWatch=True"),
            *_all("condition", "sick", "SysLogsXIDError=True", "SysLogsSXIDError=True", "SysLogsGPUFallenOff=True"),
            *_all("condition", "sick", "NVSwitchFatalError=True", "NVSwitchDown=True"),
            *_all("condition", "ends", "CSPMaintenance=True"),
            *_all("condition", "shown", "GpuThermalWatch=True", "GpuPowerWatch=True", "GpuCpusetWatch=True"),
            *_all("condition", "shown", "GpuDriverWatch=True", "NVSwitchNonFatalError=True", "DCGMError=True"),
            *_all("condition", "shown", "GpuDcgmConnectivityFailure=True", "SyslogError=True"),
        ),
    ),
    NodeSignalSource(
        "NVIDIA GPU Operator and Network Operator",
        "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-driver-upgrades.html",
        (
            *_labels("ends", "nvidia.com/gpu-driver-upgrade-state", *_UPGRADE_LEAVES),
            *_labels("ends", "nvidia.com/ofed-driver-upgrade-state", *_UPGRADE_LEAVES),
            *_labels("shown", "nvidia.com/gpu-driver-upgrade-state", "upgrade-required", "upgrade-failed"),
            *_labels("shown", "nvidia.com/ofed-driver-upgrade-state", "upgrade-required", "upgrade-failed"),
        ),
    ),
    NodeSignalSource(
        "EKS node monitoring agent",
        "https://docs.aws.amazon.com/eks/latest/userguide/node-health-nma.html",
        (
            *_all("condition", "sick", "AcceleratedHardwareReady=False", "NetworkingReady=False"),
            *_all("condition", "shown", "KernelReady=False", "StorageReady=False", "ContainerRuntimeReady=False"),
        ),
    ),
    NodeSignalSource(
        "AWS node termination handler",
        "https://github.com/aws/aws-node-termination-handler",
        (
            *_all("taint", "ends", "aws-node-termination-handler/spot-itn"),
            *_all("taint", "ends", "aws-node-termination-handler/scheduled-maintenance"),
            *_all("taint", "ends", "aws-node-termination-handler/asg-lifecycle-termination"),
            *_all("taint", "shown", "aws-node-termination-handler/rebalance-recommendation"),
        ),
    ),
    NodeSignalSource(
        "SageMaker HyperPod",
        "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-node-labels.html",
        _labels(
            "sick",
            "sagemaker.amazonaws.com/node-health-status",
            *("Unschedulable", "UnschedulablePendingReplacement", "UnschedulablePendingReboot"),
        ),
    ),
    NodeSignalSource(
        "GKE",
        "https://docs.cloud.google.com/kubernetes-engine/docs/concepts/handle-disruption-gpu-tpu",
        (
            *_all("taint", "ends", "cloud.google.com/impending-node-termination"),
            *_labels("ends", "cloud.google.com/active-node-maintenance", "ONGOING"),
        ),
    ),
    NodeSignalSource(
        "AKS",
        "https://learn.microsoft.com/en-us/azure/aks/node-problem-detector",
        (
            *_all("taint", "ends", "remediator.kubernetes.azure.com/unschedulable"),
            *_all("condition", "ends", "VMEventScheduled=True"),
            *_all(
                "condition", "sick", "FilesystemCorruptionProblem=True", "GPUMissing=True", "NVLinkStatusInactive=True"
            ),
            *_all("condition", "shown", "XIDErrors=True", "IBLinkFlapping=True", "GPUClockThrottling=True"),
            *_all("condition", "shown", "UnhealthyNvidiaDevicePlugin=True", "KubeletProblem=True"),
            *_all("condition", "shown", "ContainerRuntimeProblem=True"),
        ),
    ),
    NodeSignalSource(
        "Nebius",
        "https://docs.nebius.com/kubernetes/maintenance/health-checks",
        _all("condition", "sick", "NebiusGPUError=True", "NebiusBootDiskIOError=True"),
    ),
)

NOT_OF_THE_NODE = {
    "AcceleratedHardwareReady": ("DCGMError", "DCGMDiagnosticFailure"),
    "NetworkingReady": ("IPAMDNotReady", "IPAMDNotRunning", "NPANotRunning"),
}
"""Reasons of a condition that say something of its monitor, or of pods yet to come, and nothing of the hardware."""


def signals_by_meaning(*meanings: SignalMeaning) -> NodeSignals:
    """Selects the words with one of these meanings."""
    words = [word for writer in WRITERS for word in writer.signals if word.meaning in meanings]
    return NodeSignals(*(tuple(w.name for w in words if w.kind == kind) for kind in ("taint", "condition", "label")))


KNOWN_SIGNALS = signals_by_meaning("ends", "sick")
"""Acted upon where a job names none of its own."""

INFORMATIONAL_SIGNALS = signals_by_meaning("shown")
"""Shown beside the node in any case."""
