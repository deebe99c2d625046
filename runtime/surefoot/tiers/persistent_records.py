"""Claims epochs in the persistent tier and keeps their lineage records.

An epoch is claimed by creating its file, which no second program can; a coordinator has an agent claim what it claimed in
status, because a status that was restored from a backup knows less than the tier. Without a coordinator the lineage record of
an epoch is written twice: a record that is damaged would otherwise take every checkpoint of its epoch off the lineage. A third
file shows that an epoch's program is at work. Used by `persistent`.
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
from surefoot.tiers.object_store import ObjectStore, read_in_threads, second_look

log = logging.getLogger(__name__)


_CLAIM_TRIES = 50
_FOLDERS = ("generations", "lineage")


class GenerationRecords:
    """Of one job in a store."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store, self._job = store, job

    def claim(self, newest: int) -> int:
        """Takes an epoch beyond `newest` and beyond every claim.

        Nobody else gets the same.

        Raises:
            TierUnavailable: others took each one that was tried.
        """
        first = max((newest, *self.claimed()))
        for epoch in range(first + 1, first + 1 + _CLAIM_TRIES):
            if self._store.create(f"{self._job}/generations/{epoch}", b"claimed\n"):
                return epoch
        raise TierUnavailable(
            f"epochs {first + 1} to {first + _CLAIM_TRIES} of job {self._job} were all taken meanwhile"
        )

    def claim_as(self, epoch: int, ticket: str) -> bool:
        """Claims an epoch for who bears this ticket; returns whether the claim is theirs."""
        path, text = f"{self._job}/generations/{epoch}", ticket.encode()
        return self._store.create(path, text) or self._store.read(path) == text

    def may_bear(self, epoch: int, ticket: str) -> bool:
        """Whether no other ticket than this one claimed the epoch; writes nothing."""
        try:
            return self._store.read(f"{self._job}/generations/{epoch}") == ticket.encode()
        except ChunkMissing:
            return True

    def claimed(self) -> set[int]:
        """Every epoch that has a claim or a record."""
        names = [name for folder in _FOLDERS for name in self._store.sizes(f"{self._job}/{folder}")]
        return {int(n.removesuffix(".json")) for n in names if n.removesuffix(".json").isdecimal()}

    def record(self, epoch: int, text: str) -> None:
        """Records the checkpoint that a claimed epoch stands on.

        In two places. Only whoever claimed the epoch writes this, and it may change as long as the epoch has saved
        nothing.
        """
        for folder in _FOLDERS:
            self._store.put(f"{self._job}/{folder}/{epoch}.json", text.encode())
            self._store.make_durable(f"{self._job}/{folder}")

    def recorded(self) -> dict[int, tuple[str | TierError, ...]]:
        """Reads every copy of each record, by epoch; an error stands for one that the store did not give.

        An epoch that was claimed and never recorded is left out.
        """
        paths = [
            (int(name.removesuffix(".json")), f"{self._job}/{folder}/{name}")
            for folder in _FOLDERS
            for name in self._store.sizes(f"{self._job}/{folder}")
            if name.endswith(".json") and name.removesuffix(".json").isdecimal()
        ]
        found: dict[int, tuple[str | TierError, ...]] = {}
        for (epoch, _), text in zip(paths, read_in_threads(self._text, [path for _, path in paths]), strict=True):
            found[epoch] = (*found.get(epoch, ()), text)
        return dict(sorted(found.items()))

    def is_overtaken(self, epoch: int) -> bool:
        """Whether another program claimed the next epoch: one small read, as claims are consecutive."""
        try:
            self._store.read(f"{self._job}/generations/{epoch + 1}", 0, 1)
        except ChunkMissing:
            return False
        return True

    def beat(self, epoch: int, text: str) -> None:
        """Shows that the program of this epoch is at work; its text differs each time."""
        self._store.put(self._alive(epoch), text.encode())

    def marked(self) -> list[int]:
        """Lists epochs whose program has not ended in order, oldest first."""
        names = [
            n.removesuffix(".alive") for n in self._store.sizes(f"{self._job}/generations") if n.endswith(".alive")
        ]
        return sorted(int(name) for name in names if name.isdecimal())

    def last_beat(self, epoch: int) -> str | None:
        """What that program wrote last; None where it ended in order."""
        try:
            return self._store.read(self._alive(epoch)).decode(errors="replace")
        except ChunkMissing:
            return None

    def end_beats(self, epoch: int) -> None:
        """Notes that the program of this epoch writes nothing more."""
        self._store.remove(self._alive(epoch))

    def _alive(self, epoch: int) -> str:
        return f"{self._job}/generations/{epoch}.alive"

    def _text(self, path: str) -> str | TierError:
        """Empty where it has gone since it was listed."""
        try:
            return self._store.read(path).decode(errors="replace")
        except ChunkMissing:
            return ""
        except TierError as silent:
            return silent


