"""Supervises one local run: starts processes, injects faults, waits for the end.

Touches the machine and the run folder; called by `run_local`. Whatever happens, `Supervisor.run` leaves nothing running.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from surefoot.errors import SurefootError
from surefoot.memory_server import Credentials, HolderClient
from surefoot.memory_server.provisioning import HolderAdmin
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, HolderId
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.cli.command_base import RunError, StopRequest
from surefoot_operator.cli.local.progress import Fault, Happened, RunProgress, due, returned
from surefoot_operator.cli.local.run_report import Struck
from surefoot_operator.platforms.local.local_nodes import Machine
from surefoot_operator.platforms.local.node_process import free_port, last_words
from surefoot_operator.platforms.local.run_folder import HolderRecord, NodeRecord
from surefoot_operator.reasons import CHECKPOINT_LOST

log = logging.getLogger(__name__)


# ---- fault injection -------------------------------------------------------------------------------------------------
# Injects the faults of one local run, and brings back what returns. Touches the machine; called below with each tick.


@dataclass(slots=True)
class _Return:
    """Something that was struck and comes back."""

    fault: Fault
    at: float


class FaultInjector:
    """Strikes faults at their steps, each once.

    `tell` gets each one's sentence, and whether it is a warning. `port`: of the operator, for its return.
    """

    def __init__(
        self, faults: tuple[Fault, ...], machine: Machine, tell: Callable[[str, bool], None], port: int
    ) -> None:
        self.struck: list[Struck] = []
        self.operator_away = False
        """A fault ended the operator, and has not brought it back."""
        self._faults = faults
        self._machine = machine
        self._tell = tell
        self._port = port
        self._returns: list[_Return] = []

    @property
    def returning(self) -> bool:
        """Whether anything that was struck comes back later."""
        return bool(self._returns)

    def unstruck(self) -> list[Fault]:
        """Faults whose step the job never finished."""
        left = list(self._faults)
        for struck in self.struck:
            left.remove(struck.fault)
        return left

    def strike_what_is_due(self, step: int) -> None:
        """Strikes each fault whose step is finished and whose target runs."""
        for fault in due(self._faults, [s.fault for s in self.struck], step):
            if any(fault.waits_for(r.fault) for r in self._returns):
                continue
            at = time.time()
            if not self._strike(fault):
                continue  # nothing of that kind runs there at this moment (it is being replaced): at the next tick
            self.struck.append(Struck(fault, at, step))
            self._tell(f"fault: {fault}", True)
            if fault.seconds is not None:
                self._returns.append(_Return(fault, time.monotonic() + fault.seconds))

    def _strike(self, fault: Fault) -> bool:
        machine, node = self._machine, fault.node or ""
        match fault.kind:
            case "node":
                if machine.node_record(node) is None:
                    return False
                machine.kill_node(node)
            case "freeze":
                if machine.node_record(node) is None:
                    return False
                machine.freeze_node(node)
            case "cordon":
                machine.cordon_node(node)
            case "drain":
                if machine.node_record(node) is None:
                    return False
                machine.drain_node(node)
            case "trainer":
                return machine.kill_trainer(node)
            case "agent":
                return machine.kill_agent(node)
            case "hang":
                return machine.hang_trainer(node, fault.seconds)
            case "oom":
                return machine.exhaust_memory(node)
            case "memory":
                return machine.kill_holder(node)
            case "diskfull":
                machine.fill_disk(node)
            case "nan":
                return machine.spoil_model(node)
            case "sick":
                machine.sicken_node(node)
            case "garble":
                machine.garble_node(node)
            case "slow":
                return machine.slow_trainers(node)
            case "coordinator":
                self.operator_away = True
                machine.kill_operator()
        return True

    def return_what_is_due(self) -> None:
        """Brings back what was away for long enough."""
        now = time.monotonic()
        for back in [r for r in self._returns if now >= r.at]:
            self._returns.remove(back)
            node = back.fault.node or ""
            match back.fault.kind:
                case "node":
                    self._machine.start_node(node)
                case "freeze":
                    self._machine.thaw_node(node)
                case "drain" | "cordon":
                    self._machine.uncordon_node(node)
                case "slow" | "hang" | "diskfull" as kind:
                    self._machine.take_back(node, kind)
                case "memory":
                    self._machine.return_holder(node)
                case _:
                    self._machine.start_operator(self._port)
                    self.operator_away = False
            self._tell(returned(back.fault), False)


# ---- size of the checkpoint ------------------------------------------------------------------------------------------
# Reads the size of a complete checkpoint from the holders' indexes. Called below every few seconds; every call has a
# short timeout.

_CALL_SECONDS = 0.3


def checkpoint_bytes(job: str, nodes: list[NodeRecord], checkpoint: Checkpoint) -> int | None:
    """Adds up one checkpoint's bytes over ranks; None while any is missing."""
    found: dict[int, RankManifest] = {}
    for node in nodes:
        for manifest in chain(*(_index_of(job, node, holder) for holder in node.holders)):
            if manifest.save.checkpoint == checkpoint:
                found[manifest.save.rank] = manifest
    if not found or len(found) < next(iter(found.values())).world:
        return None
    return sum(m.stream_bytes + m.values_bytes + m.digests_bytes for m in found.values())


