"""Lists the taints, conditions and labels that other programs put on nodes, and their meaning.

Pure data; used by `observations` for a job without `nodeSignals`. docs/node-health.md has the same table; a test keeps the two
equal. A signal that does not show that the node is unhealthy (a counter, a monitor that lost its own connection, a diagnosis
on which its writer does not act) is only displayed with the node and moves no worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surefoot_operator.api.spec import NodeSignals

SignalMeaning = Literal["ends", "unhealthy", "informational"]
"""ends: the node will be removed; unhealthy: it should not be used; informational: no reason to move workers."""


@dataclass(frozen=True, slots=True)
class KnownNodeSignal:
    """A taint key, `key=value` label or `Type=Status` condition with a known meaning."""

    kind: Literal["taint", "label", "condition"]
    """Kind of the mark on the node."""
    name: str
    """Taint key, `key=value` of a label, or `Type=Status` of a condition."""
    meaning: SignalMeaning
    """Effect of the signal on a job without `nodeSignals`."""


@dataclass(frozen=True, slots=True)
class NodeSignalSource:
    """A program that marks nodes, with its signals."""

    name: str
    """Name of the program."""
    source: str
    """URL of its documentation of these signals, or an anchor in docs/node-health.md."""
    signals: tuple[KnownNodeSignal, ...]
    """Signals that it writes."""


def _signals(
    kind: Literal["taint", "label", "condition"], meaning: SignalMeaning, *names: str
) -> tuple[KnownNodeSignal, ...]:
    return tuple(KnownNodeSignal(kind, name, meaning) for name in names)


def _labels(meaning: SignalMeaning, key: str, *values: str) -> tuple[KnownNodeSignal, ...]:
    return _signals("label", meaning, *(f"{key}={value}" for value in values))


_UPGRADE_STATES = (
    "node-maintenance-required", "cordon-required", "wait-for-jobs-required", "pod-deletion-required", "drain-required",
)  # fmt: skip
"""States in which a driver upgrade waits until pods have left the node. `upgrade-required` is none of them: all nodes have it at
once, and only a few at a time are upgraded."""

SIGNAL_SOURCES = (
    NodeSignalSource(
        "Surefoot", "#reports-to-the-cluster", _signals("condition", "unhealthy", "SurefootUnhealthy=True")
    ),
    NodeSignalSource(
        "Cluster autoscaler",
        "https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md",
        _signals("taint", "ends", "ToBeDeletedByClusterAutoscaler"),
    ),
    NodeSignalSource(
        "Karpenter",
        "https://karpenter.sh/docs/concepts/disruption/",
        _signals("taint", "ends", "karpenter.sh/disrupted"),
    ),
    NodeSignalSource(
        "Node Problem Detector",
        "https://github.com/kubernetes/node-problem-detector/tree/master/config",
        (
            *_signals("condition", "unhealthy", "KernelDeadlock=True", "ReadonlyFilesystem=True", "XfsShutdown=True"),
            *_signals("condition", "unhealthy", "CperHardwareErrorFatal=True"),
            *_signals("condition", "informational", "CorruptDockerOverlay2=True", "KubeletUnhealthy=True"),
            *_signals(
                "condition",
                "informational",
                "ContainerRuntimeUnhealthy=True",
                "NTPProblem=True",
                "FrequentKubeletRestart=True",
            ),
            *_signals("condition", "informational", "FrequentDockerRestart=True", "FrequentContainerdRestart=True"),
            *_signals("condition", "informational", "FrequentUnregisterNetDevice=True"),
        ),
    ),
    NodeSignalSource(
        "NVSentinel",
        "https://docs.nvidia.com/nvsentinel/getting-started/integrations",
        (
            *_labels("unhealthy", "dgxc.nvidia.com/nvsentinel-state", "quarantined", "draining", "drain-succeeded"),
            *_labels(
                "unhealthy", "dgxc.nvidia.com/nvsentinel-state", "drain-failed", "remediating", "remediation-failed"
            ),
            *_signals(
                "taint",
                "unhealthy",
                "nvidia.com/gpu-xid-error",
                "nvidia.com/gpu-nvlink-error",
                "nvidia.com/syslog-xid-error",
            ),
            *_signals("taint", "unhealthy", "nvidia.com/gpu-error"),
            *_signals(
                "condition",
                "unhealthy",
                "GpuMemWatch=True",
                "GpuPcieWatch=True",
                "GpuInforomWatch=True",
                "GpuSmWatch=True",
            ),
            *_signals("condition", "unhealthy", "GpuNvlinkWatch=True", "GpuMcuWatch=True", "GpuPmuWatch=True"),
            *_signals(
                "condition", "unhealthy", "SysLogsXIDError=True", "SysLogsSXIDError=True", "SysLogsGPUFallenOff=True"
            ),
            *_signals("condition", "unhealthy", "NVSwitchFatalError=True", "NVSwitchDown=True"),
            *_signals("condition", "ends", "CSPMaintenance=True"),
            *_signals(
                "condition", "informational", "GpuThermalWatch=True", "GpuPowerWatch=True", "GpuCpusetWatch=True"
            ),
            *_signals(
                "condition", "informational", "GpuDriverWatch=True", "NVSwitchNonFatalError=True", "DCGMError=True"
            ),
            *_signals("condition", "informational", "GpuDcgmConnectivityFailure=True", "SyslogError=True"),
        ),
    ),
    NodeSignalSource(
        "NVIDIA GPU Operator and Network Operator",
        "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-driver-upgrades.html",
        (
            *_labels("ends", "nvidia.com/gpu-driver-upgrade-state", *_UPGRADE_STATES),
            *_labels("ends", "nvidia.com/ofed-driver-upgrade-state", *_UPGRADE_STATES),
            *_labels("informational", "nvidia.com/gpu-driver-upgrade-state", "upgrade-required", "upgrade-failed"),
            *_labels("informational", "nvidia.com/ofed-driver-upgrade-state", "upgrade-required", "upgrade-failed"),
        ),
    ),
    NodeSignalSource(
        "EKS node monitoring agent",
        "https://docs.aws.amazon.com/eks/latest/userguide/node-health-nma.html",
        (
            *_signals("condition", "unhealthy", "AcceleratedHardwareReady=False", "NetworkingReady=False"),
            *_signals(
                "condition", "informational", "KernelReady=False", "StorageReady=False", "ContainerRuntimeReady=False"
            ),
        ),
    ),
    NodeSignalSource(
        "AWS node termination handler",
        "https://github.com/aws/aws-node-termination-handler",
        (
            *_signals("taint", "ends", "aws-node-termination-handler/spot-itn"),
            *_signals("taint", "ends", "aws-node-termination-handler/scheduled-maintenance"),
            *_signals("taint", "ends", "aws-node-termination-handler/asg-lifecycle-termination"),
            *_signals("taint", "informational", "aws-node-termination-handler/rebalance-recommendation"),
        ),
    ),
    NodeSignalSource(
        "SageMaker HyperPod",
        "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-node-labels.html",
        _labels(
            "unhealthy",
            "sagemaker.amazonaws.com/node-health-status",
            *("Unschedulable", "UnschedulablePendingReplacement", "UnschedulablePendingReboot"),
        ),
    ),
    NodeSignalSource(
        "GKE",
        "https://docs.cloud.google.com/kubernetes-engine/docs/concepts/handle-disruption-gpu-tpu",
        (
            *_signals("taint", "ends", "cloud.google.com/impending-node-termination"),
            *_labels("ends", "cloud.google.com/active-node-maintenance", "ONGOING"),
        ),
    ),
    NodeSignalSource(
        "AKS",
        "https://learn.microsoft.com/en-us/azure/aks/node-problem-detector",
        (
            *_signals("taint", "ends", "remediator.kubernetes.azure.com/unschedulable"),
            *_signals("condition", "ends", "VMEventScheduled=True"),
            *_signals(
                "condition",
                "unhealthy",
                "FilesystemCorruptionProblem=True",
                "GPUMissing=True",
                "NVLinkStatusInactive=True",
            ),
            *_signals("condition", "informational", "XIDErrors=True", "IBLinkFlapping=True", "GPUClockThrottling=True"),
            *_signals("condition", "informational", "UnhealthyNvidiaDevicePlugin=True", "KubeletProblem=True"),
            *_signals("condition", "informational", "ContainerRuntimeProblem=True"),
        ),
    ),
    NodeSignalSource(
        "Nebius",
        "https://docs.nebius.com/kubernetes/maintenance/health-checks",
        _signals("condition", "unhealthy", "NebiusGPUError=True", "NebiusBootDiskIOError=True"),
    ),
)

IGNORED_REASONS = {
    "AcceleratedHardwareReady": ("DCGMError", "DCGMDiagnosticFailure"),
    "NetworkingReady": ("IPAMDNotReady", "IPAMDNotRunning", "NPANotRunning"),
}
"""Reasons, by condition type, that concern the monitor or future pods and not the hardware: such a condition is ignored."""


def signals_by_meaning(*meanings: SignalMeaning) -> NodeSignals:
    """Returns all known signals with one of these meanings."""
    signals = [signal for source in SIGNAL_SOURCES for signal in source.signals if signal.meaning in meanings]
    return NodeSignals(*(tuple(s.name for s in signals if s.kind == kind) for kind in ("taint", "condition", "label")))


KNOWN_SIGNALS = signals_by_meaning("ends", "unhealthy")
"""Signals that move workers off a node, for jobs without `nodeSignals`."""

INFORMATIONAL_SIGNALS = signals_by_meaning("informational")
"""Signals that are only displayed with the node."""
