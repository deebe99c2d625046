"""Implements `SaveBackend` through the agent's Unix socket, for programs that an agent started.

A reader thread, owned here and joined by `close`, receives the agent's messages. One lock makes the reply to a proposed
barrier atomic with the steps. A broken connection never stops the training: if the agent died, this process is killed
anyway.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot import metrics
from surefoot.errors import ConfigurationError, ProtocolError, StagingMemoryUnavailable, SurefootError
from surefoot.ipc import trainer_messages as line
from surefoot.ipc.memfd import StagingMapping
from surefoot.ipc.metric_deltas import MetricDeltas
from surefoot.ipc.save_backend import ReusableSave
from surefoot.ipc.stacks import install_stack_handler
from surefoot.ipc.trainer_messages import (
    Attached,
    CollectivesReport,
    FrameDecoder,
    PauseReport,
    Staged,
    StagedSaves,
    StepReport,
    add_frame,
)
from surefoot.linux_process import short_socket_path
from surefoot.protocol.hangs import Collective
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint
from surefoot.protocol.messages import Barrier, BarrierReached, BarrierReply, IntervalExponent
from surefoot.protocol.progress import NO_ANOMALIES, AnomalyRun
from surefoot.protocol.text import escape_control_characters, shorten

_log = logging.getLogger(__name__)


# ---- replies with staged saves ---------------------------------------------------------------------------------------
# Collects the agent's replies to `FindStagedSaves`. Each reply may carry a file descriptor, which must be closed in
# every case. `AgentBackend` owns the object and guards it by its lock.

Answer = tuple[StagedSaves, int | None]
"""A reply and its file descriptor; None: it carried none."""


class StagedReplies:
    """Collects the replies to one request at a time, and discards late ones."""

    def __init__(self) -> None:
        self._asking = False
        self._replies: list[Answer] = []

    def start_collecting(self) -> None:
        """Starts to collect; called before the request is sent."""
        self._asking = True

    def add_reply(self, reply: StagedSaves, descriptor: int | None) -> None:
        """Takes one reply. The first one contains the number of those that follow."""
        if self._asking:
            self._replies.append((reply, descriptor))
        elif descriptor is not None:
            os.close(descriptor)

    @property
    def is_complete(self) -> bool:
        """Whether all replies to the request have arrived."""
        return bool(self._replies) and len(self._replies) > self._replies[0][0].replies_to_follow

    def take_replies(self) -> list[Answer]:
        """Stops collecting; returns all replies, whose descriptors the caller closes, or none if some are missing."""
        replies, complete = self._replies, self.is_complete
        self._replies, self._asking = [], False
        if complete:
            return replies
        for _, descriptor in replies:
            if descriptor is not None:
                os.close(descriptor)
        return []


# ---- flight recorder -------------------------------------------------------------------------------------------------
# Reads from PyTorch's flight recorder which collective this rank is in. It runs in the trainer, on the thread that
# receives the agent's messages; that works in a hang, because a rank that waits in a collective has released the GIL.
# Torch is not imported here, since a program that has not imported it has made no collective. The recorder's settings
# (TORCH_FR_BUFFER_SIZE, in older releases TORCH_NCCL_TRACE_BUFFER_SIZE) are the program's own and are not changed.

MAX_GROUPS = 16
"""Process groups that one report covers."""
_MAX_NAME_CHARACTERS = 60
"""Longest name of a group, and longest description of a call's tensors."""
_MAX_TENSORS = 4
"""Tensors of a call that a report describes; further ones are counted."""
_DUMP_FUNCTIONS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""PyTorch's function that returns the recorder's content, by backend."""

Entry = Mapping[str, Any]
"""A call in PyTorch's recorder."""


