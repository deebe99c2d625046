"""Implements `SaveBackend` over the agent's socket.

`Checkpointer` saves through it where an agent started the program. A reader thread, owned here and joined by `close`,
takes the agent's words; one lock makes the answer to a proposed barrier atomic with the steps. A line that breaks never
stops the training: the agent's death kills this process anyway.
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
from surefoot.ipc.stacks import install
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
from surefoot.linux_process import reachable
from surefoot.protocol.hangs import Collective
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint
from surefoot.protocol.messages import Barrier, BarrierReached, BarrierReply, IntervalExponent
from surefoot.protocol.progress import NO_ANOMALIES, AnomalyRun
from surefoot.protocol.text import escape_control_characters, shorten

_log = logging.getLogger(__name__)


# ---- replies with staged saves ---------------------------------------------------------------------------------------
# Collects the agent's replies to `FindStagedSaves`, or closes every descriptor. Each answer may carry a descriptor,
# which somebody has to close whatever comes of it. AgentBackend owns it and guards it by its lock.

Answer = tuple[StagedSaves, int | None]


class StagedReplies:
    """Collects replies to one question at a time, and ignores later ones."""

    def __init__(self) -> None:
        self._asking = False
        self._replies: list[Answer] = []

    def begin(self) -> None:
        """The question is about to be asked."""
        self._asking = True

    def take(self, here: StagedSaves, descriptor: int | None) -> None:
        """Takes one reply; the first says how many follow."""
        if self._asking:
            self._replies.append((here, descriptor))
        elif descriptor is not None:
            os.close(descriptor)

    @property
    def complete(self) -> bool:
        return bool(self._replies) and len(self._replies) > self._replies[0][0].replies_to_follow

    def end(self) -> list[Answer]:
        """Hands over all replies with their descriptors; none if incomplete."""
        told, complete = self._replies, self.complete
        self._replies, self._asking = [], False
        if complete:
            return told
        for _, descriptor in told:
            if descriptor is not None:
                os.close(descriptor)
        return []


# ---- flight recorder -------------------------------------------------------------------------------------------------
# Reads from PyTorch's flight recorder which collective this rank is in. `answer` runs in the trainer, on the thread
# that hears the agent: a rank that waits in a collective has released the GIL. Torch is not imported here: a program
# that has not done so has made no collective. Its settings of the recorder (TORCH_FR_BUFFER_SIZE, in older releases
# TORCH_NCCL_TRACE_BUFFER_SIZE) are its own and stay.

MOST_GROUPS = 16
_LONGEST = 60
"""Characters of a group's name, and of the tensors of a call."""
_MOST_TENSORS = 4
_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}

Entry = Mapping[str, Any]


def describe_collectives(rank: int, request: int) -> CollectivesReport:
    """This rank's collectives, or why there are none to tell."""
    torch = sys.modules.get("torch")
    bindings = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    found: list[tuple[Collective, float]] = []
    why = "this PyTorch has no flight recorder"
    for backend, name in _DUMPS.items():
        dump = getattr(bindings, name, None)
        if dump is None:
            continue
        try:
            entries = json.loads(dump()).get("entries", ())
            found += collectives(rank, backend, entries, time.time())
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"its flight recorder cannot be read: {shorten(escape_control_characters(repr(error)))}"
        else:
            why = "its flight recorder holds nothing"
    found = sorted(found, key=lambda one: (not one[0].waits, one[1]))[:MOST_GROUPS]
    return CollectivesReport(
        request, tuple(c for c, _ in found), tuple(seconds for _, seconds in found), "" if found else why
    )


def collectives(rank: int, backend: str, entries: Iterable[Entry], now: float) -> list[tuple[Collective, float]]:
    """Chooses each group's first unfinished call, else its last.

    Each with the seconds since it was made. Calls of one group are carried out in their order, so all later ones wait for the first unfinished. Entries come in the order
    in which they were made.
    """
    chosen: dict[tuple[str, bool], Entry] = {}
    for entry in entries:
        key = (_group(backend, entry), bool(entry.get("is_p2p")))
        before = chosen.get(key)
        if before is None or _state(backend, before) == "finished":
            chosen[key] = entry
    return [
        (_collective(rank, backend, group, pairwise, entry), round(max(0.0, now - entry["time_created_ns"] / 1e9), 1))
        for (group, pairwise), entry in chosen.items()
    ]


def _collective(rank: int, backend: str, group: str, pairwise: bool, entry: Entry) -> Collective:
    number = entry["p2p_seq_id"] if pairwise else entry["collective_seq_id"]
    call = shorten(escape_control_characters(str(entry["profiling_name"]).removeprefix(f"{backend}:")), _LONGEST)
    return Collective((rank,), group, int(number), call, _tensors(entry), _state(backend, entry), pairwise)


