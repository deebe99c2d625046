"""Compares tensors that are expected to be equal on several ranks, and names those that differ.

Ranks with the same tensor divide its saving. If their tensors differ, the checkpoint is complete and verified, and consists of
parts of different tensors: local SGD between two averages, a model without DistributedDataParallel, experts of single ranks, a
flipped bit. So at the first step, and once in many saves, each rank digests one block of every such tensor and publishes the
digests in the process group's store. Each rank then reads those of one neighbour, so that a world of any size needs one write and
one read per rank. Blocks change from check to check.

Parameters and optimizer state must be equal bit by bit: all-reduce gives all ranks the same bits. Buffers and tensors of other
objects are saved whole by one rank, so a difference is only reported. Buffers that DDP broadcasts are not compared: each rank's
own statistics last until the next forward pass.
"""

from __future__ import annotations

import logging
import sys
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch

from surefoot.errors import ConfigurationError
from surefoot.geometry.sharding import Grid
from surefoot.ipc.save_backend import SaveBackend
from surefoot.state import Entry, Program

_log = logging.getLogger(__name__)

ReplicaPolicy = Literal["refuse", "warn", "off"]
"""Selects how a difference at the first step ends; a later one is reported, unless nothing is compared."""

BLOCK_BYTES = 4096
MAX_TENSORS = 1024
"""Tensors compared in one check; of more, each check takes others."""
CHECK_SAVES = 16
MIN_CHECK_STEPS = 100
FIRST_SAVE_SECONDS = 10.0
"""How long a first step that is saved waits for the neighbour's digests."""
_MAX_NAMES = 3

_checks = 0  # how many of this process there were; the same on all ranks, as they construct equally many


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """Names the tensors of which two ranks have different elements."""

    names: tuple[str, ...]
    """Sorted, parameters and optimizer state first."""
    is_divided: bool
    """Whether each of the ranks saves a part of one of them."""
    ranks: tuple[int, int]

    def __str__(self) -> str:
        shown, more = self.names[:_MAX_NAMES], len(self.names) - _MAX_NAMES
        what = f"{', '.join(shown)}{f' and {more} more tensors' if more > 0 else ''} {'differ' if self.names[1:] else 'differs'}"
        between = f"{what} between ranks {min(self.ranks)} and {max(self.ranks)}"
        if not self.is_divided:
            return (
                f"{between}, and a checkpoint has those of one rank: all ranks get them at a restart. per_rank= keeps each"
                " rank's own; SyncBatchNorm, or a reduction before step(), keeps them equal"
            )
        leaf = self.names[0].rpartition("/")[2]
        return (
            f"{between}, and each rank saves a part of them: a restart would mix the ranks' values. If each rank has its own (experts,"
            f" local SGD), name them and their optimizer state in per_rank=, such as per_rank=('*{leaf}*',); if only some ranks have"
            " the same, name those in replicas=; otherwise begin with equal weights and use DistributedDataParallel"
        )


