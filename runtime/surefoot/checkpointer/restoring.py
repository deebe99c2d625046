"""Restores a checkpoint into the live program, or reads weights alone.

Called by `checkpointer`. Tensors in host memory are filled where they lie; others in parts, through a buffer. A program that does
not fit is the application's failure (StateMismatch); a checkpoint that cannot be read is reported, for the operator to
choose another.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from surefoot import metrics
from surefoot.checkpointer.backends import ConnectedBackend
from surefoot.errors import ConfigurationError, StateMismatch, Unreadable
from surefoot.geometry import Box
from surefoot.geometry.sharding import Grid
from surefoot.ipc.save_backend import ReusableSave, SaveBackend
from surefoot.ipc.trainer_messages import Attached
from surefoot.protocol.checkpoints.completeness import is_on_lineage
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES
from surefoot.protocol.checkpoints.save_state import tied_objects
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.progress import AnomalyRun
from surefoot.restore.catalogue import read_catalogue
from surefoot.restore.exchange import CommonDestinations, ExchangeFailed
from surefoot.restore.fetch import BoxReceiver, Destination
from surefoot.restore.read_plan import group_shared_destinations
from surefoot.restore.reader import CheckpointReader, ReadOptions
from surefoot.state import AllowedDifferences, Entry, Program, SavedTensor, read_values

_log = logging.getLogger(__name__)


# ---- exchange over gloo ----------------------------------------------------------------------------------------------
# Exchanges restore reads between ranks: metadata by the store, bytes over gloo. A group of its own for each exchange,
# between its members alone and never registered with torch: an operation that times out or loses a member breaks its
# group for good, and must not break one that the training goes on with. For the same reason bytes never go over NCCL,
# which ends the process after a timeout; they are verified in host memory anyway. Used by `restoring`.

WITHDRAWN = "withdrawn"
_TORCH_MESSAGE = (RuntimeError, ValueError)
_turns = 0  # how many restores of this process could share; the same on all ranks, as they restore alike


@dataclass(frozen=True, slots=True)
class ShareReads:
    """When ranks that restore the same bytes share the reading."""

    min_bytes: int = 64 * 1024 * 1024
    """What a group of replicas must have in common: a smaller exchange takes longer than it saves."""
    timeout_seconds: float = 20.0
    """How long a member waits for the others, each time, before it reads by itself."""


class RestorePeers:
    """All ranks that restore together, in one restore."""

    def __init__(self, rank: int, store: Any, name: str, options: ShareReads) -> None:
        self.rank, self.options = rank, options
        self._store, self._name = store, name

    def subgroup(self, members: tuple[int, ...]) -> GlooPeers:
        """The line between some of them, this rank included."""
        name = f"{self._name}/{'-'.join(map(str, members))}"
        return GlooPeers(self._store, name, members, self.rank, self.options.timeout_seconds)


def restore_peers(about: Attached, options: ShareReads) -> RestorePeers | None:
    """The peers to exchange reads with; None: each rank reads alone.

    That is so without gloo, and without a process group of exactly this epoch's ranks.
    """
    global _turns
    if about.world_size == 1 or "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and hasattr(dist, "ProcessGroupGloo")):
        return None
    if (dist.get_rank(), dist.get_world_size()) != (about.rank, about.world_size):
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    _turns += 1
    return RestorePeers(about.rank, _get_default_store(), f"surefoot/share/{about.generation}/{_turns}", options)


class GlooPeers:
    """`restore.exchange.Peers` between ranks of a process group."""

    def __init__(self, store: Any, name: str, members: tuple[int, ...], rank: int, wait_seconds: float) -> None:
        self.members, self.own_index = members, members.index(rank)
        self.timeout_seconds = wait_seconds
        self._store, self._name = store, name
        self._group: Any = None
        self._calls = 0

    def exchange_proposals(self, mine: str) -> list[str]:
        """Publishes this member's card and waits for the others'.

        A member that times out withdraws its card, so that one that comes later does not wait for it.
        """
        keys = [f"{self._name}/{rank}" for rank in self.members]
        try:
            self._store.set(keys[self.own_index], mine)
            try:
                self._store.wait(keys, timedelta(seconds=self.timeout_seconds))
            except _TORCH_MESSAGE as late:
                self._store.set(keys[self.own_index], WITHDRAWN)
                raise ExchangeFailed(
                    f"not all of ranks {self.members} came within {self.timeout_seconds} s: {_short(late)}"
                ) from late
            return [self._store.get(key).decode(errors="replace") for key in keys]
        except _TORCH_MESSAGE as broken:
            raise ExchangeFailed(f"the store of the process group does not answer: {_short(broken)}") from broken

    def exchange_buffers(self, sent: memoryview, into: Sequence[memoryview]) -> Callable[[], None]:
        works: list[Any] = []
        count = len(self.members)
        self._calls += 1  # a tag of its own: what one call sends is never taken for another's
        try:
            group = self._join()
            for step in range(1, count):
                source = (self.own_index - step) % count
                if into[source].nbytes:
                    works.append(group.recv([torch.frombuffer(into[source], dtype=torch.uint8)], source, self._calls))
            for step in range(1, count if sent.nbytes else 1):
                target = (self.own_index + step) % count
                works.append(group.send([torch.frombuffer(sent, dtype=torch.uint8)], target, self._calls))
        except _TORCH_MESSAGE as broken:
            raise self._lost(broken) from broken

        def wait() -> None:
            try:
                for work in works:
                    work.wait(timedelta(seconds=self.timeout_seconds))
            except _TORCH_MESSAGE as broken:
                raise self._lost(broken) from broken

        return wait

    def close(self) -> None:
        self._group = None

    def _join(self) -> Any:
        """The group, made when it is first needed: all members do so at once."""
        if self._group is None:
            from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

            store = PrefixStore(f"{self._name}/gloo", self._store)
            limit = timedelta(seconds=self.timeout_seconds)
            self._group = ProcessGroupGloo(store, self.own_index, len(self.members), limit)
        return self._group

    def _lost(self, problem: Exception) -> ExchangeFailed:
        return ExchangeFailed(f"a member of ranks {self.members} is lost or slow: {_short(problem)}")


def _short(problem: Exception) -> str:
    """The first line of torch's message, without its stack."""
    return str(problem).partition("\n")[0][:300]