# ---- manifest lists --------------------------------------------------------------------------------------------------
# Encodes the manifests of all ranks of a checkpoint as one record. Pure. Read and written by `persistent`. Of 2,048
# ranks it is one read instead of as many. It vouches for nothing by itself: whoever reads it looks which manifests lie
# there and how long they are, and one that the list does not tell, or tells otherwise, is read itself.

MANIFEST_LIST_NAME = "manifests.jsonl"
MIN_MANIFEST_LIST_RANKS = 9
"""Of fewer ranks the manifests themselves are read as quickly."""


def manifest_list_text(manifests: Iterable[RankManifest]) -> bytes:
    """Encodes a checkpoint's manifests as one record.

    A line that names the checkpoint and the digest of what follows, then a manifest a line, by rank.
    """
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
    """Each manifest by its save.

    Raises:
        ProtocolError: the record is damaged, of another format or of another checkpoint.
    """
    first, _, lines = text.partition(b"\n")
    try:
        bounds.check_json("the head of a list of manifests", first, bounds.MAX_SMALL_BYTES, bounds.MAX_SMALL_VALUES)
        head = json.loads(first)
        told = (head["format"], head["generation"], head["step"], head["digest"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError(f"the list of manifests of {checkpoint} cannot be read: {error!r}") from error
    if told != (FORMAT, checkpoint.generation, checkpoint.step, xxhash.xxh3_64_hexdigest(lines)):
        raise ProtocolError(f"the list of manifests of {checkpoint} does not match its digest, or is of another one")
    manifests = [RankManifest.from_json(line) for line in lines.split(b"\n")]
    return {m.save: m for m in manifests if m.save.checkpoint == checkpoint}


def split_known(
    told: Mapping[RankSave, RankManifest], sizes: Mapping[RankSave, int]
) -> tuple[tuple[RankManifest, ...], tuple[RankSave, ...]]:
    """Divides manifests into those known and those to be read.

    Args:
        told: What the list says.
        sizes: Bytes of each manifest that lies there.
    """
    known = {
        save: manifest
        for save, size in sizes.items()
        if (manifest := told.get(save)) is not None and len(manifest.to_json().encode()) == size
    }
    return tuple(known[save] for save in sorted(known)), tuple(sorted(sizes.keys() - known.keys()))


# ---- record of the newest checkpoint ---------------------------------------------------------------------------------
# Encodes the record of the newest checkpoint in the persistent tier. Pure. Read and written by `persistent`.
# Checkpoints are ordered by epoch, then step: what a newer epoch saves is newer whatever its step, since it went on
# from where the older one was left.


def read_newest_record(text: bytes | None) -> tuple[Checkpoint, int] | None:
    """Decodes the record: checkpoint and world size.

    None where it is absent, damaged or of another format.
    """
    record = "newest.json"
    try:
        bounds.check_json(record, text or b"", bounds.MAX_SMALL_BYTES, bounds.MAX_SMALL_VALUES)
        body = json.loads(text or b"")
        if body["format"] != FORMAT:
            return None
        checkpoint, world = (
            Checkpoint(generation=int(body["generation"]), step=int(body["step"])),
            int(body["world_size"]),
        )
        bounds.check(record, "world_size", world, bounds.MAX_RANKS, 1)
        for field, value in (("generation", checkpoint.generation), ("step", checkpoint.step)):
            bounds.check(record, field, value, bounds.MAX_COUNT)
        return checkpoint, world
    except OutOfBounds as error:
        log.warning("%s; the tier is listed instead", error)
        return None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def grown_newest_record(before: bytes | None, checkpoint: Checkpoint, world: int) -> bytes | None:
    """Encodes the record once `checkpoint` is there too.

    None if it stays as it is.
    """
    told = read_newest_record(before)
    if told is not None and told[0] >= checkpoint:
        return None
    body = {"format": FORMAT, "generation": checkpoint.generation, "step": checkpoint.step, "world_size": world}
    return json.dumps(body, separators=(",", ":")).encode()


def newest_manifests(manifests: Iterable[RankManifest]) -> tuple[RankManifest, ...]:
    """The manifests of the newest checkpoint with one of every rank."""
    by_checkpoint: dict[Checkpoint, list[RankManifest]] = defaultdict(list)
    for manifest in manifests:
        by_checkpoint[manifest.save.checkpoint].append(manifest)
    whole = [checkpoint for checkpoint, found in by_checkpoint.items() if len(found) == found[0].world_size]
    return tuple(by_checkpoint[max(whole)]) if whole else ()


# ---- parts of several chunks -----------------------------------------------------------------------------------------
# Groups chunks into the parts that the persistent tier stores. Pure. `flush.uploader` follows the same grouping. A part
# is `PART_CHUNKS` chunks, one behind the other; the last of a rank save has what is left. A request to a bucket costs
# the same for one chunk as for four, and a connection is used better by few large bodies than by many small ones.

PART_CHUNKS = 4
"""Chunks of a part: up to 16 MiB. Part of the format; see docs/adr/0007."""
_SAVES_GATHERED = 4
"""Saves whose chunks may wait for the rest of their part at once: a writer has as many under way as slots."""


def part_name(number: int) -> str:
    return f"p{number:04d}"


def part_lengths(chunk_lengths: Sequence[int]) -> tuple[int, ...]:
    """Bytes of each part."""
    return tuple(sum(chunk_lengths[at : at + PART_CHUNKS]) for at in range(0, len(chunk_lengths), PART_CHUNKS))


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """Finds chunks of one layout in the stream and its parts."""

    starts: tuple[int, ...]
    stream_bytes: int

    def chunk(self, index: int) -> tuple[int, int, int] | None:
        """Locates a chunk.

        Returns:
            Number of its part, offset in it and bytes; None if there is no such chunk.
        """
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
    """Gathers chunks until their part is whole.

    Of few saves, a part of each at most.
    """

    _of: dict[RankSave, dict[int, bytes]] = field(default_factory=dict)

    def add(self, save: RankSave, index: int, data: memoryview) -> list[bytes] | None:
        """Keeps a copy of a chunk.

        Returns:
            All chunks of the part if this was the last that it wanted.
        """
        if save not in self._of and len(self._of) >= _SAVES_GATHERED:
            del self._of[next(iter(self._of))]  # given up long ago: its commit would find the part missing
        waiting = self._of.setdefault(save, {})
        first = index - index % PART_CHUNKS
        for other in [number for number in waiting if number - number % PART_CHUNKS != first]:
            del waiting[other]  # of a part that was left before it was whole
        waiting[index] = bytes(data)
        if len(waiting) < PART_CHUNKS:
            return None
        return self.take(save)

    def waiting(self, save: RankSave) -> dict[int, int]:
        """Bytes of each chunk that waits."""
        return {index: len(data) for index, data in self._of.get(save, {}).items()}

    def take(self, save: RankSave) -> list[bytes]:
        """What waits, in order; nothing of this save waits any more."""
        waiting = self._of.pop(save, {})
        return [waiting[index] for index in sorted(waiting)]


def incomplete_error(save: RankSave, what: str, found: int | None, wanted: int) -> ChunkMissing:
    """Why a save cannot be committed, as an error to raise."""
    has = "no" if found is None else found
    return ChunkMissing(f"{save} cannot be committed: {what} has {has} bytes, not {wanted}")


# ---- object names ----------------------------------------------------------------------------------------------------
# Names each record of a job in an object store. Pure. Two places that make up a name by themselves come apart one day,
# and what one of them wrote nobody finds.

_CHECKPOINT = re.compile(r"(\d+)-(\d+)")
_MANIFEST = re.compile(r"rank-(\d+)\.json")
_PART = re.compile(r"p(\d{4,})")


def checkpoint_of(folder: str) -> Checkpoint | None:
    """The checkpoint whose folder bears that name; None for any other folder."""
    found = _CHECKPOINT.fullmatch(folder)
    return Checkpoint(generation=int(found[2]), step=int(found[1])) if found else None


def rank_of(manifest: str) -> int | None:
    """The rank whose manifest bears that name; None for any other name."""
    found = _MANIFEST.fullmatch(manifest)
    return int(found[1]) if found else None


def part_of(name: str) -> int | None:
    """Decodes a part's number; None for any other name."""
    found = _PART.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """Names of one job's objects; `job` is its folder."""

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
# Reads and mends the layout records of an object store. All rank saves of one layout share a record, so that a lost one
# would take every checkpoint along: each save keeps a copy of its own beside it, and from that the shared one is
# mended.

_COPIES = 3
"""Rank saves whose own copy is looked at, where the shared one is not good."""


class LayoutRecords:
    """Finds a good copy of each layout record."""

    def __init__(
        self, store: ObjectStore, names: ObjectNames, read_only: bool, seen: Callable[[], Sequence[Checkpoint]]
    ) -> None:
        self._store, self._names, self._read_only, self._seen = store, names, read_only, seen
        self.of: dict[RankSave, str] = {}
        """Digest of the layout of each save whose manifest was seen."""

    def read(self, digest: str) -> str:
        """Reads the record that all rank saves share.

        Where it is damaged or gone, the copy beside a rank save that has this layout; that mends the shared one.
        """
        text, problem = self._at(self._names.layout(digest), digest)
        if problem is None:
            return text
        for save in self._that_may_have(digest):
            other, trouble = self._at(self._names.object_name(save, "layout"), digest)
            if trouble is None:
                metrics.fallbacks.labels("layout_copy").inc()
                log.warning("%s; the copy beside %s is good, and is read", problem, save)
                self._put_again(digest, other)
                return other
        if isinstance(problem, TierError):
            raise problem
        return text  # whoever asked verifies it, and names it

    def _put_again(self, digest: str, text: str) -> None:
        if self._read_only:
            return
        try:
            self._store.put(self._names.layout(digest), text.encode())
        except TierError as problem:
            log.warning("layout %s could not be written again: %s; the next save does it", digest, problem)

    def _that_may_have(self, digest: str) -> list[RankSave]:
        """Rank saves beside which a copy of this layout may lie: those known to have it, then others of their ranks."""
        known = sorted((save for save, layout in self.of.copy().items() if layout == digest), reverse=True)
        others = [RankSave(c.generation, c.step, save.rank) for c in reversed(self._seen()) for save in known[:1]]
        return list(dict.fromkeys([*known[:_COPIES], *others[:_COPIES]]))

    def _at(self, path: str, digest: str) -> tuple[str, TierError | Corrupt | None]:
        raw = b""

        def read() -> None:
            nonlocal raw
            raw = self._store.read(path)
            if xxhash.xxh3_64_hexdigest(raw) != digest:
                raise Corrupt(f"{path} in the persistent tier is damaged")

        try:
            second_look(read)
        except (TierError, Corrupt) as problem:
            return raw.decode(errors="replace"), problem
        return raw.decode(errors="replace"), None
