"""Defines the runtime's Prometheus metrics: base units, bounded labels.

Each process counts for itself. A trainer sends its counts to its agent (`ipc.metric_deltas`), which exports those of the
whole pod, with the job's name and namespace (`agent.metrics_server`). Without an agent they are in prometheus_client's
default registry, for the program to export.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from surefoot.errors import (
    ChunkMissing,
    Corrupt,
    Fenced,
    StagingMemoryUnavailable,
    SurefootError,
    TierFull,
    TierUnavailable,
)
from surefoot.protocol.timeouts import BUCKETS_SECONDS

checkpoint_seconds = Histogram(
    "surefoot_checkpoint_duration_seconds",
    "Time of one rank save by tier and phase (staging: stage; memory: replicate, commit; persistent: upload).",
    ["tier", "phase"],
    buckets=BUCKETS_SECONDS,
)
checkpoint_bytes = Counter("surefoot_checkpoint_bytes_total", "Bytes written to a tier.", ["tier"])
unchanged_bytes = Counter(
    "surefoot_checkpoint_unchanged_bytes_total",
    "Bytes that a tier copied from the previous save instead of receiving them.",
    ["tier"],
)
checkpoint_failures = Counter(
    "surefoot_checkpoint_failures_total", "Rank saves that could not be written to a tier.", ["tier", "reason"]
)
checkpoint_skipped = Counter(
    "surefoot_checkpoint_skipped_total", "Due saves skipped because both slots were still being flushed."
)
checkpoint_step = Gauge("surefoot_checkpoint_step", "Newest step committed by this worker.", ["tier"])
stall_seconds = Histogram(
    "surefoot_checkpoint_stall_seconds", "Time a save blocked the training.", buckets=BUCKETS_SECONDS
)
restore_seconds = Histogram(
    "surefoot_restore_duration_seconds", "Time of one rank's restore.", ["source"], buckets=BUCKETS_SECONDS
)
restore_bytes = Counter("surefoot_restore_bytes_total", "Bytes read to restore.", ["source"])
restore_fallbacks = Counter("surefoot_restore_fallbacks_total", "Ranges read again from another copy.", ["reason"])
fallbacks = Counter("surefoot_fallbacks_total", "Times a fallback was used because the usual way failed.", ["kind"])
s3_requests = Counter(
    "surefoot_s3_requests_total",
    "Requests sent to the bucket: first attempts and retries.",
    ["operation", "attempt"],
)
step_seconds = Histogram(
    "surefoot_step_duration_seconds", "Time of one training step on this worker.", buckets=BUCKETS_SECONDS
)
step = Gauge("surefoot_step", "Last step that every local rank has finished.")
loss = Gauge("surefoot_loss", "Loss of that step; NaN also if the program does not report it.")
data_epochs = Gauge(
    "surefoot_data_epochs", "Passes over the data that this worker's ranks consumed; NaN if not reported."
)
samples = Counter("surefoot_samples_total", "Samples that finished steps of this worker's ranks consumed.")
nonfinite_losses = Counter("surefoot_nonfinite_losses_total", "Steps whose loss was NaN or infinite.")
loss_spikes = Counter(
    "surefoot_loss_spikes_total", "Steps whose loss or gradient norm was far above that of the steps before."
)
generation = Gauge("surefoot_generation", "Generation whose trainers run here; 0 if none does.")
pending = Gauge("surefoot_checkpoint_pending", "Checkpoints staged here and not yet on all their memory servers.")
interval_exponent = Gauge(
    "surefoot_checkpoint_interval_exponent",
    "Every 2^exponent-th due step is saved, as set by the coordinator or by backoff.",
)

FAMILIES = (
    checkpoint_seconds,
    checkpoint_bytes,
    unchanged_bytes,
    checkpoint_failures,
    checkpoint_skipped,
    checkpoint_step,
    stall_seconds,
    restore_seconds,
    restore_bytes,
    restore_fallbacks,
    fallbacks,
    s3_requests,
    step_seconds,
    step,
    loss,
    data_epochs,
    samples,
    nonfinite_losses,
    loss_spikes,
    generation,
    pending,
    interval_exponent,
)
"""All metrics above, which an agent exports."""


def reason_of(error: Exception) -> str:
    """Returns the label value for an error, the same for every tier; few values, since each is a time series."""
    match error:
        case Fenced():
            return "fenced"
        case TierFull():
            return "full"
        case ChunkMissing():
            return "missing"
        case TierUnavailable():
            return "unavailable"
        case Corrupt():
            return "corrupt"
        case StagingMemoryUnavailable():
            return "memory"
        case SurefootError():
            return "refused"
        case _:
            return "unexpected"


# a rate counts the first event only if the series existed before it
for _tier, _phase in (("staging", "stage"), ("memory", "replicate"), ("memory", "commit"), ("persistent", "upload")):
    checkpoint_seconds.labels(_tier, _phase)
    checkpoint_bytes.labels(_tier)
for _tier in ("memory", "persistent"):
    unchanged_bytes.labels(_tier)
for _source in ("staging", "staging+memory", "memory", "persistent", "mixed"):
    restore_seconds.labels(_source)
for _source in ("staging", "memory", "persistent", "peer"):
    restore_bytes.labels(_source)
for _tier, _reasons in {
    "staging": ("memory", "copy", "changed"),
    "memory": ("fenced", "full", "missing", "unavailable"),
    "persistent": ("fenced", "full", "missing", "unavailable", "corrupt", "refused"),
}.items():
    for _reason in _reasons:
        checkpoint_failures.labels(_tier, _reason)
for _reason in ("unreachable", "missing", "corrupt", "disagreement", "exchange", "peer", "cut"):
    restore_fallbacks.labels(_reason)