# ---- device relay ----------------------------------------------------------------------------------------------------
# Fills tensors on devices, and conjugated ones, part by part. A reading thread has one buffer of a chunk, pinned where
# there is CUDA, and waits for each copy out of it while others read. Before, all of a rank's state stood in host memory
# a second time until the last byte had come.


def needs_relay(live: torch.Tensor) -> bool:
    """Returns whether a tensor's memory cannot be filled where it lies."""
    overlaps = any(n > 1 and step == 0 for n, step in zip(live.shape, live.stride(), strict=True))
    return live.device.type != "cpu" or live.is_conj() or live.is_neg() or overlaps


class Relays:
    """Owns the buffers of a restore's threads."""

    def __init__(self) -> None:
        self._mine = threading.local()
        self._devices: set[torch.device] = set()

    def to(self, live: torch.Tensor) -> TensorRelay:
        """Makes the receiver of one tensor."""
        self._devices.add(live.device)
        return TensorRelay(live, self)

    def buffer(self, pinned: bool) -> torch.Tensor:
        """This thread's."""
        made: dict[bool, torch.Tensor] = self._mine.__dict__.setdefault("buffers", {})
        if pinned not in made:
            made[pinned] = torch.empty(MAX_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return made[pinned]

    def finish(self) -> None:
        """Waits for what devices still do with what they were given."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


class TensorRelay:
    """Receives parts of one tensor (`restore.fetch.BoxReceiver`)."""

    def __init__(self, live: torch.Tensor, relays: Relays) -> None:
        self._live, self._relays = live, relays
        self._pinned = live.device.type == "cuda"

    def part_buffer(self, size_bytes: int) -> memoryview:
        """Gives the beginning of this thread's buffer."""
        memory: memoryview = self._relays.buffer(self._pinned).numpy().data
        return memory[:size_bytes]

    def write_part(self, part: Box) -> None:
        """Copies what was written there to its place.

        A copy to a device has read it when this returns.
        """
        size = part.volume * self._live.itemsize
        found = self._relays.buffer(self._pinned)[:size].view(self._live.dtype).view(part.lengths)
        place = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.lengths, strict=True))
        with torch.no_grad():  # each thread's own
            self._live[place].copy_(found)


# ---- restoring -------------------------------------------------------------------------------------------------------

Values = Mapping[str, Any]
"""The plain values of one rank."""


EXACTLY = AllowedDifferences()
"""Program and checkpoint agree in every name, shape and type."""

