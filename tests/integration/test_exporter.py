"""A worker's exporter over real sockets: what it serves, where it says so, and that a port which is taken hurts nobody."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from surefoot.agent.agent_state import AgentState, LocalRank
from surefoot.agent.metrics_server import Exporter
from surefoot.agent.staging_memory import SaveTracker
from surefoot.ipc.metric_deltas import MetricSums
from surefoot.protocol.progress import Progress
from surefoot.settings import AgentSettings, JobSettings


@dataclass
class Shown:
    state: AgentState = field(
        default_factory=lambda: AgentState(
            started_generation=3,
            claimed_generation=3,
            ranks=(LocalRank(0, 0, progress=Progress(step=7)), LocalRank(1, 1, progress=Progress(step=6))),
        )
    )
    tracker: SaveTracker = field(default_factory=SaveTracker)


def settings(folder: Path, port: int | None) -> AgentSettings:
    job = JobSettings("uid", 10, 2, 2, "", "")
    return AgentSettings(
        job,
        4,
        1,
        "node-a",
        "ws://nowhere",
        "",
        run_folder=str(folder),
        metrics_port=port,
        job_name="j",
        job_namespace="n",
    )


async def scraped(folder: Path) -> dict[str, dict[str, str]]:
    """Name -> labels of the first sample, from the address that the run folder tells."""
    (target,) = json.loads((folder / "metrics" / "worker-4-1.json").read_text())[0]["targets"]
    async with aiohttp.ClientSession() as session, session.get(f"http://{target}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = await answer.text()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert {s.value for s in samples if s.name == "surefoot_step"} == {6.0}
    assert {s.value for s in samples if s.name == "surefoot_generation"} == {3.0}
    return {s.name: dict(s.labels) for s in samples}


async def test_every_figure_names_its_worker_and_the_address_is_told_and_taken_back(tmp_path: Path) -> None:
    sums = MetricSums()
    sums.add_increases((("surefoot_checkpoint_skipped_total", {}, 2.0),))
    exporter = Exporter(settings(tmp_path, 0), sums, Shown())
    await exporter.start()
    try:
        found = await scraped(tmp_path)
    finally:
        await exporter.close()
    assert found["surefoot_checkpoint_skipped_total"] == {"namespace": "n", "job": "j", "worker": "4"}
    assert found["process_resident_memory_bytes"]["worker"] == "4"
    assert list((tmp_path / "metrics").iterdir()) == []


async def test_a_port_that_is_taken_is_said_and_the_worker_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        exporter = Exporter(settings(tmp_path, taken.getsockname()[1]), MetricSums(), Shown())
        await exporter.start()
        await exporter.close()
    assert "metrics cannot be served at 127.0.0.1" in caplog.text


async def test_without_a_port_nothing_is_served(tmp_path: Path) -> None:
    exporter = Exporter(replace(settings(tmp_path, 0), metrics_port=None), MetricSums(), Shown())
    await exporter.start()
    await exporter.close()
    assert not (tmp_path / "metrics").exists()
