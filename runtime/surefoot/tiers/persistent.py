"""Stores rank saves as objects, manifests last, over any `ObjectStore`.

    {job}/{step}-{epoch}/rank-{N}/p0000 …, digests, values: chunks lie four to a part (`parts`)
    {job}/{step}-{epoch}/rank-{N}/layout its layout record, once more: one that is lost takes no other checkpoint along
    {job}/{step}-{epoch}/rank-{N}.json   its manifest, last
    {job}/{step}-{epoch}/manifests.jsonl all of them once more in one, once the last is there (`persistent_records`)
    {job}/layouts/{digest}.json
    {job}/newest.json                    the newest checkpoint of which every rank's manifest is here
    {job}/generations/{E}                     who runs without a coordinator claims its epoch by creating this
    {job}/generations/{E}.json, lineage/{E}.json   what that epoch stands on, twice
    {job}/generations/{E}.alive               its program is at work, and has not ended in order

There is no fence here: a save of an overtaken world is not on the lineage, so nobody reads it and retention removes it.
Under a committed name nothing is written: parts are created, never replaced, once a manifest names them. Two exceptions
compare first: what an attempt without a manifest left behind, and a damaged part, which takes back its own bytes alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit
from zlib import crc32

from surefoot import metrics
from surefoot.errors import ChunkMissing, ConfigurationError, Corrupt, ProtocolError, SaveExists, TierError
from surefoot.format.layouts import DIGEST_BYTES, digest, first_bad_block, read_layout
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.settings import PersistentSettings
from surefoot.tiers import persistent_records
from surefoot.tiers.object_store import DirectoryStore, ObjectStore, read_exactly, read_in_threads, second_look
from surefoot.tiers.persistent_records import (
    PART_CHUNKS,
    ChunkMap,
    GenerationRecords,
    LayoutRecords,
    ObjectNames,
    PartBuffer,
    checkpoint_of,
    incomplete_error,
    part_lengths,
    part_name,
    part_of,
    rank_of,
)

log = logging.getLogger(__name__)


_MOST_NEW = 64
"""Saves that one connection remembers to be uncommitted: a writer has a few under way."""


class ObjectStoreTier:
    """One job in a store."""

    name = "persistent"
    at_once = 4
    """Parts on their way at once, so at most 64 MiB of them in memory. One stream to a bucket is a fraction of several."""
    together = PART_CHUNKS

    def __init__(self, store: ObjectStore, job: str, read_only: bool = False) -> None:
        self._store = store
        self._job = job
        self._names = ObjectNames(job)
        self.generations = GenerationRecords(store, job)
        self._damaged: tuple[str, ...] = ()
        self._gathered = PartBuffer()
        self._new: set[RankSave] = set()
        """Saves that this connection found without a manifest, and writes."""
        self._layouts = LayoutRecords(store, self._names, read_only, self.list_all_checkpoints)
        self._cuts: dict[str, ChunkMap] = {}
        self._last_layout: tuple[str, bytes] = ("", b"")

    def put_layout(self, digest: str, text: str) -> None:
        self._last_layout = (digest, text.encode())
        self._store.put(self._names.layout(digest), self._last_layout[1])

    def put_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        """Keeps a chunk until its part is whole, then writes it.

        Of a committed save one chunk that is damaged is written again at once.
        """
        committed = self._committed_as(save)
        if committed is not None:
            self._repair_chunk(committed, index, data)
            return
        part = self._gathered.add(save, index, data)
        if part is not None:
            self._write(save, self._names.part(save, index // PART_CHUNKS), *part)

    def put_values(self, save: RankSave, data: bytes) -> None:
        committed = self._committed_as(save)
        if committed is not None and digest(data) != committed.values_digest:
            raise _taken(committed, "other values")
        self._write(save, self._names.object_name(save, "values"), data)

    def put_digests(self, save: RankSave, data: bytes) -> None:
        committed = self._committed_as(save)
        if committed is not None and digest(data) != committed.digests_digest:
            raise _taken(committed, "another digest table")
        self._write(save, self._names.object_name(save, "digests"), data)

    def has(self, manifest: RankManifest) -> bool:
        save, committed = manifest.save, self._committed_as(manifest.save)
        if committed is None:
            return False
        if not committed.same_bytes_as(manifest):
            raise _taken(committed, _described(manifest))
        sizes = self._store.sizes(self._names.folder(save))
        stream_bytes = sum(size for name, size in sizes.items() if part_of(name) is not None)
        present = (stream_bytes, sizes.get("digests"), sizes.get("values"))
        if present != (manifest.stream_bytes, manifest.digests_bytes, manifest.values_bytes):
            return False
        self._publish_checkpoint(manifest)  # whoever committed it may have died before
        return True

    def commit(self, manifest: RankManifest, writer_epoch: int, chunk_lengths: tuple[int, ...]) -> None:
        """Writes the manifest; an older epoch is not refused.

        `writer_epoch` is not looked at: what an old world commits here is ignored by whoever reads.
        """
        save = manifest.save
        if len(chunk_lengths) != manifest.chunks:
            raise ValueError(f"{save} has {manifest.chunks} chunks; {len(chunk_lengths)} lengths were given")
        committed = self._committed_as(save)
        if committed is not None and not committed.same_bytes_as(manifest):
            raise _taken(committed, _described(manifest))
        self._put_last(save, chunk_lengths)
        wanted = {"digests": manifest.digests_bytes, "values": manifest.values_bytes}
        name, layout = self._last_layout
        if name == manifest.layout:
            self._write(save, self._names.object_name(save, "layout"), layout)
            wanted["layout"] = len(layout)
        wanted |= {part_name(number): length for number, length in enumerate(part_lengths(chunk_lengths))}
        found = self._store.sizes(self._names.folder(save))
        for part, length in wanted.items():
            if found.get(part) != length:
                raise incomplete_error(save, part, found.get(part), length)
        there = self._store.sizes(self._names.layouts).get(f"{manifest.layout}.json")
        if there is None or (name == manifest.layout and there != len(layout)):
            raise ChunkMissing(f"{save} cannot be committed: its layout record {manifest.layout} is not there whole")
        self._store.make_durable(self._names.layouts)
        self._store.make_durable(self._names.folder(save))
        self._publish(manifest)
        self._publish_checkpoint(manifest)

    def manifests(self) -> tuple[RankManifest, ...]:
        return self._manifests_of(self.list_all_checkpoints())

    def manifests_of(self, checkpoint: Checkpoint) -> tuple[RankManifest, ...]:
        return self._manifests_of((checkpoint,))

    def _manifests_of(self, checkpoints: Sequence[Checkpoint]) -> tuple[RankManifest, ...]:
        found, self._damaged = self._read_all(checkpoints)
        self._layouts.of = {manifest.save: manifest.layout for manifest in found}
        return found

    def damaged(self) -> tuple[str, ...]:
        return self._damaged

    def read_layout(self, digest: str) -> str:
        """Reads the shared layout record, or a save's own copy."""
        return self._layouts.read(digest)

    def read_layout_of(self, manifest: RankManifest) -> str:
        self._layouts.of[manifest.save] = manifest.layout
        return self.read_layout(manifest.layout)

    def read_values(self, save: RankSave) -> bytes:
        return self._store.read(self._names.object_name(save, "values"))

    def read_digests(self, save: RankSave, offset: int, length: int) -> bytes:
        return read_exactly(self._store, self._names.object_name(save, "digests"), offset, length)

    def read_chunk(self, save: RankSave, index: int, offset: int, length: int) -> bytes | memoryview:
        place = self._cut(save).chunk(index)
        if place is None:
            raise ChunkMissing(f"{save} has no chunk {index} in the persistent tier")
        part, start, size = place
        if offset + length > size:
            raise ChunkMissing(f"chunk {index} of {save} has {size} bytes, not {length} from {offset}")
        return read_exactly(self._store, self._names.part(save, part), start + offset, length)

    def drop(self, save: RankSave, writer_epoch: int, chunks: int) -> None:
        """Manifest first, durably, then everything beside it."""
        self._layouts.of.pop(save, None)
        self._store.remove(self._names.manifest_list(save.checkpoint))
        self._store.remove(self._names.manifest(save))
        self._store.make_durable(self._names.checkpoint(save.checkpoint))
        self._store.remove_folder(self._names.folder(save))

    def close(self) -> None:
        self._store.close()

    # ---- beyond `Tier` ----------------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        """The job's folder, for people."""
        return f"{self._store.location}/{self._job}"

    def expect(self) -> None:
        """Raises TierUnavailable where the job's folder is gone: it is not empty but away."""
        self._store.expect(self._job)

    def list_all_checkpoints(self) -> tuple[Checkpoint, ...]:
        """Lists every checkpoint with any object here, complete or not."""
        return tuple(sorted(c for name in self._store.folders(self._job) if (c := checkpoint_of(name))))

    def newest(self) -> tuple[RankManifest, ...]:
        """Reads the manifests of the newest whole checkpoint.

        That is one with every rank's manifest; none if there is no such checkpoint. Read without a listing, by the
        record that whoever committed its last rank has left; listed where the record is not there, or not true any
        more. Whether it is on a lineage, and covers everything, is for the reader to say.
        """
        try:
            told = persistent_records.read_newest_record(self._store.read(self._names.newest()))
        except ChunkMissing:
            told = None
        if told is not None:
            checkpoint, world = told
            if world < persistent_records.MIN_MANIFEST_LIST_RANKS:
                saves = [RankSave(checkpoint.generation, checkpoint.step, rank) for rank in range(world)]
                found = tuple(read for read in read_in_threads(self._visible, saves) if isinstance(read, RankManifest))
            else:
                found, _ = self._read_all((checkpoint,))
            if len(found) == world:
                return found
        metrics.fallbacks.labels("persistent_listed").inc()
        return persistent_records.newest_manifests(self.manifests())

    def named_newest(self) -> Checkpoint | None:
        """Reads which checkpoint was the newest whole one, as the record says; None where there is no record.

        Raises:
            Corrupt: It is there, and says nothing.
            TierUnavailable: The tier does not say.
        """

        def read() -> Checkpoint | None:
            try:
                text = self._store.read(self._names.newest())
            except ChunkMissing:
                return None
            told = persistent_records.read_newest_record(text)
            if told is None:
                raise Corrupt(f"persistent: {self._names.newest()} is damaged")
            return told[0]

        return second_look(read)

    def drop_unfinished(self, save: RankSave) -> None:
        """Removes what lies of a save that was given up, unless its manifest is there."""
        if save not in self._committed(save.checkpoint)[0]:
            self._store.remove_folder(self._names.folder(save))

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Removes all rank saves of a checkpoint.

        Every manifest first, so that no part of it is taken for whole.
        """
        self._store.remove(self._names.manifest_list(checkpoint))
        for save in self.committed(checkpoint):
            self._layouts.of.pop(save, None)
            self._store.remove(self._names.manifest(save))
        self._store.make_durable(self._names.checkpoint(checkpoint))
        self._store.remove_folder(self._names.checkpoint(checkpoint))

    def remove_all(self) -> None:
        """Removes everything of the job, whatever it is.

        For a job that is gone; checkpoints should be dropped first.
        """
        self._store.remove_folder(self._job)

    def claim_generation(self) -> int:
        """Takes the next epoch.

        Newer than every claim and every save here, and nobody else gets the same.
        """
        return self.generations.claim(
            max((checkpoint.generation for checkpoint in self.list_all_checkpoints()), default=0)
        )

    def newest_epoch(self, claim_epoch: int = 0, ticket: str = "", is_writable: bool = True) -> int:
        """Claims an epoch for who bears this ticket; 0: none.

        Args:
            claim_epoch: The epoch that the job's status names.
            ticket: What its claim holds.
            is_writable: False for a tier that is full or read-only: it is looked at, and nothing is written.

        Returns:
            The newest epoch that anything else here names, a save or a claim; 0: none. Where that is not older than
            `claim_epoch`, the epoch is another's.
        """
        claim = self.generations.claim_as if is_writable else self.generations.may_bear
        is_own = claim_epoch > 0 and claim(claim_epoch, ticket)
        claimed = self.generations.claimed() - ({claim_epoch} if is_own else set())
        return max((*claimed, *(checkpoint.generation for checkpoint in self.list_all_checkpoints())), default=0)

    def committed(self, checkpoint: Checkpoint) -> list[RankSave]:
        """Rank saves of it that have a manifest, readable or not."""
        return sorted(self._committed(checkpoint)[0])

    def split_known(
        self, checkpoint: Checkpoint, remembered: Mapping[RankSave, RankManifest] | None = None
    ) -> tuple[tuple[RankManifest, ...], tuple[RankSave, ...]]:
        """Divides a checkpoint's manifests into known and to be read.

        `remembered`: those that were read before; where they do not tell all, the checkpoint's list is read.
        """
        sizes, listed = self._committed(checkpoint)
        known, unread = persistent_records.split_known(remembered or {}, sizes)
        if unread and listed:
            known, unread = persistent_records.split_known({**(remembered or {}), **self._listed(checkpoint)}, sizes)
        self._layouts.of |= {manifest.save: manifest.layout for manifest in known}
        return known, unread

    def read_manifest(self, save: RankSave) -> RankManifest:
        """Reads one manifest.

        Raises:
            ChunkMissing: It is not there.
            Corrupt: It cannot be read; names the file and the cause.
            TierUnavailable: The tier does not say.
        """
        return second_look(lambda: self._manifest(save))

    def _manifest(self, save: RankSave) -> RankManifest:
        path = self._names.manifest(save)
        try:
            manifest = RankManifest.from_json(self._store.read(path))
        except ProtocolError as error:
            raise Corrupt(f"persistent: {path} of {save}: {error}") from error
        if manifest.save != save:
            raise Corrupt(f"persistent: {path} of {save} describes {manifest.save}; another copy is needed")
        self._layouts.of[save] = manifest.layout
        return manifest

    def list_parts(self, save: RankSave) -> dict[int, int]:
        """Lists parts that are here, with their bytes.

        Each was written in one piece.
        """
        sizes = self._store.sizes(self._names.folder(save))
        return {part: size for name, size in sizes.items() if (part := part_of(name)) is not None}

    def has_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> bool:
        there = self._store.checksum(self._names.part(save, part))
        if there is None:
            metrics.fallbacks.labels("part_without_checksum").inc()
            return False
        wanted = 0
        for chunk in chunks:
            wanted = crc32(chunk, wanted)
        return there == wanted

    def put_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> None:
        committed = self._committed_as(save)
        if committed is not None:
            for index, data in enumerate(chunks, part * PART_CHUNKS):
                self._check_own(committed, index, data)
        self._write(save, self._names.part(save, part), *chunks)

    def copy_part(self, source: RankSave, save: RankSave, part: int) -> bool:
        if self._committed_as(save) is not None:
            return False  # it is sent instead, which compares
        return self._store.copy(self._names.part(source, part), self._names.part(save, part))

    # ---- how --------------------------------------------------------------------------------------------------------

    def _put_last(self, save: RankSave, chunk_lengths: tuple[int, ...]) -> None:
        """Writes chunks that wait for the rest of a part: it is the last, if they are what it lacks."""
        waiting = self._gathered.waiting(save)
        if not waiting:
            return
        part = min(waiting) // PART_CHUNKS
        for index in range(part * PART_CHUNKS, min(len(chunk_lengths), (part + 1) * PART_CHUNKS)):
            if waiting.get(index) != chunk_lengths[index]:
                raise incomplete_error(save, f"chunk {index}", waiting.get(index), chunk_lengths[index])
        self._write(save, self._names.part(save, part), *self._gathered.take(save))

    def _committed_as(self, save: RankSave) -> RankManifest | None:
        """What is committed under a save's name; None: nothing, or a manifest of which no copy can be read."""
        if save in self._new:
            return None
        try:
            # one look at what is not there, as for every new save: exclusive creation guards what the look missed
            return self._manifest(save)
        except ChunkMissing:
            committed = None
        except Corrupt:
            committed = self._committed_behind_damage(save)
        if committed is None:
            if len(self._new) >= _MOST_NEW:
                self._new.clear()
            self._new.add(save)
        return committed

    def _committed_behind_damage(self, save: RankSave) -> RankManifest | None:
        try:
            return self.read_manifest(save)
        except (Corrupt, ChunkMissing):
            return self._listed(save.checkpoint).get(save)

    def _write(self, save: RankSave, path: str, *pieces: bytes | memoryview) -> None:
        """Creates one object of a save; replaces another one only where that is damaged, or no manifest names it."""
        committed = save not in self._new
        if not committed and self._store.create(path, *pieces, durable=False):
            return
        wanted = 0
        for piece in pieces:
            wanted = crc32(piece, wanted)
        if self._store.checksum(path) == wanted:
            return
        if not committed:
            self._new.discard(save)
            other = self._committed_as(save)  # by a writer that was quicker
            if other is not None:
                raise _taken(other, "other bytes")
        self._store.put(path, *pieces)

    def _check_own(self, committed: RankManifest, index: int, data: memoryview) -> None:
        """Raises SaveExists unless these are the bytes of a committed save's chunk, as its digest table has them."""
        stream = read_layout(committed.layout, self.read_layout(committed.layout))
        table = self.read_digests(committed.save, 0, committed.digests_bytes)
        if digest(table) != committed.digests_digest:
            raise Corrupt(
                f"the digest table of {committed.save} in the persistent tier is damaged and must be repaired first"
            )
        blocks = stream.blocks_of_chunk(index)
        wanted = table[blocks.start * DIGEST_BYTES : blocks.stop * DIGEST_BYTES]
        if first_bad_block(data, stream.edges, blocks, wanted) is not None:
            raise _taken(committed, f"another chunk {index}")

    def _repair_chunk(self, committed: RankManifest, index: int, data: memoryview) -> None:
        """Rewrites one chunk of a committed save in its part; where the part is gone, zeros replace its neighbours."""
        save = committed.save
        cut = self._cut(save)
        place = cut.chunk(index)
        if place is None or place[2] != len(data):
            raise TierError(f"{save} is already in the persistent tier, with other bytes; it stays as it is")
        part, start, size = place
        path, length = self._names.part(save, part), cut.part_bytes(part)
        try:
            whole = bytearray(read_exactly(self._store, path, 0, length))
        except ChunkMissing:
            whole = bytearray(length)
        if whole[start : start + size] == data:
            return
        self._check_own(committed, index, data)
        whole[start : start + size] = data
        self._store.put(path, memoryview(whole))

    def _cut(self, save: RankSave) -> ChunkMap:
        """How its stream is cut into chunks, as its layout says."""
        digest = self._layouts.of.get(save)
        if digest is None:
            digest = self.read_manifest(save).layout
        if digest not in self._cuts:
            try:
                body = json.loads(self.read_layout(digest))
                self._cuts[digest] = ChunkMap(tuple(map(int, body["chunk_starts"])), int(body["stream_bytes"]))
            except (KeyError, TypeError, ValueError) as error:
                raise Corrupt(f"layout {digest} in the persistent tier is damaged; another copy is needed") from error
        return self._cuts[digest]

    def _record_complete(self, checkpoint: Checkpoint, world: int) -> None:
        """Leaves the records of a checkpoint that has all its ranks; of several that came last at once each sees all."""
        self._store.change(
            self._names.newest(), lambda before: persistent_records.grown_newest_record(before, checkpoint, world)
        )
        if world < persistent_records.MIN_MANIFEST_LIST_RANKS:
            return
        try:
            found, _ = self._read_all((checkpoint,))
            if len(found) == world:
                self._store.put(self._names.manifest_list(checkpoint), persistent_records.manifest_list_text(found))
        except TierError as problem:
            metrics.fallbacks.labels("manifest_list_write_failed").inc()
            log.warning(
                "the manifests of %s are listed one by one: their list could not be written: %s", checkpoint, problem
            )

    def _listed(self, checkpoint: Checkpoint) -> dict[RankSave, RankManifest]:
        """Reads a checkpoint's list of manifests; empty where it is gone, damaged or silent: then each manifest is read
        itself."""
        try:
            return persistent_records.read_manifest_list(
                self._store.read(self._names.manifest_list(checkpoint)), checkpoint
            )
        except ChunkMissing:
            return {}
        except (TierError, ProtocolError) as problem:
            metrics.fallbacks.labels("manifest_list_unreadable").inc()
            log.warning("%s; its manifests are read one by one", problem)
            return {}

    def _committed(self, checkpoint: Checkpoint) -> tuple[dict[RankSave, int], bool]:
        """Bytes of each manifest that is there, and whether their list is."""
        names = self._store.sizes(self._names.checkpoint(checkpoint))
        ranks = {name: rank for name in names if (rank := rank_of(name)) is not None}
        sizes = {RankSave(checkpoint.generation, checkpoint.step, rank): names[name] for name, rank in ranks.items()}
        return sizes, persistent_records.MANIFEST_LIST_NAME in names

    def _publish(self, manifest: RankManifest) -> None:
        save, text = manifest.save, manifest.to_json().encode()
        path = self._names.manifest(save)
        is_new = self._store.create(path, text)
        self._new.discard(save)
        if is_new:
            return
        committed = self._committed_as(save)
        if committed is not None and not committed.same_bytes_as(manifest):
            raise _taken(committed, _described(manifest))
        try:
            self.read_manifest(save)
        except Corrupt:
            self._store.put(path, text)  # no copy says that it is another save
            self._store.make_durable(self._names.checkpoint(save.checkpoint))
            self._new.discard(save)

    def _publish_checkpoint(self, manifest: RankManifest) -> None:
        """Leaves the records of a checkpoint once all its ranks are there."""
        if len(self.committed(manifest.save.checkpoint)) >= manifest.world_size:
            self._record_complete(manifest.save.checkpoint, manifest.world_size)

    def _read_all(self, checkpoints: Sequence[Checkpoint]) -> tuple[tuple[RankManifest, ...], tuple[str, ...]]:
        """Reads every manifest that can be read, by save, and describes the others' faults."""
        looks = read_in_threads(self.split_known, checkpoints)
        read = read_in_threads(self._visible, [save for _, unread in looks for save in unread])
        found = [manifest for known, _ in looks for manifest in known]
        found += [one for one in read if isinstance(one, RankManifest)]
        return tuple(sorted(found, key=lambda m: m.save)), tuple(str(one) for one in read if isinstance(one, Corrupt))

    def _visible(self, save: RankSave) -> RankManifest | Corrupt | None:
        """The manifest, or what is wrong with it; None while it is written, or where its writer died."""
        try:
            return self.read_manifest(save)
        except ChunkMissing:
            return None
        except Corrupt as damaged:
            return damaged