def describe_collectives(rank: int, request: int) -> CollectivesReport:
    """Describes this rank's collectives, or why they are unknown."""
    torch = sys.modules.get("torch")
    bindings = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    recorded: list[tuple[Collective, float]] = []
    reason = "this PyTorch has no flight recorder"
    for backend, function_name in _DUMP_FUNCTIONS.items():
        dump = getattr(bindings, function_name, None)
        if dump is None:
            continue
        try:
            entries = json.loads(dump()).get("entries", ())
            recorded += current_calls(rank, backend, entries, time.time())
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"its flight recorder cannot be read: {shorten(escape_control_characters(repr(error)))}"
        else:
            reason = "its flight recorder is empty"
    recorded = sorted(recorded, key=lambda item: (not item[0].is_waiting, item[1]))[:MAX_GROUPS]
    return CollectivesReport(
        request, tuple(c for c, _ in recorded), tuple(seconds for _, seconds in recorded), "" if recorded else reason
    )


def current_calls(rank: int, backend: str, entries: Iterable[Entry], now: float) -> list[tuple[Collective, float]]:
    """Returns the call of each process group that the rank is in, or else its last one, and the seconds since then.

    A group executes its calls in order, so the first unfinished one is the one that all later ones wait for.

    Args:
        rank: This rank.
        backend: Backend of the entries.
        entries: Content of the recorder, in the order of the calls.
        now: Unix time in seconds.
    """
    entry_by_group: dict[tuple[str, bool], Entry] = {}
    for entry in entries:
        key = (_group_name(backend, entry), bool(entry.get("is_p2p")))
        group_entry = entry_by_group.get(key)
        if group_entry is None or _call_state(backend, group_entry) == "finished":
            entry_by_group[key] = entry
    return [
        (
            _convert_entry(rank, backend, group, pairwise, entry),
            round(max(0.0, now - entry["time_created_ns"] / 1e9), 1),
        )
        for (group, pairwise), entry in entry_by_group.items()
    ]


def _convert_entry(rank: int, backend: str, group: str, pairwise: bool, entry: Entry) -> Collective:
    """Converts an entry of the recorder."""
    number = entry["p2p_seq_id"] if pairwise else entry["collective_seq_id"]
    call = shorten(
        escape_control_characters(str(entry["profiling_name"]).removeprefix(f"{backend}:")), _MAX_NAME_CHARACTERS
    )
    return Collective(
        (rank,), group, int(number), call, _describe_tensors(entry), _call_state(backend, entry), pairwise
    )


def _call_state(backend: str, entry: Entry) -> Any:
    """Returns the state of a call. A `retired` call is over with gloo, but may have timed out with NCCL."""
    if entry["state"] == "completed" or (backend == "gloo" and entry["retired"]):
        return "finished"
    return "started" if entry["state"] == "started" else "scheduled"


def _group_name(backend: str, entry: Entry) -> str:
    """Returns the group's name, which is equal on all its ranks, preceded by the program's description of the group."""
    name, description = (*entry["process_group"], "", "")[:2]
    is_described = description not in ("", "undefined", name)
    full_name = (
        "default_pg" if description == "default_pg" else f"{description} {name}" if is_described else f"group {name}"
    )
    return shorten(
        escape_control_characters(full_name if backend == "gloo" else f"{full_name}, {backend}"), _MAX_NAME_CHARACTERS
    )


def _describe_tensors(entry: Entry) -> str:
    """Describes the types and sizes of a call's input tensors."""
    types, sizes = entry["input_dtypes"], entry["input_sizes"]
    descriptions = [f"{kind}[{', '.join(map(str, size))}]" for kind, size in zip(types, sizes, strict=False)]
    suffix = f" and {len(descriptions) - _MAX_TENSORS} more" if len(descriptions) > _MAX_TENSORS else ""
    return shorten(escape_control_characters(", ".join(descriptions[:_MAX_TENSORS]) + suffix), _MAX_NAME_CHARACTERS)


# ---- agent client ----------------------------------------------------------------------------------------------------