MAX_REPORTED_DIFFERENCES = 10
"""Differences that are said to people one by one."""

DECISION_SECONDS = 60.0
"""How long a rank that cannot read its checkpoint waits to be stopped by its agent before it fails by itself."""


def restore(
    program: Program, connected: ConnectedBackend, share: ShareReads | None = None, fit: AllowedDifferences = EXACTLY
) -> int:
    """Fills the program from the epoch's restore point; returns finished steps.

    `share`: exchange common reads with other ranks. Without an agent an unreadable checkpoint gives way to the next
    older one, on all ranks alike.
    """
    link, together = connected.backend, connected.agreement
    while (parent := link.attached.parent) is not None:
        try:
            if _restore_from(program, connected, parent, (share, fit)):
                return parent.step
            continue  # all ranks chose another
        except Unreadable as problem:
            link.report_restore_failure(parent, problem.absent, str(problem))
            if together is None:
                # the operator chooses another checkpoint and has this process killed; ending first would look like a fault
                threading.Event().wait(DECISION_SECONDS)
                raise
            together.agree(problem)
    link.report_restore(0, "none", 0, 0.0)
    return 0


def _restore_from(
    program: Program, connected: ConnectedBackend, parent: Checkpoint, how: tuple[ShareReads | None, AllowedDifferences]
) -> bool:
    """Whether it was; False where this rank could read it, and another could not."""
    begun = time.perf_counter()
    share, fit = how
    link, about, together = connected.backend, connected.backend.attached, connected.agreement
    with _collector_paused(), _reader(connected, parent, link.find_reusable_saves(parent)) as reader:
        try:
            same_world = reader.world_size == about.world_size
            shared = read_values(reader.read_values(0))
            own = shared if about.rank == 0 else read_values(reader.read_values(about.rank)) if same_world else None
            if not same_world:
                _divide(program, reader, link)
            differences = _prepare(program, reader, (shared, own), about.rank, fit)
            targets = program.targets()
            with torch.no_grad():
                taken = fill(reader, targets, restore_peers(about, share) if share is not None else None)
        except Unreadable:
            raise
        except BaseException as error:
            if together is not None:
                together.withdraw(error)
            raise
        if together is not None and not together.agree(None):
            return False
        program.apply(parent.step, shared, own)
        before = shared if own is None else own
        program.recent, program.anomalies = (
            before.get("recent") or {},
            AnomalyRun.from_stored_values(before.get("anomalies") or {}),
        )
        _report_differences(link, differences)
        link.report_restore(parent.step, taken[0], taken[1], time.perf_counter() - begun, program.anomalies)
        for damage in reader.heal(about.generation):
            link.report_notice("CorruptionDetected", damage)
    return True


def _divide(program: Program, reader: CheckpointReader, link: SaveBackend) -> None:
    """Divides each rank's own state in a world of another size, or begins it anew where that was allowed, or
    refuses."""

    def states_of(name: str) -> list[Any]:
        return [read_values(reader.read_values(rank))["parts"][name] for rank in range(reader.world_size)]

    tied = tied_objects(reader.manifest_of(rank) for rank in range(reader.world_size))
    for sentence in program.divide(tied, reader.world_size, states_of):
        _log.warning("%s", sentence)
        link.report_notice("StateReset", sentence)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Planning makes many small objects and no garbage that refers to itself; looking through all of the program's
    objects for some, which Python would do meanwhile, takes longer than the plan."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def load_weights(
    connected: ConnectedBackend, step: int | None, model: torch.nn.Module, name: str, fit: AllowedDifferences = EXACTLY
) -> int:
    """Fills a model's parameters and buffers from what was saved as `name`.

    Returns:
        The step that the weights are of.

    Raises:
        ConfigurationError: there is no checkpoint of `step`, or none at all where that is None.
    """
    candidates = [c for c in list_restorable(connected) if step is None or c.step == step]
    if not candidates:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ConfigurationError(f"there is {which} to take weights from; list() says which there are")
    checkpoint = candidates[-1]
    about = connected.backend.attached
    program = Program({name: model}, (about.rank, about.world_size))
    with _reader(connected, checkpoint) as reader, torch.no_grad():
        differences = program.prepare_weights(saved_tensors(reader, reader.world_size, every=True), fit)
        fill(reader, program.targets())
        program.apply_weights()
    _report_differences(connected.backend, differences)
    return checkpoint.step