def _state(backend: str, entry: Entry) -> Any:
    """Gloo only retires what is over; NCCL retires what has timed out too."""
    if entry["state"] == "completed" or (backend == "gloo" and entry["retired"]):
        return "finished"
    return "started" if entry["state"] == "started" else "scheduled"


def _group(backend: str, entry: Entry) -> str:
    """The group's name, which is the same on all its ranks; what its program says of it comes first."""
    name, description = (*entry["process_group"], "", "")[:2]
    known = description not in ("", "undefined", name)
    words = "default_pg" if description == "default_pg" else f"{description} {name}" if known else f"group {name}"
    return shorten(escape_control_characters(words if backend == "gloo" else f"{words}, {backend}"), _LONGEST)


def _tensors(entry: Entry) -> str:
    types, sizes = entry["input_dtypes"], entry["input_sizes"]
    told = [f"{kind}[{', '.join(map(str, size))}]" for kind, size in zip(types, sizes, strict=False)]
    more = f" and {len(told) - _MOST_TENSORS} more" if len(told) > _MOST_TENSORS else ""
    return shorten(escape_control_characters(", ".join(told[:_MOST_TENSORS]) + more), _LONGEST)


# ---- agent client ----------------------------------------------------------------------------------------------------

_ATTACH_SECONDS = 30.0
_LEFT_SECONDS = 5.0
_SERVERS_SECONDS = 5.0
"""Until it is asked again: the agent asks the coordinator, which may be on its way back."""
_ARENA_SECONDS = 300.0
"""Touching hundreds of GB takes minutes; it happens once in an agent's life."""
_SEND_SECONDS = 5.0
_COUNT_SECONDS = 1.0
"""Looking through what was counted costs a millisecond or two: saves may come oftener than it is worth."""