def _described(manifest: RankManifest) -> str:
    """One save's bytes, for people who compare it with another of its name."""
    return f"one saved by {manifest.incarnation} (digests {manifest.digests_digest}, values {manifest.values_digest})"


def _taken(committed: RankManifest, other: str) -> SaveExists:
    return SaveExists(
        f"{committed.save} is already in the persistent tier, with other bytes: {_described(committed)} stays as it is, and"
        f" {other} is refused"
    )


# ---- opening a tier by its URI ---------------------------------------------------------------------------------------
# Opens the persistent tier that the settings name. Drain, restore and tools do so.


def open_persistent(
    settings: PersistentSettings, job: str, *, read_only: bool = False, begin: bool = False
) -> ObjectStoreTier:
    """Opens the job's persistent tier by its URI.

    `file:///folder` or `s3://bucket/prefix`. Nothing is asked of a bucket yet. `read_only`: an older job's, which
    nobody changes. `begin`: makes a folder that is not there. A process does so once, as it starts: a folder that is
    missing later is a disk that went away, whose checkpoints a new, empty one would hide.
    """
    return ObjectStoreTier(open_store(settings, begin=begin), job, read_only)


def open_store(settings: PersistentSettings, *, begin: bool = False) -> ObjectStore:
    """Opens the store of all jobs' objects that the settings name."""
    parts = urlsplit(settings.uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return DirectoryStore(Path(unquote(parts.path)), begin)
    if parts.scheme == "s3" and parts.netloc:
        from surefoot.tiers.s3 import S3Store  # botocore takes half a second to import: only those pay who use it

        return S3Store(settings, parts.netloc, unquote(parts.path))
    raise ConfigurationError(
        f"checkpoint.persistent.uri is {settings.uri!r}: file:///folder (absolute) and s3://bucket/prefix are allowed"
    )
