"""What every dashboard begins with: its choices, its marks, and the refreshing. Pure; called by each dashboard."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import JOB, choice, mark


def framed(uid: str, title: str, about: str) -> dashboard.Dashboard:
    """A dashboard without panels."""
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["surefoot"])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("10s")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(choice("namespace", "Namespace", "label_values(surefoot_job_phase, namespace)"))
        .with_variable(choice("job", "Job", 'label_values(surefoot_job_phase{namespace=~"$namespace"}, job)'))
    )


def marked(whole: dashboard.Dashboard) -> dashboard.Dashboard:
    """With each job's failures over every panel: too many for all jobs of a cluster."""
    return whole.annotation(
        mark(
            "Incidents",
            "red",
            f"max by (namespace, job, kind) (surefoot_incident_timestamp_seconds{{{JOB}}}) * 1000",
            "{{kind}}",
            at_value=True,
        )
    ).annotation(
        mark(
            "Recovering",
            "orange",
            f'max by (namespace, job, phase) (surefoot_job_phase{{{JOB}, phase=~"Recovering|Resizing"}}) == 1',
            "{{phase}}",
            at_value=False,
        )
    )


def finished(whole: dashboard.Dashboard) -> models.Dashboard:
    """With its panels numbered."""
    built = whole.build()
    for place, panel in enumerate(built.panels or [], 1):
        panel.id_val = place
    return built
