"""The dashboard for on-call: checkpoint latency, recovery and goodput of one or several jobs; all else in closed rows.

Pure: a value of the foundation SDK. docs/monitoring.md explains each metric; tests/integration/test_dashboards.py runs
every expression against a Prometheus that scraped a real run.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards import living, saving
from dashboards.frame import finished, framed, marked
from dashboards.panels import GOODPUT_BOUNDS, JOB, YES_NO, age, lines, now, number, query
from dashboards.saving import LATENCY_BOUNDS, latency_now, latency_over_time

UID = "surefoot-checkpoints"

_RECOVERY_PHASES = ("claimed", "stopped", "fenced", "committed", "first-step")
"""As they follow each other: each panel of phases has this order."""


def built() -> models.Dashboard:
    """The whole of it."""
    frame = framed(UID, "Checkpoint latency by tier and phase, what is safe, and what failures cost each training job.")
    whole = marked(frame)
    _at_a_glance(whole)
    _over_time(whole)
    for row in (
        saving.phases(), saving.safety(), living.recovery(), living.training(), living.memory(), living.operator(),
    ):  # fmt: skip
        whole.with_row(row)
    return finished(whole)


def _at_a_glance(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Now"))
    whole.with_panel(latency_now("namespace, job", "{{job}} "))
    whole.with_panel(
        number(
            "Recovery",
            "From the first sign of a failure to the first new step, the mean of the last hour.",
            "s",
            now(f"{_recovered('sum')} / ({_recovered('count')} > 0)", "{{job}}"),
            bounds={0: "green", 60: "orange", 300: "red"},
            width=3,
        )
    )
    whole.with_panel(
        number(
            "Goodput now",
            "Share of training that was not run again, of all time but suspension.",
            "percentunit",
            now(f"max by (namespace, job) (surefoot_job_goodput_ratio{{{JOB}}})", "{{job}}"),
            bounds=GOODPUT_BOUNDS,
            width=3,
        )
    )
    whole.with_panel(
        number(
            "Phase",
            "The phase that each job is in.",
            "none",
            now(f"max by (namespace, job, phase) (surefoot_job_phase{{{JOB}}}) == 1", "{{job}} {{phase}}"),
            is_name=True,
            width=3,
        )
    )
    here = f"max by (namespace, job) (surefoot_world_size{{{JOB}}})"
    asked = f"max by (namespace, job) (surefoot_requested_world_size{{{JOB}}})"
    whole.with_panel(
        number(
            "Ranks",
            "Ranks in the committed generation, of those that the job asks for.",
            "none",
            now(
                f'count_values by (namespace, job) ("ranks", {here}) * on (namespace, job) group_left (requested)'
                f' count_values by (namespace, job) ("requested", {asked})'
                f" * on (namespace, job) group_left () ({here} / {asked})",
                "{{job}} {{ranks}} of {{requested}}",
            ),
            bounds={0: "red", 0.001: "orange", 1: "green"},
            is_name=True,
            width=3,
        )
    )
    whole.with_panel(
        number(
            "Protected",
            "Whether a failure now would leave a complete checkpoint to restore.",
            "none",
            now(f"min by (namespace, job) (surefoot_checkpoint_protected{{{JOB}}})", "{{job}}"),
            words=YES_NO,
            width=3,
        )
    )


def _recovered(part: str, phase: str = "first-step") -> str:
    """What recoveries of the last hour add to a part of the histogram: its `sum` of seconds, or its `count`."""
    selector = f'surefoot_recovery_duration_seconds_{part}{{{JOB}, phase="{phase}"}}'
    return f"sum by (namespace, job) (increase({selector}[1h]))"


def _over_time(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Latency, recovery, goodput"))
    whole.with_panel(
        lines(
            "Checkpoint latency over time",
            "Median and 99th percentile of rank saves: training blocked, copied to a memory server, uploaded.",
            "s",
            *latency_over_time(),
            width=12,
            logarithmic=True,
            bounds=LATENCY_BOUNDS["memory"],
        )
    )
    median = f"surefoot_step_duration_seconds_bucket{{{JOB}}}[$__rate_interval]"
    interval = (
        f'(max by (namespace, job) (surefoot_checkpoint_interval_steps{{{JOB}, tier="%s"}}) * on (namespace, job)'
        f" histogram_quantile(0.5, sum by (namespace, job, le) (rate({median}))))"
    )
    spread = f'surefoot_checkpoint_duration_seconds_bucket{{{JOB}, tier="%s", phase="%s"}}[$__rate_interval]'
    whole.with_panel(
        lines(
            "Latency as a share of the save interval",
            "99th percentile, divided by the time between two saves to that tier. From 1 on saves are skipped.",
            "percentunit",
            *(
                query(
                    f"histogram_quantile(0.99, sum by (namespace, job, le) (rate({spread % (tier, phase)})))"
                    f" / {interval % tier}",
                    f"{{{{job}}}} {tier}",
                )
                for tier, phase in (("memory", "replicate"), ("persistent", "upload"))
            ),
            width=6,
            bounds={0: "green", 0.5: "orange", 1: "red"},
        )
    )
    whole.with_panel(
        lines(
            "Age of the newest complete checkpoint",
            "By tier. Work since then is lost with a failure now.",
            "s",
            query(age(JOB), "{{job}} {{tier}}"),
            width=6,
            bounds={0: "green", 300: "orange", 1800: "red"},
        )
    )
    ends = {phase: _mean_end(phase) for phase in _RECOVERY_PHASES}
    parts = {
        phase: f"clamp_min({ends[phase]} - {ends[last]}, 0)" for last, phase in zip(ends, list(ends)[1:], strict=False)
    }
    whole.with_panel(
        lines(
            "Recovery by phase",
            "Mean duration of each phase, in their order, over the recoveries of the last hour.",
            "s",
            *(query(part, phase) for phase, part in {"claimed": ends["claimed"], **parts}.items()),
            stacked="bars",
        )
    )
    whole.with_panel(
        lines(
            "Where the seconds of the last hour went",
            "Shares of the job's time, by category.",
            "s",
            query(f"clamp_min(sum by (category) (delta(surefoot_job_time_seconds{{{JOB}}}[1h])), 0)", "{{category}}"),
            stacked="shares",
        )
    )
    whole.with_panel(saving.failed())


def _mean_end(phase: str) -> str:
    selector = f'{{{JOB}, phase="{phase}"}}[1h]'
    return (
        f"sum(increase(surefoot_recovery_duration_seconds_sum{selector}))"
        f" / sum(increase(surefoot_recovery_duration_seconds_count{selector}))"
    )
