"""The dashboard of all jobs: how many are in which phase, what fails, and which jobs to look at first.

Pure: a value of the foundation SDK. What one job does is on the dashboard of checkpoints and recovery.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards.frame import finished, framed
from dashboards.panels import JOB, age, lines, number, query

UID = "surefoot-fleet"
TITLE = "Surefoot: fleet"
MOST = 10
"""Jobs of a panel that shows the worst."""


def built() -> models.Dashboard:
    """The whole of it."""
    whole = framed(UID, TITLE, "All training jobs: phases, failures, recoveries, and the jobs that are worst off.")
    _now(whole)
    _over_time(whole)
    _worst(whole)
    return finished(whole)


def _now(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("All jobs now"))
    running = f'max by (namespace, job) (surefoot_job_phase{{{JOB}, phase="Running"}}) == 1'
    whole.with_panel(
        number("Jobs", "By phase.", "none", f"sum by (phase) (surefoot_job_phase{{{JOB}}}) > 0", "{{phase}}")
    )
    whole.with_panel(
        number("Ranks", "In committed generations.", "none", f"sum(surefoot_world_size{{{JOB}}})", "ranks")
    )
    whole.with_panel(
        number(
            "Jobs in danger",
            "They run, and a failure now would leave no checkpoint to restore.",
            "none",
            f"sum((min by (namespace, job) (surefoot_checkpoint_protected{{{JOB}}}) == bool 0)"
            f" and on (namespace, job) ({running}))",
            "jobs",
            {0: "green", 1: "red"},
        )
    )
    whole.with_panel(
        number(
            "Failures of all jobs",
            "Incidents in the time shown, planned changes not counted.",
            "none",
            f'round(sum(increase(surefoot_incidents_total{{{JOB}, kind!="planned"}}[$__range])))',
            "failures",
            {0: "green", 1: "orange"},
        )
    )
    whole.with_panel(
        number(
            "Mean goodput",
            "Of jobs, each its share of training that was not run again.",
            "percentunit",
            f"avg(max by (namespace, job) (surefoot_job_goodput_ratio{{{JOB}}}))",
            "goodput",
        )
    )
    whole.with_panel(
        number(
            "Memory servers ready",
            "As they report themselves: several a node where the chart's values say so.",
            "none",
            "sum(surefoot_memory_server_ready)",
            "memory servers",
        )
    )


def _over_time(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("All jobs over time"))
    whole.with_panel(
        lines(
            "Jobs by phase",
            "Jobs that wait, train, recover, or have ended.",
            "none",
            query(f"sum by (phase) (surefoot_job_phase{{{JOB}}}) > 0", "{{phase}}"),
        )
    )
    whole.with_panel(
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
    whole.with_panel(
        lines(
            "Time to the first new step",
            "Median and 99th percentile of the recoveries of the last hour.",
            "s",
            query(f"histogram_quantile(0.5, sum by (le) (increase({first})))", "median"),
            query(f"histogram_quantile(0.99, sum by (le) (increase({first})))", "99 %"),
        )
    )


def _worst(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Where to look first"))
    in_memory = f'{JOB}, tier="memory"'
    whole.with_panel(
        lines(
            "Lowest goodput",
            f"The {MOST} jobs with the least.",
            "percentunit",
            query(
                f"bottomk({MOST}, max by (namespace, job) (surefoot_job_goodput_ratio{{{JOB}}}))",
                "{{namespace}}/{{job}}",
            ),
        )
    )
    whole.with_panel(
        lines(
            "Oldest newest checkpoint",
            f"The {MOST} jobs whose newest complete checkpoint in memory is oldest.",
            "s",
            query(f"topk({MOST}, {age(in_memory)})", "{{namespace}}/{{job}}"),
        )
    )
    whole.with_panel(
        lines(
            "Most restarts",
            f"The {MOST} jobs with the most, in the last hour.",
            "none",
            query(
                f"topk({MOST}, round(sum by (namespace, job) (increase(surefoot_restarts_total{{{JOB}}}[1h]))) > 0)",
                "{{namespace}}/{{job}}",
            ),
        )
    )