def _index_of(job: str, node: NodeRecord, holder: HolderRecord) -> tuple[RankManifest, ...]:
    host, port, password = holder.host, holder.port, holder.admin_password
    admin = HolderAdmin(host, port, password, _CALL_SECONDS)
    try:
        place = HolderEndpoint(HolderId(node.name, admin.instance_of(job)), host, port, node.domain)
        client = HolderClient(place, job, Credentials("", password), _CALL_SECONDS)
        try:
            return client.index().manifests
        finally:
            client.close()
    except (SurefootError, ValueError):
        return ()  # damaged, just killed, or not provisioned yet: a figure for people is not worth waiting for
    finally:
        admin.close()


# ---- supervise -------------------------------------------------------------------------------------------------------

TICK_SECONDS = 0.05
_NODES_UP_SECONDS = 60.0
_LEAVING_SECONDS = 10.0
_MEASURE_SECONDS = 3.0
_ROOM_SECONDS = 1.0
_LEAST_FREE_BYTES = 256 << 10
"""A status and a round of ledger lines take less."""

OPERATOR_RESTARTS = 3
"""Restarts of the operator without a step between them."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The run that is supervised and shown."""

    progress: RunProgress
    machine: Machine
    nodes: tuple[str, ...]
    job: TrainingJob
    total_steps: int | None = None
    """How many steps the job makes, where it says so."""


