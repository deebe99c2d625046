"""Claims generations in the persistent tier and stores their lineage records.

A generation is claimed by creating its file, which only one program can do. The operator has an agent repeat here the
claim it made in the job's status, because a status restored from a backup may be older than the tier. Without an
operator, each generation's lineage record is written twice: one damaged record would otherwise take all the generation's
checkpoints off the lineage. A third file is the heartbeat of the generation's program. Used by `persistent`.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from surefoot import metrics
from surefoot.errors import ChunkMissing, Corrupt, OutOfBounds, ProtocolError, TierError, TierUnavailable
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.records import FORMAT, RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.tiers.object_store import ObjectStore, read_in_threads, read_with_retries

log = logging.getLogger(__name__)


_MAX_CLAIM_ATTEMPTS = 50
_FOLDERS = ("generations", "lineage")


class GenerationRecords:
    """The claims, lineage records and heartbeats of one job's generations."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store, self._job = store, job

    def claim(self, newest: int) -> int:
        """Claims a generation newer than `newest` and every claim; no other program gets the same.

        Raises:
            TierUnavailable: Other programs were faster in every attempt.
        """
        newest_taken = max((newest, *self.list_claimed()))
        for generation in range(newest_taken + 1, newest_taken + 1 + _MAX_CLAIM_ATTEMPTS):
            if self._store.create(f"{self._job}/generations/{generation}", b"claimed\n"):
                return generation
        raise TierUnavailable(
            f"other programs claimed generations {newest_taken + 1} to {newest_taken + _MAX_CLAIM_ATTEMPTS} of job {self._job}"
            " first; make sure that only one program runs this job"
        )

    def claim_with_ticket(self, generation: int, ticket: str) -> bool:
        """Claims a generation for the bearer of a ticket; returns whether the claim has this ticket."""
        path, text = f"{self._job}/generations/{generation}", ticket.encode()
        return self._store.create(path, text) or self._store.read(path) == text

    def is_claim_free(self, generation: int, ticket: str) -> bool:
        """Whether no other ticket has claimed the generation; writes nothing."""
        try:
            return self._store.read(f"{self._job}/generations/{generation}") == ticket.encode()
        except ChunkMissing:
            return True

    def list_claimed(self) -> set[int]:
        """Returns every generation that has a claim or a record."""
        names = [name for folder in _FOLDERS for name in self._store.list_sizes(f"{self._job}/{folder}")]
        return {int(n.removesuffix(".json")) for n in names if n.removesuffix(".json").isdecimal()}

    def write_lineage_record(self, generation: int, text: str) -> None:
        """Writes a claimed generation's lineage record to both places.

        Only the claimant may write it, and may change it until the generation's first save.
        """
        for folder in _FOLDERS:
            self._store.put(f"{self._job}/{folder}/{generation}.json", text.encode())
            self._store.make_durable(f"{self._job}/{folder}")

    def read_lineage_records(self) -> dict[int, tuple[str | TierError, ...]]:
        """Reads all copies of the lineage records by generation; a copy that the store did not return is an error.

        Generations that were claimed but never recorded are omitted.
        """
        paths = [
            (int(name.removesuffix(".json")), f"{self._job}/{folder}/{name}")
            for folder in _FOLDERS
            for name in self._store.list_sizes(f"{self._job}/{folder}")
            if name.endswith(".json") and name.removesuffix(".json").isdecimal()
        ]
        copies: dict[int, tuple[str | TierError, ...]] = {}
        texts = read_in_threads(self._read_record, [path for _, path in paths])
        for (generation, _), text in zip(paths, texts, strict=True):
            copies[generation] = (*copies.get(generation, ()), text)
        return dict(sorted(copies.items()))

    def is_overtaken(self, generation: int) -> bool:
        """Whether another program claimed the next generation; claims are consecutive, so one small read suffices."""
        try:
            self._store.read(f"{self._job}/generations/{generation + 1}", 0, 1)
        except ChunkMissing:
            return False
        return True

    def write_heartbeat(self, generation: int, text: str) -> None:
        """Writes the heartbeat of a generation's program; the text differs each time."""
        self._store.put(self._heartbeat_path(generation), text.encode())

    def list_with_heartbeat(self) -> list[int]:
        """Lists the generations whose program has not ended in order, oldest first."""
        names = [
            n.removesuffix(".alive") for n in self._store.list_sizes(f"{self._job}/generations") if n.endswith(".alive")
        ]
        return sorted(int(name) for name in names if name.isdecimal())

    def read_heartbeat(self, generation: int) -> str | None:
        """Reads the last heartbeat of a generation's program; None: the program ended in order."""
        try:
            return self._store.read(self._heartbeat_path(generation)).decode(errors="replace")
        except ChunkMissing:
            return None

    def delete_heartbeat(self, generation: int) -> None:
        """Deletes the heartbeat, because the generation's program will write nothing more."""
        self._store.remove(self._heartbeat_path(generation))

    def _heartbeat_path(self, generation: int) -> str:
        return f"{self._job}/generations/{generation}.alive"

    def _read_record(self, path: str) -> str | TierError:
        """Reads one record; empty if it was deleted after it was listed."""
        try:
            return self._store.read(path).decode(errors="replace")
        except ChunkMissing:
            return ""
        except TierError as problem:
            return problem


