"""The dashboard of checkpoint latency: how long saves take and where, what is safe, what failures cost.

Pure: a value of the foundation SDK. docs/monitoring.md explains each metric; tests/integration/test_dashboards.py runs
every expression against a Prometheus that scraped a real run.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards import living, saving
from dashboards.frame import finished, framed, marked
from dashboards.panels import JOB, age, number

UID = "surefoot-checkpoints"


def built() -> models.Dashboard:
    """The whole of it."""
    frame = framed(
        UID,
        "Surefoot: checkpoints and recovery",
        "Checkpoint latency by tier and phase, what is safe, and what failures cost each training job.",
    )
    whole = marked(frame)
    for add in (now, saving.latency, saving.safety, living.recovery, living.training, living.memory, living.operator):
        add(whole)
    return finished(whole)


def now(whole: dashboard.Dashboard) -> None:
    whole.with_row(dashboard.Row("Now"))
    whole.with_panel(
        number(
            "Phase",
            "The phase that each job is in.",
            "none",
            f"max by (namespace, job, phase) (surefoot_job_phase{{{JOB}}}) == 1",
            "{{job}} {{phase}}",
            is_name=True,
        )
    )
    whole.with_panel(
        number(
            "Protected",
            "1: a failure now would leave a complete checkpoint, with all its copies or in the persistent tier.",
            "none",
            f"min by (namespace, job) (surefoot_checkpoint_protected{{{JOB}}})",
            "{{job}}",
            {0: "red", 1: "green"},
        )
    )
    whole.with_panel(
        number(
            "Age of the newest checkpoint",
            "Since the newest complete checkpoint in memory was first observed complete.",
            "s",
            age(f'{JOB}, tier="memory"'),
            "{{job}}",
            {0: "green", 300: "orange", 1800: "red"},
        )
    )
    whole.with_panel(
        number(
            "Copies",
            "Of the newest complete checkpoint in memory, the minimum over its ranks.",
            "none",
            f"min by (namespace, job) (surefoot_checkpoint_copies{{{JOB}}})",
            "{{job}}",
            {0: "red", 1: "orange", 2: "green"},
        )
    )
    whole.with_panel(
        number(
            "World size",
            "Ranks in the committed generation.",
            "none",
            f"max by (namespace, job) (surefoot_world_size{{{JOB}}})",
            "{{job}}",
        )
    )
    whole.with_panel(
        number(
            "Failures",
            "Incidents in the time shown, planned changes not counted.",
            "none",
            f'round(sum by (namespace, job) (increase(surefoot_incidents_total{{{JOB}, kind!="planned"}}[$__range])))',
            "{{job}}",
            {0: "green", 1: "orange"},
        )
    )