def free_bytes(folder: Path) -> int:
    """Free bytes for this user on the folder's file system.

    Unlimited where the file system does not answer, as for a folder that was removed: no alarm without a figure.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return sys.maxsize
    return found.f_bavail * found.f_frsize


@dataclass(frozen=True, slots=True)
class OperatorRestarts:
    """Counts restarts of the operator since training last finished a step.

    A run under many faults may need any number of restarts; without this limit an operator that crashes before every
    first step would be restarted for ever.
    """

    count: int = 0
    step: int = 0
    """The last finished step when the operator ended the last time."""

    def ended(self, step: int) -> OperatorRestarts:
        """Counts one end of the operator; `step` is the last finished one."""
        return OperatorRestarts(1 if step > self.step else self.count + 1, step)

    @property
    def exhausted(self) -> bool:
        """Whether the limit of restarts is exceeded."""
        return self.count > OPERATOR_RESTARTS


class Supervisor:
    """Runs one job to its end and injects its faults.

    `show` is called every tick, `tell` with each event's sentence and whether it is a warning.
    """

    def __init__(
        self,
        scene: Scene,
        faults: tuple[Fault, ...],
        show: Callable[[Scene], None],
        tell: Callable[[str, bool], None],
        stop: StopRequest,
    ) -> None:
        self._scene = scene
        self._machine = scene.machine
        self._progress = scene.progress
        self._show = show
        self._tell = tell
        self._stop = stop
        self._port = free_port()
        self.faults = FaultInjector(faults, scene.machine, tell, self._port)
        self._operator_restarts = OperatorRestarts()
        self._measure_at = self._room_at = 0.0
        self._full = False
        self._lost = self._nodes_up = False

    def run(self) -> None:
        """Runs until the job is complete or failed.

        Raises RunError if it cannot continue, KeyboardInterrupt once a stop is requested.
        """
        self._machine.start_operator(self._port)
        for name in self._scene.nodes:
            self._machine.start_node(name)
        self._wait_for_nodes()
        self._nodes_up = True
        while self._progress.status.phase not in ("Complete", "Failed"):
            self._tick()
        self._let_leave()

    def _tick(self) -> None:
        self._stop.wait(TICK_SECONDS)
        self._stop.raise_if_requested()
        self._check_folder()
        self._machine.poll()
        for event in self._progress.look():
            self._tell(_sentence(event), event.warning)
        self.faults.strike_what_is_due(self._progress.finished_step)
        self.faults.return_what_is_due()
        self._check_operator()
        self._check_nodes()
        self._check_room()
        self._check_loss()
        self._measure()
        self._show(self._scene)

    def _check_folder(self) -> None:
        """The run folder holds the job's status: without it no failure is handled, and no process would report that."""
        folder = self._machine.folder.root
        if not folder.is_dir():
            raise RunError(
                f"the run folder {folder} was removed while the job ran: its status, workers and logs are gone, so the run"
                " was stopped; start again from the persistent tier with checkpoint.restoreFrom"
            )

    def _measure(self) -> None:
        """Looks up the size of the newest complete checkpoint, seldom: it hardly changes."""
        newest = self._progress.status.last_complete
        if newest is None or time.monotonic() < self._measure_at:
            return
        self._measure_at = time.monotonic() + _MEASURE_SECONDS
        # a frozen Redis would make everybody wait
        names = [name for name in self._scene.nodes if name not in self._machine.frozen]
        nodes = [record for name in names if (record := self._machine.node_record(name)) is not None]
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
        full = free_bytes(root) < _LEAST_FREE_BYTES
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
            self._tick()
            for name in sorted(waiting):
                record = self._machine.node_record(name)
                if record is not None and record.holders:
                    waiting.discard(name)
                log = self._machine.folder.logs / f"{name}.log"
                if record is not None and record.message:
                    raise RunError(f"{name} failed to start: {record.message}")
                if self._machine.node_exit_code(name) is not None:
                    raise RunError(f"{name} exited during its start: {last_words(log)} (log: {log})")
            if time.monotonic() > deadline:
                raise RunError(f"{', '.join(sorted(waiting))} did not start within {_NODES_UP_SECONDS:g} s")

    def _let_leave(self) -> None:
        """Workers that were told to leave flush and go by themselves; the rest ends with the nodes."""
        deadline = time.monotonic() + _LEAVING_SECONDS
        while time.monotonic() < deadline and self._machine.running_workers():
            self._tick()
        for event in self._progress.look():
            self._tell(_sentence(event), event.warning)
        self._show(self._scene)

    def _check_operator(self) -> None:
        code = self._machine.operator_exit_code()
        if code is None or self.faults.operator_away:
            return
        log = self._machine.folder.logs / "operator.log"
        self._operator_restarts = self._operator_restarts.ended(self._progress.finished_step)
        if self._operator_restarts.exhausted:
            raise RunError(f"the operator exited with code {code} and made no progress: {last_words(log)} (log: {log})")
        self._tell(f"the operator exited with code {code} and is restarted: {last_words(log)} (log: {log})", True)
        self._machine.start_operator(self._port)

    def _check_nodes(self) -> None:
        """A node that no fault ended: its workers are replaced elsewhere, and only its log says why it is gone."""
        if not self._nodes_up or self._progress.status.phase in ("Complete", "Failed"):
            return
        for name, code in self._machine.unexpected_ends().items():
            log = self._machine.folder.logs / f"{name}.log"
            self._tell(f"{name} ended unasked with code {code}: {last_words(log)} (log: {log})", True)
        if not self.faults.returning and not self._machine.has_nodes():
            raise RunError("no node is left and none returns: nothing can train; the lines above say how each ended")


def _sentence(event: Happened) -> str:
    return f"{event.reason}: {event.message}"
