"""What every dashboard begins and ends with: its choices, marks, links and the numbers of its panels.

Pure but for reading the alerts, from which panels have their links to runbooks. Called by each dashboard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import yaml
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import JOB, choice, mark

ALERTS = Path(__file__).parents[1] / "charts" / "surefoot" / "files" / "alerts.yaml"
BOARDS = {"surefoot-fleet": "Surefoot: fleet", "surefoot-checkpoints": "Surefoot: checkpoints and recovery"}
"""Dashboards by their uid; each links to the others."""
RUNBOOKS = "docs/alerts.md"
"""Value of the variable `runbooks`; the chart replaces it by the URL in `metrics.prometheusRule.runbookUrl`."""


def framed(uid: str, about: str) -> dashboard.Dashboard:
    """A dashboard without panels."""
    whole = (
        dashboard.Dashboard(BOARDS[uid])
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
        .with_variable(dashboard.ConstantVariable("runbooks").value(RUNBOOKS))
    )
    for other, name in BOARDS.items():
        if other != uid:
            link = dashboard.DashboardLink(name).type(models.DashboardLinkType.LINK).url(f"/d/{other}")
            whole.link(link.keep_time(True).include_vars(True))
    return whole


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
    """With its panels numbered, and linked to the runbooks of the alerts that name them."""
    built = whole.build()
    alerts = _alerts_by_panel()
    for place, panel in enumerate(_panels(built), 1):
        panel.id_val = place
        if isinstance(panel, models.Panel) and panel.title in alerts:
            panel.links = [_runbook(alert) for alert in alerts[panel.title]]
    return built


def _panels(board: models.Dashboard) -> Iterator[models.Panel | models.RowPanel]:
    """Every row and panel, also of collapsed rows."""
    for panel in board.panels or []:
        yield panel
        yield from panel.panels if isinstance(panel, models.RowPanel) else ()


def _alerts_by_panel() -> dict[str, list[str]]:
    alerts: dict[str, list[str]] = defaultdict(list)
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            alerts[rule["annotations"]["panel"]].append(rule["alert"])
    return alerts


def _runbook(alert: str) -> models.DashboardLink:
    link = dashboard.DashboardLink(f"Runbook of {alert}").type(models.DashboardLinkType.LINK)
    return link.url(f"${{runbooks}}#{alert.lower()}").target_blank(True).build()
