"""Supervises one local run: starts its processes, injects faults and waits for its end.

Acts on local processes and the run folder; called by `run_local`, which stops every process afterwards.
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
from surefoot_operator.cli.local.progress import RunProgress
from surefoot_operator.cli.local.run_event import RunEvent
from surefoot_operator.platforms.local.local_nodes import LocalNodes
from surefoot_operator.platforms.local.node_process import last_log_line
from surefoot_operator.platforms.local.run_folder import MemoryServerRecord, NodeRecord
from surefoot_operator.reasons import CHECKPOINT_LOST

log = logging.getLogger(__name__)


# ---- size of the checkpoint ------------------------------------------------------------------------------------------
# Reads the size of a complete checkpoint from the indexes of the memory servers. The supervisor does so every few
# seconds, so each call has a short timeout.

_CALL_SECONDS = 0.3


def checkpoint_bytes(job: str, nodes: list[NodeRecord], checkpoint: Checkpoint) -> int | None:
    """Returns the bytes of one checkpoint over all ranks; None while the save of any rank is missing."""
    manifests_by_rank: dict[int, RankManifest] = {}
    for node in nodes:
        for manifest in chain(*(_manifests_of(job, node, server) for server in node.servers)):
            if manifest.save.checkpoint == checkpoint:
                manifests_by_rank[manifest.save.rank] = manifest
    if not manifests_by_rank or len(manifests_by_rank) < next(iter(manifests_by_rank.values())).world_size:
        return None
    return sum(
        manifest.stream_bytes + manifest.values_bytes + manifest.digests_bytes
        for manifest in manifests_by_rank.values()
    )


def _manifests_of(job: str, node: NodeRecord, server: MemoryServerRecord) -> tuple[RankManifest, ...]:
    host, port, password = server.host, server.port, server.admin_password
    admin = MemoryServerAdmin(host, port, password, _CALL_SECONDS)
    try:
        endpoint = MemoryServerEndpoint(MemoryServerInstance(node.name, admin.read_instance()), host, port, node.domain)
        client = MemoryServerClient(endpoint, job, Credentials("", password), _CALL_SECONDS)
        try:
            return client.read_index().manifests
        finally:
            client.close()
    except (SurefootError, ValueError):
        return ()  # damaged, just killed, or not provisioned yet: a size that is only displayed is not worth a retry
    finally:
        admin.close()


# ---- supervise -------------------------------------------------------------------------------------------------------

TICK_SECONDS = 0.05
_NODES_UP_SECONDS = 60.0
_SHUTDOWN_SECONDS = 10.0
_MEASURE_SECONDS = 3.0
_DISK_CHECK_SECONDS = 1.0
_MIN_FREE_BYTES = 256 << 10
"""Enough for one status file and one ledger line per rank; with less the disk counts as full."""

OPERATOR_RESTARTS = 3
"""Allowed restarts of a crashed operator without a finished step in between."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """The run that is supervised and displayed: its job, nodes, processes and progress."""

    progress: RunProgress
    machine: LocalNodes
    nodes: tuple[str, ...]
    job: TrainingJob
    total_steps: int | None = None
    """Number of steps that the job intends to run; None if it does not declare one."""


class Supervisor:
    """Runs one job to its end and injects its faults.

    `show` is called at every tick to update the display, `report` with the sentence of each event and whether it is a
    warning.
    """

    def __init__(
        self,
        context: RunContext,
        faults: tuple[Fault, ...],
        show: Callable[[], None],
        report: Callable[[str, bool], None],
        stop: StopRequest,
    ) -> None:
        self._context = context
        self._machine = context.machine
        self._progress = context.progress
        self._show = show
        self._report = report
        self._stop = stop
        self.faults = FaultInjector(faults, context.machine, report)
        self._operator_restarts = self._last_restart_step = 0
        self._next_measure_seconds = self._disk_check_seconds = 0.0
        self._is_disk_full = False
        self._is_checkpoint_lost = False

    def run(self) -> None:
        """Runs until the job is complete or failed.

        Raises RunError if it cannot continue, KeyboardInterrupt once a stop is requested.
        """
        # Start all processes and wait for the nodes; one that cannot start ends the run, one that is killed does not.
        self._machine.start_operator()
        for name in self._context.nodes:
            self._machine.start_node(name)
        self._wait_for_nodes()
        # Supervise until the operator reports the end of the job, then let its workers exit by themselves.
        while self._progress.status.phase not in ("Complete", "Failed"):
            self.tick()
        self._wait_for_workers()

    def tick(self) -> None:
        """Waits a moment, then runs every check once and updates the display."""
        self._stop.wait(TICK_SECONDS)
        self._stop.raise_if_requested()
        # Read the run's folder and report new events.
        self._check_folder()
        self._machine.poll()
        for event in self._progress.poll():
            self._report(_event_sentence(event), event.warning)
        # Inject the faults that are due, then handle processes that ended without one.
        self.faults.tick(self._progress.finished_step)
        self.check_operator()
        self.check_nodes()
        # Report conditions that need the user, and update the display.
        self._check_disk_space()
        self._check_checkpoint_lost()
        self.measure_checkpoint()
        self._show()

    def _check_folder(self) -> None:
        """Raises RunError if the run folder was removed.

        It contains the job's status. Without it no failure can be handled, and no other process would report that.
        """
        folder = self._machine.folder.root
        if not folder.is_dir():
            raise RunError(
                f"the run folder {folder} was removed while the job ran: its status, workers and logs are gone, so the run"
                " was stopped; start again from the persistent tier with checkpoint.restoreFrom"
            )

    def measure_checkpoint(self) -> None:
        """Measures the newest complete checkpoint every few seconds, as its size hardly changes."""
        newest = self._progress.status.last_complete
        if newest is None or time.monotonic() < self._next_measure_seconds:
            return
        self._next_measure_seconds = time.monotonic() + _MEASURE_SECONDS
        # Skip frozen nodes: each call to their Redis would block the supervisor until its timeout.
        names = [name for name in self._context.nodes if name not in self._machine.frozen_nodes]
        nodes = [record for name in names if (record := self._machine.read_node_record(name)) is not None]
        try:
            size_bytes = checkpoint_bytes(self._context.job.uid, nodes, newest)
        except Exception as error:  # noqa: BLE001  # a size that is only displayed must never end the run
            log.warning("the size of %s could not be measured: %r", newest, error)
            return
        self._progress.checkpoint_bytes = size_bytes or self._progress.checkpoint_bytes

    def _check_disk_space(self) -> None:
        """Warns on the terminal of a full disk, because processes can no longer write to their logs."""
        if time.monotonic() < self._disk_check_seconds:
            return
        self._disk_check_seconds = time.monotonic() + _DISK_CHECK_SECONDS
        root = self._machine.folder.root
        try:
            is_full = shutil.disk_usage(root).free < _MIN_FREE_BYTES
        except OSError:  # unknown, for example because the folder was removed: do not warn
            is_full = False
        if is_full and not self._is_disk_full:
            self._report(
                f"the disk of {root} is full: training continues, but no failure can be handled, because the operator"
                " cannot write its status; logs and ledgers wait too: free some space",
                True,
            )
        elif self._is_disk_full and not is_full:
            self._report(f"the disk of {root} has free space again", False)
        self._is_disk_full = is_full

    def _check_checkpoint_lost(self) -> None:
        """Explains on the terminal how to continue if the job has lost its checkpoints and waits for a decision."""
        is_lost = any(condition.type == CHECKPOINT_LOST for condition in self._progress.status.conditions)
        if is_lost and not self._is_checkpoint_lost:
            self._report(
                "the job waits for a decision: stop the run with Ctrl-C; with checkpoint.onTotalLoss: Restart in the job's"
                " file another run starts over by itself",
                True,
            )
        self._is_checkpoint_lost = is_lost

    def _wait_for_nodes(self) -> None:
        """Waits until the memory servers of all nodes run, except of those that are killed first.

        Raises:
            RunError: A node cannot start, takes too long, or none is left.
        """
        deadline = time.monotonic() + _NODES_UP_SECONDS
        starting_nodes = set(self._context.nodes)
        while starting_nodes:
            self.tick()
            for name in sorted(starting_nodes):
                record = self._machine.read_node_record(name)
                if record is not None and record.servers:
                    starting_nodes.discard(name)
                log_path = self._machine.folder.logs_folder / f"{name}.log"
                if record is not None and record.message:
                    raise RunError(f"{name} failed to start: {record.message}")
                exit_code = self._machine.node_exit_code(name)
                if exit_code is not None and exit_code >= 0:
                    raise RunError(f"{name} exited during its start: {last_log_line(log_path)} (log: {log_path})")
                if exit_code is not None:
                    starting_nodes.discard(name)  # killed: a fault as any other, which `check_nodes` reports
            if time.monotonic() > deadline:
                raise RunError(f"{', '.join(sorted(starting_nodes))} did not start within {_NODES_UP_SECONDS:g} s")

    def _wait_for_workers(self) -> None:
        """Gives workers time to flush and exit after their shutdown order; the rest end with their nodes."""
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        while time.monotonic() < deadline and self._machine.count_running_workers():
            self.tick()
        for event in self._progress.poll():
            self._report(_event_sentence(event), event.warning)
        self._show()

    def check_operator(self) -> None:
        """Restarts an operator that ended without an injected fault.

        The limit counts only restarts without a finished step in between: a run with many faults may need any number of
        restarts, but an operator that crashes before every first step must not be restarted forever.

        Raises:
            RunError: The operator ended too often without progress.
        """
        exit_code, step = self._machine.operator_exit_code(), self._progress.finished_step
        if exit_code is None:
            return
        # Count this restart; progress since the last one resets the count.
        self._operator_restarts = 1 if step > self._last_restart_step else self._operator_restarts + 1
        self._last_restart_step = step
        log_path = self._machine.folder.logs_folder / "operator.log"
        if self._operator_restarts > OPERATOR_RESTARTS:
            raise RunError(
                f"the operator exited with code {exit_code} and made no progress: {last_log_line(log_path)} (log: {log_path})"
            )
        self._report(
            f"the operator exited with code {exit_code} and is restarted: {last_log_line(log_path)} (log: {log_path})",
            True,
        )
        self._machine.start_operator()

    def check_nodes(self) -> None:
        """Reports nodes that ended without an injected fault, with the last line of their log.

        Raises:
            RunError: No node is left and none will return.
        """
        if self._progress.status.phase in ("Complete", "Failed"):
            return
        for name, exit_code in self._machine.collect_unexpected_exits().items():
            log_path = self._machine.folder.logs_folder / f"{name}.log"
            last_line = last_log_line(log_path)
            reason = f": {last_line}" if last_line else ""  # a node that is killed writes nothing
            self._report(f"{name} ended unasked with code {exit_code}{reason} (log: {log_path})", True)
        if not self.faults.any_returns and not self._machine.has_nodes():
            raise RunError("no node is left and none returns: nothing can train; the lines above show how each ended")


def _event_sentence(event: RunEvent) -> str:
    """Renders an event as `Reason: message`."""
    return f"{event.reason}: {event.message}"