_ATTACH_SECONDS = 30.0
"""Time limit for the agent's reply to Attach."""
_STAGED_SAVES_SECONDS = 5.0
"""Time limit for the replies to FindStagedSaves."""
_SERVERS_SECONDS = 5.0
"""Wait for the complete list of memory servers, until the caller asks again: the coordinator may be restarting."""
_ARENA_SECONDS = 300.0
"""Time limit for staging memory: prefaulting hundreds of GB takes minutes, once in an agent's life."""
_SEND_SECONDS = 5.0
"""Time limit for sending a message."""
_METRICS_SECONDS = 1.0
"""Least interval between two metrics reports: collecting one takes some milliseconds, and saves may be more frequent."""


class AgentBackend:
    """Implements `save_backend.SaveBackend` over the agent's Unix socket; made by `connect`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._metric_deltas = MetricDeltas(metrics.FAMILIES)
        self._has_new_metrics, self._next_report_seconds = False, 0.0
        self._reporting = threading.Lock()
        """Serialises metrics reports, so that the last one is sent before `close` sends Detach."""
        self._changed = threading.Condition()
        # everything below is guarded by _changed
        self._attached: Attached | None = None
        self._grant: line.ArenaGranted | None = None
        self._grant_fd: int | None = None
        self._denied_reason: str | None = None
        """Why the agent denied the last request for staging memory; None: it did not."""
        self._fds: deque[int] = deque()
        """Received descriptors, each before the message that it belongs to is decoded."""
        self._staged_replies = StagedReplies()
        self._servers: tuple[MemoryServerEndpoint, ...] | None = None
        self._busy_slots: set[int] = set()
        self._staged_slots: dict[int, int] = {}
        """Step of the last save in each slot."""
        self._slots = 0
        self._last_step = 0
        """Newest step that this rank has finished or is about to finish: barriers at it or before it are rejected."""
        self._barrier_step: int | None = None
        """Step of the accepted or bound barrier; None: there is none."""
        self._interval_exponent = 0
        self._broken_reason: str | None = None
        """Why the connection is unusable; None: it is not."""
        self._closing = False
        self._mapping: StagingMapping | None = None
        self._memory: memoryview | None = None
        self._reader = threading.Thread(target=self._receive_messages, name="surefoot-link", daemon=True)

    @classmethod
    def connect(cls, environment: Mapping[str, str] = os.environ) -> AgentBackend:
        """Attaches this trainer to its agent; raises SurefootError if the agent rejects it or does not answer."""
        try:
            path = environment["SUREFOOT_AGENT_SOCKET"]
            attach = line.Attach(int(environment["RANK"]), int(environment["SUREFOOT_GENERATION"]), os.getpid())
        except KeyError as error:
            raise ConfigurationError(
                f"{error.args[0]} is not set: an agent sets it for its trainers; without one use the library mode"
            ) from error
        install_stack_handler(
            environment.get("SUREFOOT_STACK_DUMP_FILE")
        )  # for programs that the fork server did not start
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_socket_path(Path(path)) as name:
                connection.connect(name)
        except OSError as error:
            connection.close()
            raise SurefootError(f"cannot connect to the agent's socket {path}: {error}") from error
        link = cls(connection)
        # the reader must run before Attach is sent, as it receives the reply
        link._reader.start()
        link._send_message(attach)
        with link._changed:
            link._changed.wait_for(
                lambda: link._attached is not None or link._broken_reason is not None, _ATTACH_SECONDS
            )
        if link._attached is None:
            link.close(0)
            reason = link._broken_reason or f"it did not answer within {_ATTACH_SECONDS:g} s"
            raise SurefootError(
                f"the agent did not admit rank {attach.rank} of generation {attach.generation}: {reason}; see the agent's log"
            )
        return link

    @property
    def attached(self) -> Attached:
        """The agent's description of this rank's generation."""
        assert self._attached is not None, "connect() waits for it"
        return self._attached

    def request_arena(self, slot_bytes: int) -> tuple[memoryview, int, int]:
        """Requests staging memory, or returns the present one if it is large enough."""
        if self._memory is not None and self._grant is not None and self._grant.slot_bytes >= slot_bytes:
            return self._memory, self._grant.slots, self._grant.slot_bytes
        grant, fd = self._await_grant(slot_bytes)
        try:
            # a restore in place may have mapped this very file already
            if self._mapping is None or self._mapping.inode != os.fstat(fd).st_ino:
                self._mapping = StagingMapping(fd)
        finally:
            os.close(fd)
        self._mapping.prefault_rest()
        self._memory = self._mapping.memory
        return self._memory, grant.slots, grant.slot_bytes

    def find_reusable_saves(self, checkpoint: Checkpoint) -> Mapping[int, ReusableSave]:
        """Asks the agent for staged saves of a checkpoint; none if it does not answer, as memory servers have them all.

        Returns:
            The save of each rank that has one here.
        """
        with self._changed:
            self._staged_replies.start_collecting()
        self._send_message(line.FindStagedSaves(checkpoint))
        with self._changed:
            self._changed.wait_for(
                lambda: self._staged_replies.is_complete or self._broken_reason is not None, _STAGED_SAVES_SECONDS
            )
            replies = self._staged_replies.take_replies()
            # this rank's own saves occupy slots: the newest must not be overwritten first
            self._staged_slots |= {
                slot: checkpoint.step for own_reply, _ in replies[:1] for _, slot, *_ in own_reply.saves
            }
        saves_by_rank = {}
        # the first reply is this rank's own memory, which becomes its staging memory; others are only read
        for reply_index, (reply, fd) in enumerate(replies):
            if fd is None:
                continue
            ranges = [
                range(slot * reply.slot_bytes, slot * reply.slot_bytes + size) for _, slot, size, _ in reply.saves
            ]
            try:
                memory = self._map_own_file(fd, ranges) if reply_index == 0 else _map_read_only(fd)
            finally:
                os.close(fd)
            for (rank, _, _, layout), stream_range in zip(reply.saves, ranges, strict=True):
                saves_by_rank[rank] = ReusableSave(
                    memory[stream_range.start : stream_range.stop], layout, is_own=reply_index == 0
                )
        return saves_by_rank

    def fetch_all_servers(self) -> tuple[MemoryServerEndpoint, ...] | None:
        """Asks the agent for the complete list of memory servers; None if it is not known yet."""
        if not self.attached.is_partial:
            return self.attached.servers
        self._send_message(line.RequestAllServers())
        with self._changed:
            self._changed.wait_for(
                lambda: self._servers is not None or self._broken_reason is not None, _SERVERS_SECONDS
            )
            return self._servers

    def _map_own_file(self, fd: int, ranges: Sequence[range]) -> memoryview:
        """Maps this rank's own file, which the agent will later grant as staging memory."""
        self._mapping = StagingMapping(fd)
        for stream_range in ranges:
            self._mapping.prefault(stream_range)
        return self._mapping.memory.toreadonly()

    def wait_for_free_slot(self, wait_seconds: float) -> int | None:
        """Waits for a slot whose save is flushed; None if there is none in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._oldest_free_slot() is not None or self._broken_reason is not None, wait_seconds
            )
            return self._oldest_free_slot()

    def hand_over_slot(self, message: Staged) -> None:
        """Reports a slot with a complete save, which the agent flushes from now on."""
        with self._changed:
            self._busy_slots.add(message.slot)
            self._staged_slots[message.slot] = message.step
        self._send_message(message)

    def report_step(self, message: StepReport) -> None:
        """Reports a finished step, and makes the reader thread report metrics if a save was made or skipped."""
        with self._changed:
            self._last_step = max(self._last_step, message.progress.step)
        self._send_message(message)
        # metrics hardly change except by saves; the reader thread collects them, as training would have to wait
        self._has_new_metrics = self._has_new_metrics or message.skipped or message.progress.stall_seconds is not None

    def report_pause(self, message: PauseReport) -> None:
        """Reports the start or the end of an announced pause."""
        self._send_message(message)

    def is_barrier_at(self, step: int) -> bool:
        """Returns whether an accepted or bound barrier is at this step."""
        with self._changed:
            # from here on a proposal for this step comes too late and is rejected
            self._last_step = max(self._last_step, step)
            return self._barrier_step == step

    def wait_at_barrier(self, step: int) -> None:
        """Reports that the barrier is reached, and waits until it is cancelled or the connection breaks."""
        self._send_message(BarrierReached(self.attached.generation, step))
        with self._changed:
            while self._barrier_step == step and self._broken_reason is None:
                self._changed.wait(1.0)

    def min_interval_exponent(self) -> int:
        """Returns the least interval exponent, as the agent sent it last."""
        with self._changed:
            return self._interval_exponent

    def report_restore(
        self, step: int, source: str, size_bytes: int, seconds: float, anomalies: AnomalyRun = NO_ANOMALIES
    ) -> None:
        """Reports that the rank has restored its state, and its metrics."""
        with self._changed:
            self._last_step = max(self._last_step, step)
        self._send_message(line.RestoreDone(step, source, size_bytes, seconds, anomalies))
        self._report_metrics()

    def report_restore_failure(self, checkpoint: Checkpoint, absent: bool, detail: str) -> None:
        """Reports an unreadable checkpoint, and the metrics."""
        self._send_message(line.RestoreFailed(checkpoint, absent, detail))
        self._report_metrics()

    def report_notice(self, reason: str, text: str) -> None:
        """Asks the agent for an event with this reason and message."""
        self._send_message(line.TrainerNotice(reason, text))

    def wait_for_flush(self, wait_seconds: float) -> bool:
        """Waits until every slot is free; returns whether that happened in time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy_slots or self._broken_reason is not None, wait_seconds)
            return not self._busy_slots

    def close(self, step: int, save_requested: bool = False) -> None:
        """Sends Detach and stops the reader thread; views keep the memory mapped."""
        if self._closing:
            return
        self._closing = True
        self._report_metrics()
        self._send_message(line.Detach(step, save_requested))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._reader.is_alive():
            self._reader.join(_SEND_SECONDS)
        self._socket.close()
        self._memory = None
        self._mapping = None

    def disable_after_fork(self) -> None:
        """Closes this copy of the socket; a shutdown would also end the parent's connection."""
        self._closing, self._broken_reason = True, "this process was forked by the rank"
        self._socket.close()

    def _await_grant(self, slot_bytes: int) -> tuple[line.ArenaGranted, int]:
        """Requests staging memory from the agent; returns its description and file descriptor."""
        with self._changed:
            previous_grant, self._denied_reason = self._grant, None
        self._send_message(line.RequestArena(slot_bytes))
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._grant is not previous_grant
                    or self._denied_reason is not None
                    or self._broken_reason is not None
                ),
                _ARENA_SECONDS,
            )
            if self._denied_reason is not None:
                raise StagingMemoryUnavailable(self._denied_reason)
            grant, fd = self._grant, self._grant_fd
            self._grant_fd = None
            if grant is None or grant is previous_grant or fd is None:
                reason = self._broken_reason or f"it did not answer within {_ARENA_SECONDS:g} s"
                raise SurefootError(
                    f"the agent granted no staging memory of 2 × {slot_bytes} bytes: {reason}; see the agent's log"
                )
            self._slots = grant.slots
            return grant, fd

    def _report_metrics(self) -> None:
        """Sends the increase of this process' metrics to the agent."""
        with self._reporting:
            self._has_new_metrics, self._next_report_seconds = False, time.monotonic() + _METRICS_SECONDS
            increases = self._metric_deltas.take_increases()
            if increases:
                self._send_message(line.MetricsReport(increases))

    def _oldest_free_slot(self) -> int | None:
        """Returns the free slot with the oldest save: the other save may be restored until the next one is complete."""
        free = [slot for slot in range(self._slots) if slot not in self._busy_slots]
        return min(free, key=lambda slot: self._staged_slots.get(slot, -1), default=None)

    def _send_message(self, message: line.FromTrainer) -> None:
        """Sends a message within a time limit; does nothing on a broken connection."""
        data = memoryview(add_frame(line.encode(message)))
        deadline = time.monotonic() + _SEND_SECONDS
        with self._sending:
            if self._broken_reason is not None:
                return
            try:
                while data:
                    # the socket stays blocking for the reader thread; only sending has a time limit
                    if not self._wait_ready(select.POLLOUT, max(0.0, deadline - time.monotonic())):
                        raise TimeoutError(f"it read nothing for {_SEND_SECONDS:g} s")
                    with contextlib.suppress(BlockingIOError):
                        data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
            except (OSError, ValueError) as error:  # ValueError: the socket is closed
                self._mark_broken(f"cannot send to the agent: {error}")

    def _wait_ready(self, event: int, seconds: float) -> bool:
        """Waits for the socket by poll(); select() fails in a program with more than a thousand open files."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(1000 * seconds))

    def _receive_messages(self) -> None:
        """Receives the agent's messages until the connection ends, and sends metrics in between."""
        frames = FrameDecoder()
        while True:
            readable = self._wait_ready(select.POLLIN, _METRICS_SECONDS)
            if self._has_new_metrics and time.monotonic() >= self._next_report_seconds:
                self._report_metrics()
            if not readable:
                continue
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
                # a descriptor arrives with the first byte of its message, so before the message is complete
                if fds:
                    self._fds += fds
                messages = [line.decode(text) for text in frames.add_bytes(data)]
            except (OSError, ProtocolError) as error:
                self._mark_broken(f"cannot receive from the agent: {error}")
                return
            for message in messages:
                self._apply_message(message)
            if not data:
                self._mark_broken("the agent closed its connection")
                return

    def _apply_message(self, message: line.FromTrainer | line.ToTrainer) -> None:
        """Applies one message of the agent."""
        if isinstance(message, line.RequestCollectives):
            self._send_message(describe_collectives(self.attached.rank, message.request))
            return
        reply: BarrierReply | None = None
        with self._changed:
            match message:
                case Attached():
                    self._attached, self._interval_exponent = message, message.interval_exponent
                case line.AllServers(servers=servers):
                    self._servers = servers
                case line.ArenaGranted():
                    self._grant, self._grant_fd = message, self._next_descriptor()
                    self._busy_slots = set(message.busy_slots)
                case line.ArenaDenied(reason=reason):
                    self._denied_reason = reason
                case line.StagedSaves(saves=saves):
                    self._staged_replies.add_reply(message, self._next_descriptor() if saves else None)
                case line.SlotFreed(slot=slot):
                    self._busy_slots.discard(slot)
                case IntervalExponent(exponent=exponent):
                    self._interval_exponent = exponent
                case Barrier(step=step, phase="proposed"):
                    reply = BarrierReply(message.generation, step, accepted=self._accept_barrier(step))
                case Barrier(step=step, phase="bound"):
                    self._barrier_step = step
                case Barrier(step=step, phase="cancelled"):
                    if step in (0, self._barrier_step):
                        self._barrier_step = None
                case _:
                    _log.warning("ignored the agent's message %s, which is not for trainers", type(message).__name__)
            self._changed.notify_all()
            if reply is not None:
                # sent under the lock, so that the agent cannot receive a later step before this reply
                self._send_message(reply)

    def _next_descriptor(self) -> int | None:
        """Returns the oldest received descriptor; None: the message carried none."""
        return self._fds.popleft() if self._fds else None

    def _accept_barrier(self, step: int) -> bool:
        """Accepts a barrier unless its step is finished or about to finish."""
        if step == self._barrier_step:
            return True
        if step <= self._last_step:
            return False
        self._barrier_step = step
        return True

    def _mark_broken(self, reason: str) -> None:
        """Marks the connection as unusable, which ends all waits."""
        with self._changed:
            if self._broken_reason is None and not self._closing:
                metrics.fallbacks.labels(kind="agent_line_broken").inc()
                _log.warning("%s: training continues, but nothing is saved any longer", reason)
            self._broken_reason = self._broken_reason or reason
            self._changed.notify_all()


def _map_read_only(fd: int) -> memoryview:
    """Maps another rank's file for reading; only pages that are read get mapped."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