class ReplicaCheck:
    """Publishes this rank's digests, and compares them with a neighbour's as soon as those are there.

    Nothing waits for another rank, except a first step that is saved. Without a process group of the job's ranks nothing is
    compared.
    """

    def __init__(self, program: Program, objects: Mapping[str, Any], backend: SaveBackend, policy: str) -> None:
        global _checks
        if policy not in ("refuse", "warn", "off"):
            raise ConfigurationError(f"replica_check={policy!r}: it is 'refuse', 'warn' or 'off'")
        self._program, self._backend, self._policy = program, backend, policy
        self._modules = [o for o in objects.values() if isinstance(o, torch.nn.Module)]
        about = backend.attached
        self._rank, self._world_size = about.rank, about.world_size
        self._interval = max(CHECK_SAVES * about.interval_steps, MIN_CHECK_STEPS)
        self._is_first = True
        self._pending: dict[Grid, tuple[int, dict[int, int], dict[int, Entry]]] = {}
        """By replica group: the step of the digests, the digests by tensor, and the tensors."""
        self._asked_at = self._published_at = 0
        self._reported: set[bool] = set()
        _checks += 1
        self._number = _checks

    def check_step(self, step: int, is_saved: bool) -> None:
        """Publishes digests where they are due, and compares those that have arrived.

        Args:
            step: The step that ends.
            is_saved: Whether it is saved next.

        Raises:
            ConfigurationError: At this process' first steps, parameters or optimizer state differ.
        """
        if self._policy == "off" or self._world_size == 1:
            return
        store = self._store()
        if store is None:
            return
        try:
            differences = self._compare(store, step)
            if self._published_at == 0 or step % self._interval == 0:
                self._publish(store, step)
                if self._is_first and is_saved:
                    differences += self._compare(store, step, FIRST_SAVE_SECONDS)
        except RuntimeError as error:  # torch's own, also of a store whose process has ended
            _log.debug("replicas are not compared: %s", error)
            self._pending.clear()
            return
        for difference in differences:
            self._report(difference)
        if self._published_at and not self._pending:
            self._is_first = False

    def _store(self) -> Any:
        """The store of the process group, if that has exactly the job's ranks."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not (dist.is_available() and dist.is_initialized()):
            return None
        if (dist.get_rank(), dist.get_world_size()) != (self._rank, self._world_size):
            return None
        return dist.distributed_c10d._get_default_store()

    def _key(self, grid: Grid, rank: int) -> str:
        name = zlib.crc32(repr(grid).encode())
        return f"surefoot/replicas/{self._backend.attached.generation}/{self._number}/{name:08x}/{rank}"

    def _publish(self, store: Any, step: int) -> None:
        self._published_at = self._asked_at = step
        self._pending = {}
        broadcast_ids = {id(buffer) for module in self._modules for buffer in broadcast_buffers(module)}
        for grid, entries in replica_groups(self._program.entries(), self._rank, broadcast_ids).items():
            keys = {tensor_key(entry): entry for entry in chosen(entries, step // self._interval)}
            digests = dict(zip(keys, block_digests(list(keys.items()), step // self._interval), strict=True))
            store.set(self._key(grid, self._rank), encode_digests(step, digests))
            self._pending[grid] = step, digests, keys

    def _compare(self, store: Any, step: int, wait_seconds: float = 0.0) -> list[ReplicaDifference]:
        """Compares digests that have arrived; asks at ever longer distances, as ranks that differ need not keep pace."""
        waited = step - self._published_at
        if not self._pending or (waited & (waited - 1) and not wait_seconds):
            return []
        differences = []
        for grid in list(self._pending):
            number = grid.number(self._rank)
            assert number is not None, "only groups of this rank are compared"
            neighbour = grid.at((number - 1) % grid.count)
            key = self._key(grid, neighbour)
            if not (_wait_for(store, key, wait_seconds) if wait_seconds else store.check([key])):
                continue
            their_step, theirs = decode_digests(store.get(key))
            own_step, own, entries = self._pending[grid]
            if their_step < own_step:
                continue
            del self._pending[grid]
            if their_step == own_step:
                differing = [entries[k] for k, value in own.items() if k in theirs and theirs[k] != value]
                differences += differences_of(differing, (self._rank, neighbour))
        return differences

    def _report(self, difference: ReplicaDifference) -> None:
        if difference.is_divided and self._is_first and self._policy == "refuse":
            raise ConfigurationError(f"{difference}. replica_check='warn' trains on")
        if difference.is_divided in self._reported:
            return
        self._reported.add(difference.is_divided)
        if self._rank and not difference.is_divided:
            return  # every rank of a large world would report the same
        _log.warning("%s", difference)
        self._backend.report_notice("ReplicasDiffer", str(difference))


def _wait_for(store: Any, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:  # torch's own error of a timeout
        return False
    return True


# ---- which tensors, and which of their bytes -------------------------------------------------------------------------


def broadcast_buffers(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    """Yields the buffers that DDP sets to rank 0's before the next forward pass."""
    for submodule in module.modules():
        if isinstance(submodule, torch.nn.parallel.DistributedDataParallel) and submodule.broadcast_buffers:
            yield from submodule.buffers()


