"""Panels about saves: checkpoint latency, each phase of it, and what is safe because of them. Pure; part of the dashboards."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries

from dashboards.panels import JOB, Bounds, heat, lines, now, number, query

LATENCY = {
    "stall": f"surefoot_checkpoint_stall_seconds_bucket{{{JOB}}}",
    "replicated": f'surefoot_checkpoint_duration_seconds_bucket{{{JOB}, tier="memory", phase="replicate"}}',
    "persistent": f'surefoot_checkpoint_duration_seconds_bucket{{{JOB}, tier="persistent", phase="upload"}}',
}
"""Checkpoint latency: how long saves take until each stage of safety, by the histogram that measures it."""

LATENCY_BOUNDS: dict[str, Bounds] = {
    "stall": {0: "green", 0.1: "orange", 1: "red"},
    "memory": {0: "green", 10: "orange", 60: "red"},
    "persistent": {0: "green", 300: "orange", 1800: "red"},
}


def latency_now(by: str, legend: str) -> stat.Panel:
    """The 99th percentile of each stage. `by`: labels of each series; `legend`: what stands before the stage."""
    queries = (
        now(
            f"histogram_quantile(0.99, sum by ({', '.join(filter(None, (by, 'le')))}) (increase({buckets}[10m])))",
            f"{legend}{stage}",
        )
        for stage, buckets in LATENCY.items()
    )
    return number(
        "Checkpoint latency",
        "99th percentile of the last ten minutes: training blocked (stall), copied to a memory server, uploaded.",
        "s",
        *queries,
        bounds_by_query=tuple(LATENCY_BOUNDS.values()),
        width=9,
    )


def latency_over_time() -> list[prometheus.Dataquery]:
    """Median and 99th percentile of each stage."""
    return [
        query(f"histogram_quantile({share}, sum by (le) (rate({buckets}[$__rate_interval])))", f"{stage} {name}")
        for stage, buckets in LATENCY.items()
        for share, name in ((0.5, "median"), (0.99, "p99"))
    ]


def failed() -> timeseries.Panel:
    """What was not saved."""
    return lines(
        "Saves that failed",
        "Rank saves that could not be written to a tier, by reason; fenced: an older generation tried, rightly rejected.",
        "none",
        query(
            f"sum by (tier, reason) (increase(surefoot_checkpoint_failures_total{{{JOB}}}[$__rate_interval]))",
            "{{tier}} {{reason}}",
        ),
        query(f"sum(increase(surefoot_uploads_abandoned_total{{{JOB}}}[$__rate_interval]))", "uploads abandoned"),
        query(
            f"sum(increase(surefoot_incomplete_checkpoints_total{{{JOB}}}[$__rate_interval]))",
            "checkpoints never complete",
        ),
    )


def phases() -> dashboard.Row:
    """Every phase of a save."""
    row = dashboard.Row("Each phase of a save")
    phases = {
        ("staging", "stage"): ("Stage", "A rank's state into staging memory, most of it during the next step."),
        ("memory", "replicate"): ("Replicate", "One rank save to one memory server."),
        ("memory", "commit"): ("Commit", "The index entry of one rank save on one memory server."),
        ("persistent", "upload"): ("Upload", "One rank save from memory to the persistent tier."),
    }
    for (tier, phase), (title, about) in phases.items():
        buckets = f'surefoot_checkpoint_duration_seconds_bucket{{{JOB}, tier="{tier}", phase="{phase}"}}'
        row.with_panel(heat(f"{title} ({tier})", about, buckets))
    row.with_panel(
        heat(
            "Stall",
            "How long one save blocked one rank's training.",
            f"surefoot_checkpoint_stall_seconds_bucket{{{JOB}}}",
            width=8,
        )
    )
    spread = f"surefoot_checkpoint_duration_seconds_bucket{{{JOB}}}[$__rate_interval]"
    row.with_panel(
        lines(
            "Latency by tier and phase",
            "99th percentile of rank saves.",
            "s",
            query(f"histogram_quantile(0.99, sum by (tier, phase, le) (rate({spread})))", "{{tier}} {{phase}}"),
            logarithmic=True,
        )
    )
    stalled, steps = "surefoot_checkpoint_stall_seconds_sum", "surefoot_step_duration_seconds_sum"
    row.with_panel(
        lines(
            "Share of training time spent stalled",
            "Stall of all ranks divided by step time of all workers: with several ranks a worker, divide by their number.",
            "percentunit",
            query(
                f"sum by (namespace, job) (rate({stalled}{{{JOB}}}[$__rate_interval]))"
                f" / sum by (namespace, job) (rate({steps}{{{JOB}}}[$__rate_interval]))",
                "{{job}}",
            ),
            bounds={0: "green", 0.1: "red"},
        )
    )
    return row


def safety() -> dashboard.Row:
    """What a failure now would leave."""
    row = dashboard.Row("What is safe")
    row.with_panel(
        lines(
            "Steps behind",
            "Steps that would be run again if all trainers failed now, by tier.",
            "none",
            query(
                f"clamp_min(max by (namespace, job) (surefoot_job_step{{{JOB}}}) - on (namespace, job) group_right ()"
                f" max by (namespace, job, tier) (surefoot_checkpoint_complete_step{{{JOB}}}), 0)",
                "{{job}} {{tier}}",
            ),
        )
    )
    row.with_panel(
        lines(
            "Copies",
            "Copies of the newest complete checkpoint in memory, the minimum over its ranks.",
            "none",
            query(f"min by (namespace, job) (surefoot_checkpoint_copies{{{JOB}}})", "{{job}}"),
        )
    )
    row.with_panel(
        lines(
            "Bytes written",
            "By tier; the memory tier counts every copy.",
            "Bps",
            query(f"sum by (tier) (rate(surefoot_checkpoint_bytes_total{{{JOB}}}[$__rate_interval]))", "{{tier}}"),
        )
    )
    row.with_panel(
        lines(
            "Saves that were skipped",
            "Due saves for which no slot was free, and the exponent: every 2^exponent-th due step is saved.",
            "none",
            query(
                f"sum by (namespace, job) (increase(surefoot_checkpoint_skipped_total{{{JOB}}}[$__rate_interval]))",
                "{{job}} skipped",
            ),
            query(f"max by (namespace, job) (surefoot_checkpoint_interval_exponent{{{JOB}}})", "{{job}} exponent"),
        )
    )
    row.with_panel(
        lines(
            "Steps between saves",
            "By tier, set by the job or chosen by the operator; the job's status has the reason.",
            "none",
            query(f"max by (namespace, job, tier) (surefoot_checkpoint_interval_steps{{{JOB}}})", "{{job}} {{tier}}"),
        )
    )
    row.with_panel(
        lines(
            "Saves under way",
            "Checkpoints staged on a worker and not yet on all their memory servers, the maximum of any worker.",
            "none",
            query(f"max by (namespace, job) (surefoot_checkpoint_pending{{{JOB}}})", "{{job}}"),
        )
    )
    return row