class AgentBackend:
    """Implements `backend.SaveBackend` over the agent's Unix socket; made by `connect`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._growth = MetricDeltas(metrics.FAMILIES)
        self._uncounted, self._count_at = False, 0.0
        self._counting = threading.Lock()
        """What one thread has taken is sent before another takes the rest, and says goodbye."""
        self._changed = threading.Condition()
        # everything below is guarded by _changed
        self._attached: Attached | None = None
        self._given: line.ArenaGranted | None = None
        self._given_fd: int | None = None
        self._rejected: str | None = None
        """Why the agent has no memory for us, since we last asked."""
        self._fds: deque[int] = deque()
        """Descriptors, each ahead of the message that it belongs to."""
        self._left = StagedReplies()
        self._servers: tuple[MemoryServerEndpoint, ...] | None = None
        self._busy: set[int] = set()
        self._staged_slots: dict[int, int] = {}
        """Slot → step of what was last sealed in it."""
        self._slots = 0
        self._at = 0
        self._barrier_step: int | None = None
        self._interval_exponent = 0
        self._broken: str | None = None
        self._closing = False
        self._mapping: StagingMapping | None = None
        self._memory: memoryview | None = None
        self._reader = threading.Thread(target=self._read, name="surefoot-link", daemon=True)

    @classmethod
    def connect(cls, environment: Mapping[str, str] = os.environ) -> AgentBackend:
        """Attaches this trainer to its agent; SurefootError if it is refused."""
        try:
            path = environment["SUREFOOT_AGENT_SOCKET"]
            attach = line.Attach(int(environment["RANK"]), int(environment["SUREFOOT_GENERATION"]), os.getpid())
        except KeyError as error:
            raise ConfigurationError(
                f"{error.args[0]} is not set: an agent sets it for its trainers; without one use the library mode"
            ) from error
        install(environment.get("SUREFOOT_STACK_DUMP_FILE"))  # for a program that was not forked from the warm process
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with reachable(Path(path)) as name:
                connection.connect(name)
        except OSError as error:
            connection.close()
            raise SurefootError(f"the agent's socket {path} does not answer: {error}") from error
        link = cls(connection)
        link._reader.start()
        link._send(attach)
        with link._changed:
            link._changed.wait_for(lambda: link._attached is not None or link._broken is not None, _ATTACH_SECONDS)
        if link._attached is None:
            link.close(0)
            why = link._broken or "it did not answer"
            raise SurefootError(f"the agent did not take rank {attach.rank} of epoch {attach.generation}: {why}")
        return link

    @property
    def attached(self) -> Attached:
        assert self._attached is not None, "connect() waits for it"
        return self._attached

    def request_arena(self, slot_bytes: int) -> tuple[memoryview, int, int]:
        """Requests staging memory once and reuses it while large enough."""
        if self._memory is not None and self._given is not None and self._given.slot_bytes >= slot_bytes:
            return self._memory, self._given.slots, self._given.slot_bytes
        given, fd = self._ask_for_memory(slot_bytes)
        try:
            if self._mapping is None or self._mapping.file != os.fstat(fd).st_ino:
                self._mapping = StagingMapping(fd)
        finally:
            os.close(fd)
        self._mapping.fill_rest()
        self._memory = self._mapping.memory
        return self._memory, given.slots, given.slot_bytes

    def reusable_saves(self, checkpoint: Checkpoint) -> Mapping[int, ReusableSave]:
        """Asks the agent for sealed saves; none if it does not answer.

        Holders have them all.
        """
        with self._changed:
            self._left.begin()
        self._send(line.FindStagedSaves(checkpoint))
        with self._changed:
            self._changed.wait_for(lambda: self._left.complete or self._broken is not None, _LEFT_SECONDS)
            told = self._left.end()
            self._staged_slots |= {slot: checkpoint.step for own, _ in told[:1] for _, slot, *_ in own.saves}
        found = {}
        for number, (here, fd) in enumerate(told):
            if fd is None:
                continue
            places = [range(slot * here.slot_bytes, slot * here.slot_bytes + size) for _, slot, size, _ in here.saves]
            try:
                whole = self._mapped(fd, places) if number == 0 else _only_read(fd)
            finally:
                os.close(fd)
            for (rank, _, _, layout), place in zip(here.saves, places, strict=True):
                found[rank] = ReusableSave(whole[place.start : place.stop], layout, own=number == 0)
        return found

    def fetch_all_servers(self) -> tuple[MemoryServerEndpoint, ...] | None:
        """Asks the agent for every holder; None if nobody said yet."""
        if not self.attached.is_partial:
            return self.attached.servers
        self._send(line.RequestAllServers())
        with self._changed:
            self._changed.wait_for(lambda: self._servers is not None or self._broken is not None, _SERVERS_SECONDS)
            return self._servers

    def _mapped(self, fd: int, places: Sequence[range]) -> memoryview:
        """Maps this rank's own file, which the agent will give as staging memory too."""
        self._mapping = StagingMapping(fd)
        for place in places:
            self._mapping.fill(place)
        return self._mapping.memory.toreadonly()

    def free_slot(self, wait_seconds: float) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._free() is not None or self._broken is not None, wait_seconds)
            return self._free()

    def hand_over_slot(self, message: Staged) -> None:
        with self._changed:
            self._busy.add(message.slot)
            self._staged_slots[message.slot] = message.step
        self._send(message)

    def report_step(self, message: StepReport) -> None:
        with self._changed:
            self._at = max(self._at, message.progress.step)
        self._send(message)
        # hardly anything but a save counts in a trainer; the reader looks, for the training would wait
        self._uncounted = self._uncounted or message.skipped or message.progress.stall_seconds is not None

    def report_pause(self, message: PauseReport) -> None:
        self._send(message)

    def is_barrier_at(self, step: int) -> bool:
        with self._changed:
            # from here on a proposal for this step comes too late and is refused
            self._at = max(self._at, step)
            return self._barrier_step == step

    def wait_at_barrier(self, step: int) -> None:
        self._send(BarrierReached(self.attached.generation, step))
        with self._changed:
            while self._barrier_step == step and self._broken is None:
                self._changed.wait(1.0)

    def min_interval_exponent(self) -> int:
        with self._changed:
            return self._interval_exponent

    def report_restore(
        self, step: int, source: str, size_bytes: int, seconds: float, odd: AnomalyRun = NO_ANOMALIES
    ) -> None:
        with self._changed:
            self._at = max(self._at, step)
        self._send(line.RestoreDone(step, source, size_bytes, seconds, odd))
        self._count()

    def restore_failed(self, checkpoint: Checkpoint, absent: bool, detail: str) -> None:
        self._send(line.RestoreFailed(checkpoint, absent, detail))
        self._count()

    def notify(self, reason: str, text: str) -> None:
        self._send(line.TrainerNotice(reason, text))

    def flush(self, wait_seconds: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy or self._broken is not None, wait_seconds)
            return not self._busy

    def close(self, step: int, offered: bool = False) -> None:
        """Tells the agent and ends the reader; views keep the memory mapped."""
        if self._closing:
            return
        self._closing = True
        self._count()
        self._send(line.Detach(step, offered))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._reader.is_alive():
            self._reader.join(_SEND_SECONDS)
        self._socket.close()
        self._memory = None
        self._mapping = None

    def disable_after_fork(self) -> None:
        """Closes this copy of the socket; a shutdown would end the parent's."""
        self._closing, self._broken = True, "this process was forked by the rank"
        self._socket.close()

    def _ask_for_memory(self, slot_bytes: int) -> tuple[line.ArenaGranted, int]:
        with self._changed:
            before, self._rejected = self._given, None
        self._send(line.RequestArena(slot_bytes))
        with self._changed:
            self._changed.wait_for(
                lambda: self._given is not before or self._rejected is not None or self._broken is not None,
                _ARENA_SECONDS,
            )
            if self._rejected is not None:
                raise StagingMemoryUnavailable(self._rejected)
            given, fd = self._given, self._given_fd
            self._given_fd = None
            if given is None or given is before or fd is None:
                why = self._broken or "it did not answer"
                raise SurefootError(f"the agent gave no staging memory of 2 × {slot_bytes} bytes: {why}; see its log")
            self._slots = given.slots
            return given, fd

    def _count(self) -> None:
        with self._counting:
            self._uncounted, self._count_at = False, time.monotonic() + _COUNT_SECONDS
            grown = self._growth.take()
            if grown:
                self._send(line.MetricsReport(grown))

    def _free(self) -> int | None:
        """Chooses the free slot sealed longest ago: until the next save is complete the other may be restored."""
        free = [slot for slot in range(self._slots) if slot not in self._busy]
        return min(free, key=lambda slot: self._staged_slots.get(slot, -1), default=None)

    def _send(self, message: line.FromTrainer) -> None:
        data = memoryview(add_frame(line.encode(message)))
        deadline = time.monotonic() + _SEND_SECONDS
        with self._sending:
            if self._broken is not None:
                return
            try:
                while data:
                    # the socket stays blocking for the reader; only sending has a time limit
                    if not self._ready(select.POLLOUT, max(0.0, deadline - time.monotonic())):
                        raise TimeoutError(f"nothing for {_SEND_SECONDS:g} s")
                    with contextlib.suppress(BlockingIOError):
                        data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
            except (OSError, ValueError) as error:  # ValueError: the socket is closed
                self._break(f"the agent does not take messages: {error}")

    def _ready(self, event: int, seconds: float) -> bool:
        """Not by select(), which fails in a program that has more than a thousand files open."""
        waiting = select.poll()
        waiting.register(self._socket, event)
        return bool(waiting.poll(1000 * seconds))

    def _read(self) -> None:
        unframer = FrameDecoder()
        while True:
            readable = self._ready(select.POLLIN, _COUNT_SECONDS)
            if self._uncounted and time.monotonic() >= self._count_at:
                self._count()
            if not readable:
                continue
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
                if fds:
                    self._fds += fds
                messages = [line.decode(text) for text in unframer.feed(data)]
            except (OSError, ProtocolError) as error:
                self._break(f"the line to the agent broke: {error}")
                return
            for message in messages:
                self._take(message)
            if not data:
                self._break("the agent closed the line")
                return

    def _take(self, message: line.FromTrainer | line.ToTrainer) -> None:
        if isinstance(message, line.RequestCollectives):
            self._send(describe_collectives(self.attached.rank, message.request))
            return
        reply: BarrierReply | None = None
        with self._changed:
            match message:
                case Attached():
                    self._attached, self._interval_exponent = message, message.interval_exponent
                case line.AllServers(servers=holders):
                    self._servers = holders
                case line.ArenaGranted():
                    self._given, self._given_fd = message, self._descriptor()
                    self._busy = set(message.busy_slots)
                case line.ArenaDenied(reason=why):
                    self._rejected = why
                case line.StagedSaves(saves=saves):
                    self._left.take(message, self._descriptor() if saves else None)
                case line.SlotFreed(slot=slot):
                    self._busy.discard(slot)
                case IntervalExponent(exponent=level):
                    self._interval_exponent = level
                case Barrier(step=step, phase="proposed"):
                    reply = BarrierReply(message.generation, step, accepted=self._accept(step))
                case Barrier(step=step, phase="bound"):
                    self._barrier_step = step
                case Barrier(step=step, phase="cancelled"):
                    if step in (0, self._barrier_step):
                        self._barrier_step = None
                case _:
                    _log.warning("the agent said %s, which a trainer does not expect", type(message).__name__)
            self._changed.notify_all()
            if reply is not None:
                # sent under the lock: the agent must not hear of a later step before this answer
                self._send(reply)

    def _descriptor(self) -> int | None:
        return self._fds.popleft() if self._fds else None

    def _accept(self, step: int) -> bool:
        if step == self._barrier_step:
            return True
        if step <= self._at:
            return False
        self._barrier_step = step
        return True

    def _break(self, why: str) -> None:
        with self._changed:
            if self._broken is None and not self._closing:
                metrics.fallbacks.labels(what="agent_line_broken").inc()
                _log.warning("%s: the training goes on, saves do not", why)
            self._broken = self._broken or why
            self._changed.notify_all()


def _only_read(fd: int) -> memoryview:
    """Maps another rank's file; only what is read of it is mapped in."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
