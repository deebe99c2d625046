"""A Prometheus finds operator, workers and memory tier by the names of their ports, and every expression shows a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.scenarios import faults
from cluster.scenarios.shapes import ELASTIC
from cluster.scenarios.stage import Stage
from support import expressions
from support.machine_speed import scaled
from support.servers.prometheus import scraping, targets_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SECONDS = scaled(120.0)


def test_every_expression_of_dashboards_and_alerts_returns_data_of_the_cluster(stage: Stage, tmp_path: Path) -> None:
    job = stage.training("worn", ELASTIC)
    pods = [*stage.installed.pods("operator"), *stage.installed.pods("memory-tier"), *job.pods()]
    targets = tmp_path / "targets.json"
    targets.write_text(targets_in(pods))
    with scraping(tmp_path, [str(targets)], expressions.ALERTS) as prometheus:
        mine = f'{{namespace="{stage.space.name}",job="{job.asked.name}"}}'
        # a first count of each is there before the failure, as in a job of hours
        job.wait("every worker is scraped", lambda: len(prometheus.series(f"surefoot_step{mine} > 0")) >= 3, SECONDS)
        faults.kill_trainer(job, stage.installed).wait()
        job.wait_training(ELASTIC.workers)
        found: dict[str, str] = {}

        def shown() -> bool:
            found.clear()
            found.update(expressions.lacking(prometheus))
            return not found

        try:
            job.wait("every expression returns data", shown, SECONDS)
        except AssertionError as error:
            raise AssertionError("\n".join(f"{why}: {what}" for what, why in found.items())) from error
        restored = prometheus.series(f"sum(surefoot_restore_bytes_total{mine})")
        assert float(restored[0]["values"][-1][1]) > 0
        nodes = {one["metric"]["node"] for one in prometheus.series("surefoot_memory_server_up")}
        assert nodes == set(stage.installed.facts.node_names)
