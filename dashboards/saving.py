"""Rows about saves: how long each phase takes, and what is safe because of them. Pure; part of `checkpoints`."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import JOB, age, heat, lines, query


def latency(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Checkpoint latency"))
    phases = {
        ("staging", "stage"): ("Stage", "A rank's state into staging memory, most of it during the next step."),
        ("memory", "replicate"): ("Replicate", "One rank save to one memory server."),
        ("memory", "commit"): ("Commit", "The index entry of one rank save on one memory server."),
        ("persistent", "upload"): ("Upload", "One rank save from memory to the persistent tier."),
    }
    for (tier, phase), (title, about) in phases.items():
        buckets = f'surefoot_checkpoint_duration_seconds_bucket{{{JOB}, tier="{tier}", phase="{phase}"}}'
        whole.with_panel(heat(f"{title} ({tier})", about, buckets))
    whole.with_panel(
        heat(
            "Stall",
            "How long one save blocked one rank's training.",
            f"surefoot_checkpoint_stall_seconds_bucket{{{JOB}}}",
            width=8,
        )
    )
    spread = f"surefoot_checkpoint_duration_seconds_bucket{{{JOB}}}[$__rate_interval]"
    whole.with_panel(
        lines(
            "Latency by tier and phase",
            "Median and 99th percentile of rank saves.",
            "s",
            query(f"histogram_quantile(0.5, sum by (tier, phase, le) (rate({spread})))", "{{tier}} {{phase}} median"),
            query(f"histogram_quantile(0.99, sum by (tier, phase, le) (rate({spread})))", "{{tier}} {{phase}} 99 %"),
        )
    )
    stalled, steps = "surefoot_checkpoint_stall_seconds_sum", "surefoot_step_duration_seconds_sum"
    whole.with_panel(
        lines(
            "Share of training time spent stalled",
            "Stall of all ranks divided by step time of all workers: with several ranks a worker, divide by their number.",
            "percentunit",
            query(
                f"sum by (namespace, job) (rate({stalled}{{{JOB}}}[$__rate_interval]))"
                f" / sum by (namespace, job) (rate({steps}{{{JOB}}}[$__rate_interval]))",
                "{{job}}",
            ),
        )
    )


def safety(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("What is safe"))
    whole.with_panel(
        lines("Age of the newest complete checkpoint", "By tier.", "s", query(age(JOB), "{{job}} {{tier}}"), width=6)
    )
    whole.with_panel(
        lines(
            "Steps behind",
            "Steps that would be run again if all trainers failed now, by tier.",
            "none",
            query(
                f"clamp_min(max by (namespace, job) (surefoot_job_step{{{JOB}}}) - on (namespace, job) group_right ()"
                f" max by (namespace, job, tier) (surefoot_checkpoint_complete_step{{{JOB}}}), 0)",
                "{{job}} {{tier}}",
            ),
            width=6,
        )
    )
    whole.with_panel(
        lines(
            "Copies and protection",
            "Copies of the newest complete checkpoint in memory; whether a failure now would leave one to restore.",
            "none",
            query(f"min by (namespace, job) (surefoot_checkpoint_copies{{{JOB}}})", "{{job}} copies"),
            query(f"min by (namespace, job) (surefoot_checkpoint_protected{{{JOB}}})", "{{job}} protected"),
            width=6,
        )
    )
    whole.with_panel(
        lines(
            "Bytes written",
            "By tier; the memory tier counts every copy.",
            "Bps",
            query(f"sum by (tier) (rate(surefoot_checkpoint_bytes_total{{{JOB}}}[$__rate_interval]))", "{{tier}}"),
            width=6,
        )
    )
    whole.with_panel(
        lines(
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
    )
    whole.with_panel(
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
    whole.with_panel(
        lines(
            "Steps between saves",
            "By tier, set by the job or chosen by the operator; the job's status has the reason.",
            "none",
            query(f"max by (namespace, job, tier) (surefoot_checkpoint_interval_steps{{{JOB}}})", "{{job}} {{tier}}"),
        )
    )
    whole.with_panel(
        lines(
            "Saves under way",
            "Checkpoints staged on a worker and not yet on all their memory servers, the maximum of any worker.",
            "none",
            query(f"max by (namespace, job) (surefoot_checkpoint_pending{{{JOB}}})", "{{job}}"),
        )
    )