# ---- manifest lists --------------------------------------------------------------------------------------------------
# Encodes the manifests of all ranks of a checkpoint as one record, so that 2,048 ranks need one read instead of 2,048.
# Pure; `persistent` reads and writes it. The list is only a cache: a reader compares it with the names and sizes of the
# manifests that exist, and reads those that are missing in the list or differ from it.

MANIFEST_LIST_NAME = "manifests.jsonl"
MIN_MANIFEST_LIST_RANKS = 9
"""Smallest number of ranks with a list; the manifests of fewer ranks are read as quickly one by one."""


def manifest_list_text(manifests: Iterable[RankManifest]) -> bytes:
    """Encodes a checkpoint's manifests: a line with the checkpoint and a digest, then one manifest per line, by rank."""
    order = sorted(manifests, key=lambda m: m.save)
    lines = "\n".join(m.to_json() for m in order).encode()
    head = {
        "format": FORMAT,
        "generation": order[0].save.generation,
        "step": order[0].save.step,
        "world_size": order[0].world_size,
        "digest": xxhash.xxh3_64_hexdigest(lines),
    }
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + lines


def read_manifest_list(text: bytes, checkpoint: Checkpoint) -> dict[RankSave, RankManifest]:
    """Decodes a checkpoint's manifests, by save.

    Raises:
        ProtocolError: The record is damaged, of another format or of another checkpoint.
    """
    first_line, _, lines = text.partition(b"\n")
    try:
        bounds.require_json_in_bounds(
            "the head of a list of manifests", first_line, bounds.MAX_SMALL_RECORD_BYTES, bounds.MAX_SMALL_RECORD_VALUES
        )
        head = json.loads(first_line)
        identity = (head["format"], head["generation"], head["step"], head["digest"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError(f"the list of manifests of {checkpoint} cannot be read: {error!r}") from error
    if identity != (FORMAT, checkpoint.generation, checkpoint.step, xxhash.xxh3_64_hexdigest(lines)):
        raise ProtocolError(
            f"the list of manifests of {checkpoint} does not match its digest, or is of another checkpoint"
        )
    manifests = [RankManifest.from_json(line) for line in lines.split(b"\n")]
    return {m.save: m for m in manifests if m.save.checkpoint == checkpoint}


def split_cached_manifests(
    cached_manifests: Mapping[RankSave, RankManifest], sizes: Mapping[RankSave, int]
) -> tuple[tuple[RankManifest, ...], tuple[RankSave, ...]]:
    """Returns the known manifests that are still valid, and the saves whose manifest must be read.

    Args:
        told: Known manifests, from the list or an earlier read.
        sizes: Size of each manifest that exists; a known manifest of another length is not valid.
    """
    valid = {
        save: manifest
        for save, size in sizes.items()
        if (manifest := cached_manifests.get(save)) is not None and len(manifest.to_json().encode()) == size
    }
    return tuple(valid[save] for save in sorted(valid)), tuple(sorted(sizes.keys() - valid.keys()))


# ---- record of the newest checkpoint ---------------------------------------------------------------------------------
# Encodes the record of the newest checkpoint in the persistent tier. Pure; `persistent` reads and writes it.
# Checkpoints are ordered by generation, then step: a save of a newer generation is newer whatever its step, since that
# generation continued where the older one ended.


def read_newest_record(text: bytes | None) -> tuple[Checkpoint, int] | None:
    """Decodes the record into checkpoint and world size; None if it is missing, damaged or of another format."""
    record = "newest.json"
    try:
        bounds.require_json_in_bounds(
            record, text or b"", bounds.MAX_SMALL_RECORD_BYTES, bounds.MAX_SMALL_RECORD_VALUES
        )
        fields = json.loads(text or b"")
        if fields["format"] != FORMAT:
            return None
        checkpoint, world_size = (
            Checkpoint(generation=int(fields["generation"]), step=int(fields["step"])),
            int(fields["world_size"]),
        )
        bounds.require_in_range(record, "world_size", world_size, bounds.MAX_RANKS, 1)
        for field, value in (("generation", checkpoint.generation), ("step", checkpoint.step)):
            bounds.require_in_range(record, field, value, bounds.MAX_COUNT)
        return checkpoint, world_size
    except OutOfBounds as error:
        log.warning("the record of the newest checkpoint is invalid; listing the tier instead: %s", error)
        return None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def update_newest_record(before: bytes | None, checkpoint: Checkpoint, world_size: int) -> bytes | None:
    """Encodes the record after `checkpoint` was saved; None: the record does not change."""
    old_record = read_newest_record(before)
    if old_record is not None and old_record[0] >= checkpoint:
        return None
    record = {"format": FORMAT, "generation": checkpoint.generation, "step": checkpoint.step, "world_size": world_size}
    return json.dumps(record, separators=(",", ":")).encode()


def select_newest_manifests(manifests: Iterable[RankManifest]) -> tuple[RankManifest, ...]:
    """Selects the manifests of the newest checkpoint that has every rank's; empty if there is none."""
    by_checkpoint: dict[Checkpoint, list[RankManifest]] = defaultdict(list)
    for manifest in manifests:
        by_checkpoint[manifest.save.checkpoint].append(manifest)
    complete = [checkpoint for checkpoint, group in by_checkpoint.items() if len(group) == group[0].world_size]
    return tuple(by_checkpoint[max(complete)]) if complete else ()


# ---- parts of several chunks -----------------------------------------------------------------------------------------
# Groups chunks into the parts that the persistent tier stores. Pure; `flush.uploader` uses the same grouping. A part is
# `PART_CHUNKS` consecutive chunks; the last part of a rank save may have fewer. A request to a bucket costs the same
# for one chunk as for four, and a few large bodies use a connection better than many small ones.

PART_CHUNKS = 4
"""Chunks of a part: up to 16 MiB. Part of the format; see docs/adr/0007."""
_MAX_BUFFERED_SAVES = 4
"""Saves with buffered chunks: a writer has at most as many in progress as there are slots."""


def part_name(number: int) -> str:
    return f"p{number:04d}"


def part_lengths(chunk_lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns the size of each part."""
    return tuple(sum(chunk_lengths[at : at + PART_CHUNKS]) for at in range(0, len(chunk_lengths), PART_CHUNKS))


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """Locates the chunks of one layout in the parts."""

    starts: tuple[int, ...]
    """Offset of each chunk in the stream."""
    stream_bytes: int
    """Length of the stream."""

    def locate_chunk(self, index: int) -> tuple[int, int, int] | None:
        """Returns the index of a chunk's part, its offset there and its length; None: there is no such chunk."""
        if not 0 <= index < len(self.starts):
            return None
        part = index // PART_CHUNKS
        end = self.starts[index + 1] if index + 1 < len(self.starts) else self.stream_bytes
        return part, self.starts[index] - self.starts[part * PART_CHUNKS], end - self.starts[index]

    def part_bytes(self, part: int) -> int:
        after = (part + 1) * PART_CHUNKS
        end = self.starts[after] if after < len(self.starts) else self.stream_bytes
        return end - self.starts[part * PART_CHUNKS]


@dataclass(slots=True)
class PartBuffer:
    """Buffers the chunks of a few saves until their part is complete; at most one part of each save."""

    _chunks_by_save: dict[RankSave, dict[int, bytes]] = field(default_factory=dict)

    def add_chunk(self, save: RankSave, index: int, data: memoryview) -> list[bytes] | None:
        """Copies a chunk into the buffer; returns and removes all chunks of its part if this completes it."""
        if save not in self._chunks_by_save and len(self._chunks_by_save) >= _MAX_BUFFERED_SAVES:
            del self._chunks_by_save[
                next(iter(self._chunks_by_save))
            ]  # abandoned long ago; its commit would fail for the missing part
        chunks = self._chunks_by_save.setdefault(save, {})
        part_start = index - index % PART_CHUNKS
        for other in [buffered for buffered in chunks if buffered - buffered % PART_CHUNKS != part_start]:
            del chunks[other]  # its part was abandoned before it was complete
        chunks[index] = bytes(data)
        if len(chunks) < PART_CHUNKS:
            return None
        return self.take_chunks(save)

    def buffered_sizes(self, save: RankSave) -> dict[int, int]:
        """Returns the size of each buffered chunk of a save."""
        return {index: len(data) for index, data in self._chunks_by_save.get(save, {}).items()}

    def take_chunks(self, save: RankSave) -> list[bytes]:
        """Removes and returns the buffered chunks of a save, in order."""
        chunks = self._chunks_by_save.pop(save, {})
        return [chunks[index] for index in sorted(chunks)]


def incomplete_error(save: RankSave, part: str, actual_bytes: int | None, expected_bytes: int) -> ChunkMissing:
    """Builds the error that a save cannot be committed, because one of its parts is missing or has a wrong size."""
    actual = "no" if actual_bytes is None else actual_bytes
    return ChunkMissing(f"{save} cannot be committed: {part} has {actual} bytes, not {expected_bytes}")


# ---- object names ----------------------------------------------------------------------------------------------------
# Names of a job's records in an object store. Pure. Every reader and writer uses these functions, since names built in
# two places would differ one day, and records would be lost.

_CHECKPOINT = re.compile(r"(\d+)-(\d+)")
_MANIFEST = re.compile(r"rank-(\d+)\.json")
_PART = re.compile(r"p(\d{4,})")


def checkpoint_of(folder: str) -> Checkpoint | None:
    """Decodes the checkpoint from its folder's name; None for any other folder."""
    match = _CHECKPOINT.fullmatch(folder)
    return Checkpoint(generation=int(match[2]), step=int(match[1])) if match else None


def rank_of(manifest: str) -> int | None:
    """Decodes the rank from its manifest's name; None for any other name."""
    match = _MANIFEST.fullmatch(manifest)
    return int(match[1]) if match else None


def part_of(name: str) -> int | None:
    """Decodes the index of a part from its name; None for any other name."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """Builds the paths of one job's objects; `job` is its folder."""

    job: str

    def checkpoint(self, checkpoint: Checkpoint) -> str:
        return f"{self.job}/{checkpoint.step}-{checkpoint.generation}"

    def manifest_list(self, checkpoint: Checkpoint) -> str:
        return f"{self.checkpoint(checkpoint)}/{MANIFEST_LIST_NAME}"

    def folder(self, save: RankSave) -> str:
        return f"{self.checkpoint(save.checkpoint)}/rank-{save.rank}"

    def manifest(self, save: RankSave) -> str:
        return f"{self.folder(save)}.json"

    def object_name(self, save: RankSave, name: str) -> str:
        return f"{self.folder(save)}/{name}"

    def part(self, save: RankSave, part: int) -> str:
        return self.object_name(save, part_name(part))

    @property
    def layouts(self) -> str:
        return f"{self.job}/layouts"

    def layout(self, digest: str) -> str:
        return f"{self.layouts}/{digest}.json"

    def newest(self) -> str:
        return f"{self.job}/newest.json"


# ---- layout records --------------------------------------------------------------------------------------------------
# Reads and repairs the layout records of an object store. All rank saves of one layout share a record, so its loss
# would make every checkpoint unreadable. Therefore each save has a copy of its own, from which the shared record is
# repaired.

_MAX_COPIES_TRIED = 3
"""Number of saves whose own copy is tried if the shared record is damaged or missing."""


class LayoutRecords:
    """Reads each layout record from an intact copy."""

    def __init__(
        self,
        store: ObjectStore,
        names: ObjectNames,
        read_only: bool,
        list_checkpoints: Callable[[], Sequence[Checkpoint]],
    ) -> None:
        self._store, self._names, self._read_only, self._list_checkpoints = store, names, read_only, list_checkpoints
        self.digest_by_save: dict[RankSave, str] = {}
        """Digest of the layout of each save whose manifest was read."""

    def read(self, digest: str) -> str:
        """Reads the shared record; if it is damaged or missing, reads a save's own copy and repairs the shared record."""
        text, problem = self._read_checked(self._names.layout(digest), digest)
        if problem is None:
            return text
        for save in self._saves_with_copy(digest):
            copy, copy_problem = self._read_checked(self._names.object_name(save, "layout"), digest)
            if copy_problem is None:
                metrics.fallbacks.labels("layout_copy").inc()
                log.warning("%s; reading the intact copy of %s instead", problem, save)
                self._repair_shared_record(digest, copy)
                return copy
        if isinstance(problem, TierError):
            raise problem
        return text  # damaged: the caller verifies the digest and reports it

    def _repair_shared_record(self, digest: str, text: str) -> None:
        if self._read_only:
            return
        try:
            self._store.put(self._names.layout(digest), text.encode())
        except TierError as problem:
            log.warning("could not repair the shared layout record %s; the next save writes it: %s", digest, problem)

    def _saves_with_copy(self, digest: str) -> list[RankSave]:
        """Returns saves that may have a copy of this layout: those known to have it, then others of the same rank."""
        saves = sorted((save for save, layout in self.digest_by_save.copy().items() if layout == digest), reverse=True)
        others = [
            RankSave(c.generation, c.step, save.rank) for c in reversed(self._list_checkpoints()) for save in saves[:1]
        ]
        return list(dict.fromkeys([*saves[:_MAX_COPIES_TRIED], *others[:_MAX_COPIES_TRIED]]))

    def _read_checked(self, path: str, digest: str) -> tuple[str, TierError | Corrupt | None]:
        """Reads a record and checks its digest; returns its text, and the error if it is damaged or cannot be read."""
        raw = b""

        def read() -> None:
            nonlocal raw
            raw = self._store.read(path)
            if xxhash.xxh3_64_hexdigest(raw) != digest:
                raise Corrupt(f"{path} in the persistent tier is damaged")

        try:
            read_with_retries(read)
        except (TierError, Corrupt) as problem:
            return raw.decode(errors="replace"), problem
        return raw.decode(errors="replace"), None