def list_restorable(connected: ConnectedBackend) -> list[Checkpoint]:
    """Lists complete checkpoints oldest first, led by an older job's parent."""
    lineage, about = connected.lineage(), connected.backend.attached
    complete = read_catalogue(connected.sources, further_sources=connected.further).complete_checkpoints()
    own = [checkpoint for checkpoint in complete if is_on_lineage(lineage, checkpoint, about.generation)]
    return [about.parent, *own] if about.parent is not None and about.parent.is_imported else own


def _prepare(
    program: Program, reader: CheckpointReader, values: tuple[Values, Values | None], rank: int, fit: AllowedDifferences
) -> list[str]:
    """Builds targets for what the checkpoint has; reads every rank's layout before it reports something missing."""
    mine = rank if values[1] is not None else reader.world_size
    if fit != EXACTLY:
        return program.prepare(*values, saved_tensors(reader, mine, every=True), fit)
    try:
        return program.prepare(*values, saved_tensors(reader, mine))
    except StateMismatch:
        pass  # planned again below, so that an error comes once
    return program.prepare(*values, saved_tensors(reader, mine, every=True))


def _report_differences(link: SaveBackend, told: list[str]) -> None:
    """Logs each difference and notifies people of the first few, so that a model under another name does not drown the
    rest."""
    for sentence in told:
        _log.warning("%s", sentence)
        metrics.fallbacks.labels("restored_with_differences").inc()
    for sentence in told[:MAX_REPORTED_DIFFERENCES]:
        link.report_notice("RestoredWithDifferences", sentence)
    if len(told) > MAX_REPORTED_DIFFERENCES:
        link.report_notice(
            "RestoredWithDifferences", f"and {len(told) - MAX_REPORTED_DIFFERENCES} more differences, which the log has"
        )


def saved_tensors(reader: CheckpointReader, own: int, every: bool = False) -> dict[str, SavedTensor]:
    """Describes a checkpoint's tensors, with those local to rank `own`."""
    tensors = reader.layouts.list_tensors(own, every)
    return {name: SavedTensor(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def fill(reader: CheckpointReader, entries: Iterable[Entry], others: RestorePeers | None = None) -> tuple[str, int]:
    """Reads the entries' boxes, together with `others` that want the same; (source, bytes)."""
    destinations: list[Destination] = []
    same: list[Grid | None] = []
    relays = Relays()
    for entry in entries:
        live = entry.local_part()
        if live.numel() == 0:
            continue
        memory: memoryview | BoxReceiver = relays.to(live) if needs_relay(live) else memory_of(live)
        in_rows = needs_relay(live) or live.is_contiguous()
        strides = None if in_rows else tuple(step * live.itemsize for step in live.stride())
        place = entry.location
        destinations.append(Destination(entry.name, entry.dtype, place.shape, place.box, memory, strides))
        same.append(place.same)
    common = []
    if others is not None:
        groups = group_shared_destinations(
            [d.wanted_box() for d in destinations], same, others.rank, others.options.min_bytes
        )
        common = [CommonDestinations(group.destination_indexes, others.subgroup(group.members)) for group in groups]
    taken = reader.read(destinations, common)
    relays.finish()
    return taken.source, taken.read_bytes


def memory_of(host: torch.Tensor) -> memoryview:
    """Bytes of a host tensor that has any, first element to last."""
    # of one element the strides may be anything
    span = 1 + sum((n - 1) * step for n, step in zip(host.shape, host.stride(), strict=True))
    flat = host.as_strided((span,), (1,))
    array = np.from_dlpack(flat.view(torch.uint8))  # numpy() would forbid the program to resize_ the tensor later
    memory: memoryview = (array if array.flags.writeable else flat.view(torch.uint8).numpy()).data
    return memory


def _reader(
    connected: ConnectedBackend, checkpoint: Checkpoint, left: Mapping[int, ReusableSave] | None = None
) -> CheckpointReader:
    rank = connected.backend.attached.rank
    options = ReadOptions(reader_rank=rank, patience_seconds=connected.patience_seconds)
    if not checkpoint.is_imported:
        catalogue = read_catalogue(connected.sources, checkpoint, connected.further)
        return CheckpointReader(checkpoint, catalogue, options, left)
    if connected.source_job_source is None:
        raise Unreadable(f"{checkpoint} is to be restored, and nothing says which job that is", absent=True)
    older = checkpoint.with_negated_generation()
    return CheckpointReader(older, read_catalogue([connected.source_job_source], older), options)
