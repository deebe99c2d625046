"""Serves the metrics of the worker and its trainers over HTTP `/metrics`.

The agent process starts it if SUREFOOT_METRICS_PORT is set. It answers in its own thread, so that scrapes cannot delay
heartbeats. Every series has the labels namespace, job and worker, and none has a rank or a pod name. If the port cannot be
opened, that is logged once and the training continues.
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
"""Subfolder of the run folder in which exporters on arbitrary ports write their addresses, in Prometheus' file_sd form."""


class AgentView(Protocol):
    """The part of the agent that the metrics read: its state and the progress of its saves."""

    @property
    def state(self) -> AgentState: ...
    @property
    def tracker(self) -> SaveTracker: ...


class PodMetrics(Collector):
    """Collects the metrics of the agent, its trainers and its process, each with the worker's labels."""

    def __init__(self, labels: Mapping[str, str], sums: MetricSums, agent: AgentView) -> None:
        self._labels, self._sums, self._agent = labels, sums, agent

    def collect(self) -> Iterable[Metric]:
        self._update_gauges()
        yield from (_with_labels(family, self._labels) for family in self._sums.with_agent_metrics(metrics.FAMILIES))
        yield from (_with_labels(family, self._labels) for family in PROCESS_COLLECTOR.collect())

    def _update_gauges(self) -> None:
        state = self._agent.state
        metrics.generation.set(state.running_generation)
        progress = state.progress
        metrics.step.set(progress.step)
        metrics.loss.set(math.nan if progress.loss is None else progress.loss)
        metrics.data_epochs.set(math.nan if progress.epochs is None else progress.epochs)
        metrics.pending.set(len(self._agent.tracker.pending()))
        metrics.interval_exponent.set(progress.interval_exponent)


class Exporter:
    """Runs the HTTP server for metrics: `start`, then `close`. Without a port in the settings it does nothing."""

    def __init__(self, settings: AgentSettings, sums: MetricSums, agent: AgentView) -> None:
        self._settings = settings
        worker = {"namespace": settings.job_namespace, "job": settings.job_name, "worker": str(settings.index)}
        self._pod_metrics = PodMetrics(worker, sums, agent)
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
            address = f"{settings.host}:{settings.metrics_port}"
            _log.warning("metrics cannot be served at %s: %s; training continues without them", address, error)

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
        return Answer(200, CONTENT_TYPE_LATEST, generate_latest(self._pod_metrics))


def write_scrape_target(path: Path, host: str, port: int) -> Path:
    """Atomically writes an exporter's address as a file for Prometheus' `file_sd_configs`; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary_path = path.with_name(f".{path.name}")
    temporary_path.write_text(json.dumps([{"targets": [f"{host}:{port}"]}]), encoding="ascii")
    temporary_path.rename(path)
    return path


def _with_labels(family: Metric, labels: Mapping[str, str]) -> Metric:
    labelled = Metric(family.name, family.documentation, family.type, family.unit)
    labelled.samples = [Sample(sample.name, {**sample.labels, **labels}, sample.value) for sample in family.samples]
    return labelled
