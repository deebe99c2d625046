"""Supervises one local run: starts processes, injects faults, waits for the end.

Touches the machine and the run folder; called by `run_local`. Whatever happens, `Supervisor.run` leaves nothing running.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from surefoot.errors import SurefootError
from surefoot.memory_server import Credentials, MemoryServerClient
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.cli.command_base import RunError, StopRequest
from surefoot_operator.cli.local.faults import Fault, FaultInjector
from surefoot_operator.cli.local.progress import RunEvent, RunProgress
from surefoot_operator.platforms.local.local_nodes import LocalNodes
from surefoot_operator.platforms.local.node_process import last_log_line
from surefoot_operator.platforms.local.run_folder import MemoryServerRecord, NodeRecord
from surefoot_operator.reasons import CHECKPOINT_LOST

log = logging.getLogger(__name__)


# ---- size of the checkpoint ------------------------------------------------------------------------------------------
# Reads the size of a complete checkpoint from the holders' indexes. Called below every few seconds; every call has a
# short timeout.

_CALL_SECONDS = 0.3


def checkpoint_bytes(job: str, nodes: list[NodeRecord], checkpoint: Checkpoint) -> int | None:
    """Adds up one checkpoint's bytes over ranks; None while any is missing."""
    found: dict[int, RankManifest] = {}
    for node in nodes:
        for manifest in chain(*(_index_of(job, node, holder) for holder in node.servers)):
            if manifest.save.checkpoint == checkpoint:
                found[manifest.save.rank] = manifest
    if not found or len(found) < next(iter(found.values())).world_size:
        return None
    return sum(m.stream_bytes + m.values_bytes + m.digests_bytes for m in found.values())


def _index_of(job: str, node: NodeRecord, server: MemoryServerRecord) -> tuple[RankManifest, ...]:
    host, port, password = server.host, server.port, server.admin_password
    admin = MemoryServerAdmin(host, port, password, _CALL_SECONDS)
    try:
        place = MemoryServerEndpoint(MemoryServerInstance(node.name, admin.read_instance()), host, port, node.domain)
        client = MemoryServerClient(place, job, Credentials("", password), _CALL_SECONDS)
        try:
            return client.read_index().manifests
        finally:
            client.close()
    except (SurefootError, ValueError):
        return ()  # damaged, just killed, or not provisioned yet: a figure for people is not worth waiting for
    finally:
        admin.close()


# ---- supervise -------------------------------------------------------------------------------------------------------

TICK_SECONDS = 0.05
_NODES_UP_SECONDS = 60.0
_SHUTDOWN_SECONDS = 10.0
_MEASURE_SECONDS = 3.0
_ROOM_SECONDS = 1.0
_MIN_FREE_BYTES = 256 << 10
"""A status and a round of ledger lines take less."""

