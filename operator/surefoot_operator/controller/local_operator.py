"""Runs the operator of one job on one machine.

Started by `surefoot local`. It may be killed at any moment and restarted: the status is in the run folder, and agents
and memory servers report the rest again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

from prometheus_client import start_http_server

from surefoot.linux_process import die_with_parent
from surefoot.logs import configure_logging
from surefoot_operator import metrics
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.controller.credentials.derived_secrets import Secrets, load_or_create_secrets
from surefoot_operator.controller.health_endpoints import LoopLag
from surefoot_operator.controller.process_setup import TermClock
from surefoot_operator.controller.worker_environment import WorkerEnvironmentFactory
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.coordinator.agent_server import AgentServer, create_token_authenticator
from surefoot_operator.errors import PlatformError
from surefoot_operator.memory import JobMemoryServers, MemoryServerPool
from surefoot_operator.platforms.interface import Platform
from surefoot_operator.platforms.local.platform import LocalPlatform
from surefoot_operator.platforms.local.run_folder import RunFolder, write_json
from surefoot_operator.reconcile import Reconciler
from surefoot_operator.reconcile.build_snapshot import Dependencies
from surefoot_operator.settings import CoordinatorSettings, OperatorSettings

log = logging.getLogger(__name__)


# ---- local metrics ---------------------------------------------------------------------------------------------------
# Serves the metrics of a local run's operator.

HOST = "127.0.0.1"


@contextmanager
def serve_metrics(root: Path) -> Iterator[None]:
    """Serves this process' metrics on a free port, which the run folder lists as a Prometheus file_sd target."""
    server, thread = start_http_server(0, addr=HOST)
    targets_file = RunFolder(root).metrics_folder / "operator.json"
    write_json(targets_file, [{"targets": [f"{HOST}:{server.server_port}"]}], durable=False)
    try:
        yield
    finally:
        targets_file.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()
        thread.join()


# ---- local operator --------------------------------------------------------------------------------------------------

T = TypeVar("T")

START_TIMEOUT_SECONDS = 10.0
"""How long to wait for the job's file and the port: a former operator may still be ending."""
_RETRY_SECONDS = 0.1


class LocalOperator:
    """Runs the operator of one job on any platform, between `start` and `stop`."""

    def __init__(self, platform: Platform, secrets: Secrets, settings: OperatorSettings) -> None:
        self._platform, self._secrets, self._settings = platform, secrets, settings
        self._server = AgentServer(settings.coordinator, create_token_authenticator(secrets.worker_token))
        self._clock = TermClock()
        self._memory: JobMemoryServers | None = None
        self._pool = MemoryServerPool(self._settings.memory)
        self._reconcile_task: asyncio.Task[None] | None = None
        self.reconciler: Reconciler | None = None

    @property
    def url(self) -> str:
        """Address that agents connect to."""
        return self._server.url

    async def start(self) -> None:
        """Starts to listen, then to reconcile.

        Raises:
            PlatformError: There is no job that can be read.
            OSError: The port stays taken.
        """
        job = await _retry_until_timeout(self._observe_job, PlatformError)
        await _retry_until_timeout(self._server.start, OSError)

        def changed(urgent: bool = True) -> None:
            if self.reconciler is not None:
                self.reconciler.wake(urgent)

        account = self._secrets.memory_account(job.uid)
        self._memory = JobMemoryServers(job.uid, account, self._pool, self._clock, changed)
        channel = AgentChannel(job.uid, job.spec.health_policy.heartbeat_seconds, self._clock, changed)
        environment_factory = WorkerEnvironmentFactory(
            self._server.url,
            self._settings.memory.call_timeout_seconds,
            self._secrets,
            metrics_port=self._settings.metrics_port,
        )
        token = partial(self._secrets.generation_token, job.uid)
        dependencies = Dependencies(
            self._platform, channel, self._memory, environment_factory, self._settings, self._clock, token
        )
        self.reconciler = Reconciler(dependencies)
        self._server.add_channel(job.uid, channel)
        self._server.set_leading(True)
        metrics.leader.labels("0").set(1)  # a local operator always leads its only job
        self._reconcile_task = asyncio.create_task(self.reconciler.run(), name=f"reconcile {job.name}")
        log.info("operator of job %s (%s) at %s", job.name, job.uid, self._server.url)

    async def stop(self) -> None:
        """Stops the operator; workers and memory servers continue."""
        if self._reconcile_task is not None:
            self._reconcile_task.cancel()
            await asyncio.gather(self._reconcile_task, return_exceptions=True)
        await self._server.close()
        if self._memory is not None:
            await self._memory.close()
        await self._pool.close()
        await self._platform.close()

    async def _observe_job(self) -> TrainingJob:
        return (await self._platform.observe()).job


async def _retry_until_timeout(call: Callable[[], Awaitable[T]], retried_error: type[Exception]) -> T:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        try:
            return await call()
        except retried_error:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_RETRY_SECONDS)  # no event shows that a port or a file has become usable


async def run_local_operator(folder: Path, port: int, with_metrics: bool) -> None:
    """Runs until SIGTERM or SIGINT.

    Args:
        folder: The run folder.
        port: Port that agents connect to. 0: any free one.
        with_metrics: Whether the operator and its workers serve metrics, each on a free port.
    """
    settings = OperatorSettings(coordinator=CoordinatorSettings(port=port), metrics_port=0 if with_metrics else None)
    operator = LocalOperator(LocalPlatform(folder), load_or_create_secrets(folder), settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    lag = asyncio.create_task(LoopLag().run(), name="loop lag")
    try:
        with serve_metrics(folder) if with_metrics else nullcontext():
            await operator.start()
            await stop.wait()
    finally:
        lag.cancel()
        await asyncio.gather(lag, return_exceptions=True)
        await operator.stop()


def main(arguments: list[str] | None = None) -> int:
    """Runs the operator and returns its exit code."""
    parser = argparse.ArgumentParser(description="The operator of one job on this machine.")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True, help="port that agents connect to, on 127.0.0.1")
    parser.add_argument(
        "--metrics", action="store_true", help="serve metrics; `metrics` in the run folder has the port"
    )
    parser.add_argument("--parent", type=int, help="end when this process ends")
    args = parser.parse_args(arguments)
    if args.parent is not None:
        die_with_parent(args.parent)
    log_format = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
    configure_logging(os.environ, log_format, "%H:%M:%S")
    try:
        asyncio.run(run_local_operator(args.run_folder, args.port, args.metrics))
    except (PlatformError, OSError) as error:
        log.error("the operator cannot run: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
