"""The dashboard of all jobs: how many are in which phase, what fails, and which jobs to look at first.

Pure: a value of the foundation SDK. What one job does is on the dashboard of checkpoints and recovery.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards.frame import finished, framed
from dashboards.panels import GOODPUT_BOUNDS, JOB, age, lines, now, number, query, worst
from dashboards.saving import LATENCY, LATENCY_BOUNDS, latency_now

UID = "surefoot-fleet"
MOST = 10
"""Jobs of a panel that shows the worst."""
IN_MEMORY = f'{JOB}, tier="memory"'


def built() -> models.Dashboard:
    """The whole of it."""
    whole = framed(UID, "All training jobs: phases, failures, recoveries, and the jobs that are worst off.")
    _now(whole)
    _worst(whole)
    whole.with_row(_over_time())
    return finished(whole)


def _now(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("All jobs now"))
    running = f'max by (namespace, job) (surefoot_job_phase{{{JOB}, phase="Running"}}) == 1'
    whole.with_panel(latency_now("", ""))
    whole.with_panel(
        number(
            "Mean goodput",
            "Of jobs, each its share of training that was not run again.",
            "percentunit",
            now(f"avg(max by (namespace, job) (surefoot_job_goodput_ratio{{{JOB}}}))", "goodput"),
            bounds=GOODPUT_BOUNDS,
            width=3,
        )
    )
    whole.with_panel(
        number(
            "Jobs in danger",
            "They run, and a failure now would leave no checkpoint to restore.",
            "none",
            now(
                f"sum((min by (namespace, job) (surefoot_checkpoint_protected{{{JOB}}}) == bool 0)"
                f" and on (namespace, job) ({running}))",
                "jobs",
            ),
            bounds={0: "green", 1: "red"},
            width=3,
        )
    )
    whole.with_panel(
        number(
            "Failures of all jobs",
            "Incidents in the time shown, planned changes not counted.",
            "none",
            now(f'round(sum(increase(surefoot_incidents_total{{{JOB}, kind!="planned"}}[$__range])))', "failures"),
            bounds={0: "green", 1: "orange"},
            width=3,
        )
    )
    whole.with_panel(
        number(
            "Jobs",
            "By phase.",
            "none",
            now(f"sum by (phase) (surefoot_job_phase{{{JOB}}}) > 0", "{{phase}}"),
            width=3,
        )
    )
    whole.with_panel(
        number(
            "Memory servers ready",
            "As they report themselves: several a node where the chart's values say so.",
            "none",
            now("sum(surefoot_memory_server_ready)", "memory servers"),
            width=3,
        )
    )


def _over_time() -> dashboard.Row:
    row = dashboard.Row("All jobs over time")
    row.with_panel(
        lines(
            "Jobs by phase",
            "Jobs that wait, train, recover, or have ended.",
            "none",
            query(f"sum by (phase) (surefoot_job_phase{{{JOB}}}) > 0", "{{phase}}"),
        )
    )
    row.with_panel(
        lines(
            "Failures by kind",
            "In the last hour, counted once they led to a new generation.",
            "none",
            query(
                f'round(sum by (kind) (increase(surefoot_incidents_total{{{JOB}, kind!="planned"}}[1h]))) > 0',
                "{{kind}}",
            ),
        )
    )
    first = f'surefoot_recovery_duration_seconds_bucket{{{JOB}, phase="first-step"}}[1h]'
    row.with_panel(
        lines(
            "Time to the first new step",
            "Median and 99th percentile of the recoveries of the last hour.",
            "s",
            query(f"histogram_quantile(0.5, sum by (le) (increase({first})))", "median"),
            query(f"histogram_quantile(0.99, sum by (le) (increase({first})))", "99 %"),
        )
    )
    return row


def _worst(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Where to look first: a job's name opens its dashboard"))
    buckets = f"rate({LATENCY['replicated']}[10m])"
    whole.with_panel(
        worst(
            "Highest checkpoint latency",
            f"The {MOST} jobs whose saves take longest to be replicated: 99th percentile of the last ten minutes.",
            "s",
            f"topk({MOST}, histogram_quantile(0.99, sum by (namespace, job, le) ({buckets})) > 0)",
            "Latency",
            bounds=LATENCY_BOUNDS["memory"],
        )
    )
    whole.with_panel(
        worst(
            "Oldest newest checkpoint",
            f"The {MOST} jobs whose newest complete checkpoint in memory is oldest.",
            "s",
            f"topk({MOST}, max by (namespace, job) ({age(IN_MEMORY)}))",
            "Age",
            bounds={0: "green", 300: "orange", 1800: "red"},
        )
    )
    whole.with_panel(
        worst(
            "Lowest goodput",
            f"The {MOST} jobs with the least.",
            "percentunit",
            f"bottomk({MOST}, max by (namespace, job) (surefoot_job_goodput_ratio{{{JOB}}}))",
            "Goodput",
            ascending=True,
            bounds=GOODPUT_BOUNDS,
        )
    )
    whole.with_panel(
        worst(
            "Most restarts",
            f"The {MOST} jobs with the most, in the last hour.",
            "none",
            f"topk({MOST}, round(sum by (namespace, job) (increase(surefoot_restarts_total{{{JOB}}}[1h]))) > 0)",
            "Restarts",
            bounds={0: "text", 3: "red"},
        )
    )
