"""Defines the runtime's Prometheus metrics: base units, bounded labels.

Each process counts for itself. Under an agent a trainer's counts travel to it (`ipc.metric_deltas`), and the agent exports
for its pod, with the job's name and namespace (`agent.metrics_server`). Without an agent they stand in prometheus_client's
own registry, for the program to export.
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
    "Time of one rank save by tier and phase (staging: stage; memory: replicate, commit; persistent: promote).",
    ["tier", "phase"],
    buckets=BUCKETS_SECONDS,
)
checkpoint_bytes = Counter("surefoot_checkpoint_bytes_total", "Bytes written to a tier.", ["tier"])
unchanged_bytes = Counter(
    "surefoot_checkpoint_unchanged_bytes_total",
    "Bytes that a tier copied of the save before, which were not sent.",
    ["tier"],
)
checkpoint_failures = Counter(
    "surefoot_checkpoint_failures_total", "Rank saves a tier did not take.", ["tier", "reason"]
)
checkpoint_skipped = Counter(
    "surefoot_checkpoint_skipped_total", "Due saves skipped because both slots were still draining."
)
checkpoint_step = Gauge("surefoot_checkpoint_step", "Newest step committed by this worker.", ["tier"])
stall_seconds = Histogram(
    "surefoot_checkpoint_stall_seconds", "Time a save held the training up.", buckets=BUCKETS_SECONDS
)
restore_seconds = Histogram(
    "surefoot_restore_duration_seconds", "Time of one rank's restore.", ["source"], buckets=BUCKETS_SECONDS
)
restore_bytes = Counter("surefoot_restore_bytes_total", "Bytes read to restore.", ["source"])
restore_fallbacks = Counter("surefoot_restore_fallbacks_total", "Ranges read again from another copy.", ["reason"])
fallbacks = Counter(
    "surefoot_fallbacks_total", "Times a slower or simpler way was taken because the usual one failed.", ["kind"]
)
s3_requests = Counter(
    "surefoot_s3_requests_total",
    "Requests to the bucket as they leave: the first try, or one again.",
    ["operation", "attempt"],
)
step_seconds = Histogram(
    "surefoot_step_duration_seconds", "Time of one training step on this worker.", buckets=BUCKETS_SECONDS
)
step = Gauge("surefoot_step", "Last step that every local rank has finished.")
loss = Gauge("surefoot_loss", "Loss of that step; NaN also where the program does not tell it.")
data_epochs = Gauge(
    "surefoot_data_epochs", "Passes over the data that this worker's ranks consumed; NaN where nobody tells."
)
samples = Counter("surefoot_samples_total", "Samples that finished steps of this worker's ranks consumed.")
nonfinite_losses = Counter("surefoot_nonfinite_losses_total", "Steps whose loss was NaN or infinite.")
loss_spikes = Counter(
    "surefoot_loss_spikes_total", "Steps whose loss or gradient norm was far above that of the steps before."
)
generation = Gauge("surefoot_generation", "Epoch whose trainers run here; 0 if none does.")
pending = Gauge("surefoot_checkpoint_pending", "Checkpoints staged here and not yet on all their holders.")
interval_exponent = Gauge(
    "surefoot_checkpoint_interval_exponent", "Every 2^level-th due step is saved, as chosen or backed off to."
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
"""Everything above: what an agent exports."""


def reason_of(error: Exception) -> str:
    """Names a failure in a label, alike at every tier.

    Few words: each is a time series.
    """
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


# a rate sees the first of anything only if the series was there before it
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
