"""Each alert, judged by promtool over series that should and should not raise it; and the dashboards' files.

Whether the expressions return data of a real job is tests/integration/test_dashboards.py's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.expressions import panels_of
from support.servers.prometheus import program

ROOT = Path(__file__).parents[2]
FILES = ROOT / "charts" / "surefoot" / "files"
ALERTS = FILES / "alerts.yaml"
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))
RUNBOOK = ROOT / "docs" / "alerts.md"
METRICS = ROOT / "docs" / "monitoring.md"
EVENTS = ROOT / "docs" / "events.md"

J = 'namespace="n",job="j"'
RUNNING = (f'surefoot_job_phase{{{J},phase="Running"}}', "1x120")
SUSPENDED = (f'surefoot_job_phase{{{J},phase="Running"}}', "0x120")


@dataclass(frozen=True)
class Case:
    """Series, a value a minute, that raise the alert by `minutes`, and such that never do."""

    raised: tuple[tuple[str, str], ...]
    quiet: tuple[tuple[str, str], ...]
    minutes: int = 60
    labels: str = J


def of_job(name: str, labels: str = "") -> str:
    return f"{name}{{{J}{',' if labels else ''}{labels}}}"


def one(series: str, raised: str, quiet: str, **more: Any) -> Case:
    return Case(((series, raised),), ((series, quiet),), **more)


FAILURES = "surefoot_checkpoint_failures_total"
AGE = "surefoot_checkpoint_complete_timestamp_seconds"

CASES = {
    "SurefootJobUnprotected": Case(
        ((of_job("surefoot_checkpoint_protected"), "0x120"), RUNNING),
        ((of_job("surefoot_checkpoint_protected"), "0x120"), SUSPENDED),
        15,
    ),
    # the tool's clock begins at 0: the checkpoint is of the second minute
    "SurefootCheckpointOld": Case(
        ((of_job(AGE, 'tier="memory"'), "120x120"), RUNNING),
        ((of_job(AGE, 'tier="memory"'), "0+60x120"), RUNNING),
        40,
    ),
    "SurefootJobRecovering": one(of_job("surefoot_job_phase", 'phase="Recovering"'), "1x120", "1x5 0x115", minutes=15),
    "SurefootJobFailed": one(of_job("surefoot_job_phase", 'phase="Failed"'), "1x120", "0x120"),
    "SurefootFrequentFailures": one(of_job("surefoot_incidents_total", 'kind="hang"'), "0+1x120", "0x60 1x60"),
    "SurefootAgentsMissing": Case(
        ((of_job("surefoot_agents_connected"), "3x10 0x110"), RUNNING),
        ((of_job("surefoot_agents_connected"), "3x10 0x1 3x109"), RUNNING),
        30,
    ),
    "SurefootSavesSkipped": one(of_job("surefoot_checkpoint_skipped_total", 'worker="0"'), "0+1x120", "0x30 1x90"),
    "SurefootSavesFailing": one(
        of_job(FAILURES, 'tier="memory",reason="full",worker="0"'),
        "0+1x120",
        "0x120",
        labels=f'{J},tier="memory",reason="full"',
    ),
    "SurefootUploadFailing": one(
        of_job(FAILURES, 'tier="persistent",reason="unavailable",worker="0"'),
        "0+1x120",
        "0x120",
        labels=f'{J},reason="unavailable"',
    ),
    "SurefootStallHigh": Case(
        (
            (of_job("surefoot_checkpoint_stall_seconds_sum", 'worker="0"'), "0+12x120"),
            (of_job("surefoot_step_duration_seconds_sum", 'worker="0"'), "0+60x120"),
        ),
        (
            (of_job("surefoot_checkpoint_stall_seconds_sum", 'worker="0"'), "0+1x120"),
            (of_job("surefoot_step_duration_seconds_sum", 'worker="0"'), "0+60x120"),
        ),
    ),
    "SurefootCopiesCorrupt": one(
        of_job("surefoot_restore_fallbacks_total", 'reason="corrupt",worker="0"'), "0x50 1x70", "0x120"
    ),
    "SurefootCheckpointsTooLarge": Case(
        (
            (of_job("surefoot_memory_needed_bytes", 'node="a"'), "11x120"),
            (of_job("surefoot_memory_available_bytes", 'node="a"'), "10x120"),
        ),
        (
            (of_job("surefoot_memory_needed_bytes", 'node="a"'), "10x120"),
            (of_job("surefoot_memory_available_bytes", 'node="a"'), "10x120"),
        ),
        15,
    ),
    # one of a node's two servers is full, or away; the other's figures neither hide nor share that
    "SurefootMemoryTierNearlyFull": Case(
        (
            ('surefoot_memory_server_used_bytes{node="a",server="0"}', "10x120"),
            ('surefoot_memory_server_max_bytes{node="a",server="0"}', "100x120"),
            ('surefoot_memory_server_used_bytes{node="a",server="1"}', "95x120"),
            ('surefoot_memory_server_max_bytes{node="a",server="1"}', "100x120"),
        ),
        (
            ('surefoot_memory_server_used_bytes{node="a",server="0"}', "95x120"),
            ('surefoot_memory_server_max_bytes{node="a",server="0"}', "0x120"),
            ('surefoot_memory_server_used_bytes{node="a",server="1"}', "85x120"),
            ('surefoot_memory_server_max_bytes{node="a",server="1"}', "100x120"),
        ),
        labels='node="a",server="1"',
    ),
    "SurefootMemoryTierEvicting": Case(
        (
            ('surefoot_memory_server_evicted_keys_total{node="a",server="0"}', "0x120"),
            ('surefoot_memory_server_evicted_keys_total{node="a",server="1"}', "0x55 9x65"),
        ),
        (
            ('surefoot_memory_server_evicted_keys_total{node="a",server="0"}', "0x120"),
            ('surefoot_memory_server_evicted_keys_total{node="a",server="1"}', "0x120"),
        ),
        labels='node="a"',
    ),
    "SurefootMemoryTierDown": Case(
        (
            ('surefoot_memory_server_up{node="a",server="0"}', "1x120"),
            ('surefoot_memory_server_up{node="a",server="1"}', "0x120"),
        ),
        (
            ('surefoot_memory_server_up{node="a",server="0"}', "1x120"),
            ('surefoot_memory_server_up{node="a",server="1"}', "1x120"),
        ),
        labels='node="a"',
    ),
    "SurefootMemoryServerUnreachable": one(of_job("surefoot_memory_servers", 'state="Unreachable"'), "1x120", "0x120"),
    "SurefootNoLeader": Case(
        (
            ('surefoot_operator_leader{instance="a",shard="0"}', "1x120"),
            ('surefoot_operator_leader{instance="b",shard="0"}', "0x120"),
            ('surefoot_operator_leader{instance="a",shard="1"}', "0x120"),
            ('surefoot_operator_leader{instance="b",shard="1"}', "0x120"),
        ),
        (
            ('surefoot_operator_leader{instance="a",shard="0"}', "0x120"),
            ('surefoot_operator_leader{instance="b",shard="0"}', "1x120"),
        ),
        labels="",
    ),
    "SurefootWatchStale": one('surefoot_watch_age_seconds{kind="nodes"}', "0+60x120", "30x120", labels='kind="nodes"'),
    "SurefootApiRefused": one(
        'surefoot_api_refused_calls{verb="watch",resource="nodes",cause="forbidden"}',
        "1x120",
        "1x1 0x118",
        minutes=15,
        labels='verb="watch",resource="nodes",cause="forbidden"',
    ),
    "SurefootReconcileFailing": one(
        'surefoot_reconcile_failures_total{error="FabricError"}', "0+5x120", "0x50 1x70", labels=""
    ),
    "SurefootAgentConnectionsRejected": one(
        'surefoot_agent_connections_rejected_total{reason="token"}', "0+2x120", "0x50 1x70", labels='reason="token"'
    ),
}


def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}


def test_promtool_reads_the_rules() -> None:
    found = subprocess.run(
        [program("promtool"), "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_alert_has_a_case() -> None:
    assert sorted(CASES) == sorted(rules())


@pytest.mark.parametrize("alert", sorted(CASES))
def test_the_alert_is_raised_when_it_should_be_and_not_when_it_should_not(alert: str, tmp_path: Path) -> None:
    case = CASES[alert]
    expected = [{"labels": _raised(alert, case.labels), "value": 1}]
    document = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [_test(alert, case.raised, case.minutes, expected), _test(alert, case.quiet, case.minutes, [])],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(document))
    found = subprocess.run(
        [program("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def _test(alert: str, series: tuple[tuple[str, str], ...], minutes: int, expected: list[Any]) -> dict[str, Any]:
    firing = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [{"expr": firing, "eval_time": f"{minutes}m", "exp_samples": expected}],
    }


def _raised(alert: str, labels: str) -> str:
    severity = rules()[alert]["labels"]["severity"]
    own = [f'alertname="{alert}"', 'alertstate="firing"', f'severity="{severity}"', *filter(None, [labels])]
    return f"ALERTS{{{','.join(own)}}}"


def test_every_alert_says_what_why_and_where_to_read_on() -> None:
    sections = {_anchor(line.lstrip("# ")) for line in RUNBOOK.read_text().splitlines() if line.startswith("#")}
    board = json.loads((FILES / "dashboards" / "surefoot-checkpoints.json").read_text())
    shown = {panel["title"] for panel in panels_of(board) if panel["type"] != "row"}
    for name, rule in rules().items():
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert set(rule["annotations"]) == {"summary", "description", "panel", "runbook"}, name
        assert rule["annotations"]["panel"] in shown, name
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
        assert name.lower() in sections, f"docs/alerts.md has no section {name}"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")


def test_the_dashboards_are_what_their_code_makes_and_grafanas_types_read() -> None:
    command = [sys.executable, "-m", "dashboards", "--check"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_places_and_names_of_their_own_and_say_what_they_show(path: Path) -> None:
    body = json.loads(path.read_text())
    panels = panels_of(body)
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels) > 12
    assert all(panel.get("description") for panel in panels if panel["type"] != "row")
    assert {v["name"] for v in body["templating"]["list"]} == {"datasource", "namespace", "job", "runbooks"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_opens_with_checkpoint_latency_and_at_most_twelve_panels(path: Path) -> None:
    body = json.loads(path.read_text())
    titles = [panel["title"] for panel in body["panels"] if panel["type"] != "row"]
    assert titles[0] == "Checkpoint latency"
    assert titles[1:3] in (["Recovery", "Goodput now"], ["Mean goodput", "Jobs in danger"])
    assert len(titles) <= 12
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels_of(body))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_link_leads_to_a_dashboard_or_to_the_runbook_of_an_alert_that_names_the_panel(path: Path) -> None:
    body = json.loads(path.read_text())
    others = {json.loads(other.read_text())["uid"] for other in DASHBOARDS} - {body["uid"]}
    assert {link["url"] for link in body["links"]} == {f"/d/{uid}" for uid in others}
    [runbooks] = [v["query"] for v in body["templating"]["list"] if v["name"] == "runbooks"]
    for panel in panels_of(body):
        alerts = [name for name, rule in rules().items() if rule["annotations"]["panel"] == panel["title"]]
        urls = [link["url"].replace("${runbooks}", runbooks) for link in panel.get("links") or ()]
        assert urls == [rules()[name]["annotations"]["runbook"] for name in alerts]


def test_every_panel_of_latencies_that_differ_by_magnitudes_has_a_logarithmic_axis() -> None:
    for path in DASHBOARDS:
        for panel in panels_of(json.loads(path.read_text())):
            if panel["type"] == "timeseries" and panel["title"].startswith(("Checkpoint latency", "Latency by")):
                scale = panel["fieldConfig"]["defaults"]["custom"]["scaleDistribution"]
                assert scale["type"] == "log", panel["title"]


def test_every_metric_that_is_asked_for_is_documented() -> None:
    text = METRICS.read_text()
    asked = set(re.findall(r"surefoot_[a-z_]+", "".join(path.read_text() for path in (ALERTS, *DASHBOARDS))))
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert {name for name in plain if f"`{name}`" not in text} == set()


def test_every_metric_of_the_code_is_documented() -> None:
    text = METRICS.read_text()
    sources = [path for room in ("operator", "runtime") for path in (ROOT / room).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r'"(surefoot_[a-z_]+)"', path.read_text())}
    assert {name for name in named if f"`{name}`" not in text} == set()


def test_every_event_is_documented() -> None:
    text = EVENTS.read_text()
    names = (ROOT / "operator" / "surefoot_operator" / "reasons.py").read_text().partition("# Event reasons")[2]
    told = set(re.findall(r'"([A-Z][A-Za-z]+)"', names))
    for path in (ROOT / "operator").rglob("*.py"):
        told |= set(re.findall(r'\bEvent\(\s*"([A-Z][A-Za-z]+)"', path.read_text()))
    for path in (ROOT / "runtime").rglob("*.py"):
        told |= set(re.findall(r'(?:say|notice|on_notice|Notice)\("([A-Z][A-Za-z]+)"', path.read_text()))
    assert {name for name in told if f"`{name}`" not in text} == set()