OPERATOR_RESTARTS = 3
"""Restarts of the operator without a step between them."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """The run that is supervised and shown."""

    progress: RunProgress
    machine: LocalNodes
    nodes: tuple[str, ...]
    job: TrainingJob
    total_steps: int | None = None
    """How many steps the job makes, where it says so."""


class Supervisor:
    """Runs one job to its end and injects its faults.

    `show` is called every tick, `tell` with each event's sentence and whether it is a warning.
    """

    def __init__(
        self,
        scene: RunContext,
        faults: tuple[Fault, ...],
        show: Callable[[], None],
        tell: Callable[[str, bool], None],
        stop: StopRequest,
    ) -> None:
        self._scene = scene
        self._machine = scene.machine
        self._progress = scene.progress
        self._show = show
        self._tell = tell
        self._stop = stop
        self.faults = FaultInjector(faults, scene.machine, tell)
        self._restarts = self._restart_step = 0
        self._measure_at = self._room_at = 0.0
        self._full = False
        self._lost = self._nodes_up = False

    def run(self) -> None:
        """Runs until the job is complete or failed.

        Raises RunError if it cannot continue, KeyboardInterrupt once a stop is requested.
        """
        self._machine.start_operator()
        for name in self._scene.nodes:
            self._machine.start_node(name)
        self._wait_for_nodes()
        self._nodes_up = True
        while self._progress.status.phase not in ("Complete", "Failed"):
            self.tick()
        self._wait_for_workers()

    def tick(self) -> None:
        self._stop.wait(TICK_SECONDS)
        self._stop.raise_if_requested()
        self._check_folder()
        self._machine.poll()
        for event in self._progress.poll():
            self._tell(_sentence(event), event.warning)
        self.faults.tick(self._progress.finished_step)
        self.check_operator()
        self.check_nodes()
        self._check_room()
        self._check_loss()
        self.measure_checkpoint()
        self._show()

    def _check_folder(self) -> None:
        """The run folder holds the job's status: without it no failure is handled, and no process would report that."""
        folder = self._machine.folder.root
        if not folder.is_dir():
            raise RunError(
                f"the run folder {folder} was removed while the job ran: its status, workers and logs are gone, so the run"
                " was stopped; start again from the persistent tier with checkpoint.restoreFrom"
            )

    def measure_checkpoint(self) -> None:
        """Looks up the size of the newest complete checkpoint, seldom: it hardly changes."""
        newest = self._progress.status.last_complete
        if newest is None or time.monotonic() < self._measure_at:
            return
        self._measure_at = time.monotonic() + _MEASURE_SECONDS
        # a frozen Redis would make everybody wait
        names = [name for name in self._scene.nodes if name not in self._machine.frozen_nodes]
        nodes = [record for name in names if (record := self._machine.read_node_record(name)) is not None]
        try:
            size = checkpoint_bytes(self._scene.job.uid, nodes, newest)
        except Exception as error:  # noqa: BLE001  # a figure for people must never end the run that it is about
            log.warning("the size of %s could not be measured: %r", newest, error)
            return
        self._progress.checkpoint_bytes = size or self._progress.checkpoint_bytes

    def _check_room(self) -> None:
        """Warns on the terminal of a full disk: processes cannot write that into their logs."""
        if time.monotonic() < self._room_at:
            return
        self._room_at = time.monotonic() + _ROOM_SECONDS
        root = self._machine.folder.root
        try:
            full = shutil.disk_usage(root).free < _MIN_FREE_BYTES
        except OSError:  # no alarm without a figure, as for a folder that was removed
            full = False
        if full and not self._full:
            self._tell(
                f"the disk of {root} is full: training continues, but no failure can be handled, because the operator"
                " cannot write its status; logs and ledgers wait too: free some space",
                True,
            )
        elif self._full and not full:
            self._tell(f"the disk of {root} has free space again", False)
        self._full = full

    def _check_loss(self) -> None:
        """A job that waits for a person says so in its events; here the person is at the keyboard."""
        lost = any(c.type == CHECKPOINT_LOST for c in self._progress.status.conditions)
        if lost and not self._lost:
            self._tell(
                "the job waits for a decision: stop the run with Ctrl-C; with checkpoint.onTotalLoss: Restart in the job's"
                " file another run starts over by itself",
                True,
            )
        self._lost = lost

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + _NODES_UP_SECONDS
        waiting = set(self._scene.nodes)
        while waiting:
            self.tick()
            for name in sorted(waiting):
                record = self._machine.read_node_record(name)
                if record is not None and record.servers:
                    waiting.discard(name)
                log = self._machine.folder.logs_folder / f"{name}.log"
                if record is not None and record.message:
                    raise RunError(f"{name} failed to start: {record.message}")
                if self._machine.node_exit_code(name) is not None:
                    raise RunError(f"{name} exited during its start: {last_log_line(log)} (log: {log})")
            if time.monotonic() > deadline:
                raise RunError(f"{', '.join(sorted(waiting))} did not start within {_NODES_UP_SECONDS:g} s")

    def _wait_for_workers(self) -> None:
        """Workers that were told to leave flush and go by themselves; the rest ends with the nodes."""
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        while time.monotonic() < deadline and self._machine.count_running_workers():
            self.tick()
        for event in self._progress.poll():
            self._tell(_sentence(event), event.warning)
        self._show()

    def check_operator(self) -> None:
        """Restarts an operator that no fault ended, unless it died too often without a step between.

        A run under many faults may need any number of restarts; one that crashes before every first step would be
        restarted for ever.
        """
        code, step = self._machine.operator_exit_code(), self._progress.finished_step
        if code is None:
            return
        self._restarts = 1 if step > self._restart_step else self._restarts + 1
        self._restart_step = step
        log = self._machine.folder.logs_folder / "operator.log"
        if self._restarts > OPERATOR_RESTARTS:
            raise RunError(
                f"the operator exited with code {code} and made no progress: {last_log_line(log)} (log: {log})"
            )
        self._tell(f"the operator exited with code {code} and is restarted: {last_log_line(log)} (log: {log})", True)
        self._machine.start_operator()

    def check_nodes(self) -> None:
        """A node that no fault ended: its workers are replaced elsewhere, and only its log says why it is gone."""
        if not self._nodes_up or self._progress.status.phase in ("Complete", "Failed"):
            return
        for name, code in self._machine.collect_unexpected_exits().items():
            log = self._machine.folder.logs_folder / f"{name}.log"
            self._tell(f"{name} ended unasked with code {code}: {last_log_line(log)} (log: {log})", True)
        if not self.faults.any_returns and not self._machine.has_nodes():
            raise RunError("no node is left and none returns: nothing can train; the lines above say how each ended")


def _sentence(event: RunEvent) -> str:
    return f"{event.reason}: {event.message}"