def replica_groups(
    entries: Iterable[Entry], rank: int, excluded_ids: frozenset[int] | set[int] = frozenset()
) -> dict[Grid, list[Entry]]:
    """Groups the tensors that other ranks have, too, by the ranks that have them.

    Args:
        entries: The program's.
        rank: This one.
        excluded_ids: Of tensors that are not compared.
    """
    groups: dict[Grid, list[Entry]] = defaultdict(list)
    for entry in entries:
        grid = entry.location.same
        if grid is None or grid.count == 1 or entry.sharing == "local" or id(entry.tensor) in excluded_ids:
            continue
        if grid.number(rank) is not None:
            groups[grid].append(entry)
    return groups


def chosen(entries: Sequence[Entry], check: int) -> Sequence[Entry]:
    """Selects at most MAX_TENSORS entries, others in each check."""
    stride = -(-len(entries) // MAX_TENSORS)
    return entries[check % stride :: stride] if stride > 1 else entries


def tensor_key(entry: Entry) -> int:
    """Returns a number that names the tensor, the box and the order of its bytes."""
    part = entry.local_part()
    return zlib.crc32(repr((entry.name, entry.dtype, entry.location.box, part.stride())).encode())


def block_digests(entries: Sequence[tuple[int, Entry]], check: int) -> list[int]:
    """Digests one block of each entry; blocks on devices are fetched together.

    Args:
        entries: With the number of each, on which it depends which block is taken.
        check: The number of the check: another one takes other blocks.
    """
    blocks_by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    digests = [0] * len(entries)
    with torch.no_grad():
        for number, (key, entry) in enumerate(entries):
            block = _block(entry.local_part(), key + check)
            if block is not None:
                blocks_by_device[block.device].append((number, block))
        for blocks in blocks_by_device.values():
            fetched, start = torch.cat([block for _, block in blocks]).cpu().numpy(), 0
            for number, block in blocks:
                digests[number] = zlib.crc32(fetched[start : start + block.numel()].data)
                start += block.numel()
    return digests


def _block(part: torch.Tensor, number: int) -> torch.Tensor | None:
    """Returns some of a tensor's bytes; None of one that is empty, a view with gaps, or lazily conjugated."""
    strides = part.stride()
    dense = part.permute(sorted(range(part.dim()), key=lambda dimension: -strides[dimension]))
    if not dense.is_contiguous() or part.numel() == 0 or part.is_conj() or part.is_neg():
        return None
    length = max(1, BLOCK_BYTES // part.itemsize)
    start = number % -(-part.numel() // length) * length
    return dense.view(-1)[start : start + length].view(torch.uint8)


def differences_of(entries: Sequence[Entry], ranks: tuple[int, int]) -> list[ReplicaDifference]:
    """Describes differing tensors: those that ranks save in parts, and those that one rank saves."""
    names = {
        is_divided: sorted({e.name for e in entries if (e.sharing == "split") == is_divided}, key=_order)
        for is_divided in (True, False)
    }
    return [
        ReplicaDifference(tuple(group), is_divided, ranks)
        for is_divided, group in names.items()
        if group and (is_divided or not names[True])
    ]


def _order(name: str) -> tuple[int, str]:
    """Sorts a parameter before its optimizer's state, whose name contains it."""
    return name.count("/"), name


# ---- published digests -----------------------------------------------------------------------------------------------


def encode_digests(step: int, digests: Mapping[int, int]) -> bytes:
    """Encodes a step and the digests of tensors by number."""
    return array("Q", [step, *((key << 32) | value for key, value in digests.items())]).tobytes()


def decode_digests(encoded: bytes) -> tuple[int, dict[int, int]]:
    """Decodes what `encode_digests` encoded."""
    step, *pairs = array("Q", encoded)
    return step, {pair >> 32: pair & 0xFFFFFFFF for pair in pairs}
