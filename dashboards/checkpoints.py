"""The dashboard of checkpoint latency: how long saves take and where, what is safe, what failures cost.

Pure: a value of the foundation SDK. docs/operations.md explains each metric; tests/integration/test_dashboards.py runs
every expression against a Prometheus that scraped a real run.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards import living, saving
from dashboards.panels import JOB, age, choice, mark, number

UID = "surefoot-checkpoints"


def built() -> models.Dashboard:
    """The whole of it."""
    whole = (
        dashboard.Dashboard("Surefoot: checkpoints and recovery")
        .uid(UID)
        .description("Checkpoint latency by tier and phase, what is safe, and what failures cost each training job.")
        .tags(["surefoot"])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("10s")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(choice("namespace", "Namespace", "label_values(surefoot_job_phase, namespace)"))
        .with_variable(choice("job", "Job", 'label_values(surefoot_job_phase{namespace=~"$namespace"}, job)'))
        .annotation(
            mark(
                "Incidents",
                "red",
                f"max by (namespace, job, kind) (surefoot_incident_timestamp_seconds{{{JOB}}}) * 1000",
                "{{kind}}",
                at_value=True,
            )
        )
        .annotation(
            mark(
                "Recovering",
                "orange",
                f'max by (namespace, job, phase) (surefoot_job_phase{{{JOB}, phase=~"Recovering|Resizing"}}) == 1',
                "{{phase}}",
                at_value=False,
            )
        )
    )
    for add in (now, saving.latency, saving.safety, living.recovery, living.training, living.memory, living.operator):
        add(whole)
    built = whole.build()
    for place, panel in enumerate(built.panels or [], 1):
        panel.id_val = place
    return built


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
            "1: a failure now would find a complete checkpoint with all its copies, or in the persistent tier.",
            "none",
            f"min by (namespace, job) (surefoot_checkpoint_protected{{{JOB}}})",
            "{{job}}",
            {0: "red", 1: "green"},
        )
    )
    whole.with_panel(
        number(
            "Age of the newest checkpoint",
            "Since the newest complete checkpoint in memory was first seen to be complete.",
            "s",
            age(f'{JOB}, tier="memory"'),
            "{{job}}",
            {0: "green", 300: "orange", 1800: "red"},
        )
    )
    whole.with_panel(
        number(
            "Copies",
            "Of the newest complete checkpoint in memory, the least over its ranks.",
            "none",
            f"min by (namespace, job) (surefoot_checkpoint_copies{{{JOB}}})",
            "{{job}}",
            {0: "red", 1: "orange", 2: "green"},
        )
    )
    whole.with_panel(
        number(
            "World",
            "Ranks in the committed world.",
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
