"""Serves the worker's metrics and its trainers' over HTTP `/metrics`.

Started by the agent process where SUREFOOT_METRICS_PORT is set; answers in a thread of its own, as whoever asks must not
delay heartbeats. Every series carries namespace, job and worker; nothing carries a rank or a pod's name. What cannot be
served is logged once, and the training goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, PROCESS_COLLECTOR, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from surefoot import metrics
from surefoot.agent.agent_state import AgentState
from surefoot.agent.staging_memory import SaveTracker
from surefoot.ipc.metric_deltas import MetricSums
from surefoot.settings import AgentSettings
from surefoot.text_server import Answer, CachedPage, TextServer

_log = logging.getLogger(__name__)

FOLDER = "metrics"
"""Of the run folder: where exporters on ports that nobody chose say them, in the form of Prometheus' file_sd."""


class AgentView(Protocol):
    """Gives the agent's state and save progress to the metrics."""

    @property
    def state(self) -> AgentState: ...
    @property
    def tracker(self) -> SaveTracker: ...


class PodMetrics(Collector):
    """Everything of one worker, as one exposition."""

    def __init__(self, labels: Mapping[str, str], sums: MetricSums, shown: AgentView) -> None:
        self._labels, self._sums, self._shown = labels, sums, shown

    def collect(self) -> Iterable[Metric]:
        self._update_gauges()
        yield from (_labelled(family, self._labels) for family in self._sums.with_agent_metrics(metrics.FAMILIES))
        yield from (_labelled(family, self._labels) for family in PROCESS_COLLECTOR.collect())

    def _update_gauges(self) -> None:
        state = self._shown.state
        metrics.generation.set(state.running)
        told = state.progress
        metrics.step.set(told.step)
        metrics.loss.set(math.nan if told.loss is None else told.loss)
        metrics.data_epochs.set(math.nan if told.epochs is None else told.epochs)
        metrics.pending.set(len(self._shown.tracker.pending()))
        metrics.interval_exponent.set(told.interval_exponent)


class Exporter:
    """`start`, then `close`. Nothing is served where the settings name no port."""

    def __init__(self, settings: AgentSettings, sums: MetricSums, shown: AgentView) -> None:
        self._settings = settings
        worker = {"namespace": settings.job_namespace, "job": settings.job_name, "worker": str(settings.index)}
        self._figures = PodMetrics(worker, sums, shown)
        self._server = TextServer({"/metrics": CachedPage(self._render)})
        self._address_file: Path | None = None

    async def start(self) -> None:
        settings = self._settings
        if settings.metrics_port is None:
            return
        try:
            self._server.start(settings.host, settings.metrics_port)
            self._publish_address(self._server.port)
        except OSError as error:
            metrics.fallbacks.labels(kind="no_exporter").inc()
            where = f"{settings.host}:{settings.metrics_port}"
            _log.warning("metrics cannot be served at %s: %s; training goes on without them", where, error)

    async def close(self) -> None:
        if self._address_file is not None:
            self._address_file.unlink(missing_ok=True)
        await asyncio.to_thread(self._server.close)

    def _publish_address(self, port: int) -> None:
        settings = self._settings
        _log.info("metrics at http://%s:%d/metrics", settings.host, port)
        if settings.metrics_port == 0:
            worker = f"worker-{settings.index}-{settings.attempt}.json"
            self._address_file = write_scrape_target(Path(settings.run_folder) / FOLDER / worker, settings.host, port)

    def _render(self) -> Answer:
        return Answer(200, CONTENT_TYPE_LATEST, generate_latest(self._figures))


def write_scrape_target(path: Path, host: str, port: int) -> Path:
    """Writes an exporter's address for `file_sd_configs`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps([{"targets": [f"{host}:{port}"]}]), encoding="ascii")
    scratch.rename(path)
    return path


def _labelled(family: Metric, labels: Mapping[str, str]) -> Metric:
    added = Metric(family.name, family.documentation, family.type, family.unit)
    added.samples = [Sample(s.name, {**s.labels, **labels}, s.value) for s in family.samples]
    return added
