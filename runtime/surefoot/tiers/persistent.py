"""Stores rank saves as objects, with the manifest last, over any `ObjectStore`.

    {job}/{step}-{generation}/rank-{N}/p0000 …, digests, values   the save, with four chunks in each part
    {job}/{step}-{generation}/rank-{N}/layout    copy of its layout record, so that losing one record loses no other save
    {job}/{step}-{generation}/rank-{N}.json      its manifest, written last
    {job}/{step}-{generation}/manifests.jsonl    all ranks' manifests again, once the last exists (`persistent_records`)
    {job}/layouts/{digest}.json                  layout records, shared by all saves
    {job}/newest.json                            the newest checkpoint with every rank's manifest
    {job}/generations/{G}                        a program without an operator claims generation G by creating this
    {job}/generations/{G}.json, lineage/{G}.json the parent of that generation, twice
    {job}/generations/{G}.alive                  heartbeat of its program, deleted when that ends in order

There is no fence here: a save of an overtaken generation is not on the lineage, so no reader uses it and retention
deletes it. A committed save is never replaced: its parts are only created. Two exceptions compare the bytes first: the
remains of an attempt without a manifest are replaced, and a damaged part is rewritten with its own bytes.
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
from surefoot.tiers.object_store import DirectoryStore, ObjectStore, read_exactly, read_in_threads, read_with_retries
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


_MAX_UNCOMMITTED = 64
"""Number of uncommitted saves that a connection remembers; a writer has only a few in progress."""


class ObjectStoreTier:
    """The persistent tier of one job."""

    name = "persistent"
    max_concurrent_parts = 4
    """Parts sent concurrently, so at most 64 MiB in memory; a single stream reaches only a fraction of a bucket's rate."""
    chunks_per_part = PART_CHUNKS

    def __init__(self, store: ObjectStore, job: str, read_only: bool = False) -> None:
        self._store = store
        self._job = job
        self._names = ObjectNames(job)
        self.generations = GenerationRecords(store, job)
        self._damaged: tuple[str, ...] = ()
        self._part_buffer = PartBuffer()
        self._uncommitted: set[RankSave] = set()
        """Saves that this connection found uncommitted and is writing."""
        self._layouts = LayoutRecords(store, self._names, read_only, self.list_all_checkpoints)
        self._chunk_maps: dict[str, ChunkMap] = {}
        self._last_layout: tuple[str, bytes] = ("", b"")

    def put_layout(self, digest: str, text: str) -> None:
        self._last_layout = (digest, text.encode())
        self._store.put(self._names.layout(digest), self._last_layout[1])

    def put_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        """Buffers a chunk until its part is complete, then writes the part; repairs a chunk of a committed save."""
        committed = self._committed_manifest(save)
        if committed is not None:
            self._repair_chunk(committed, index, data)
            return
        part = self._part_buffer.add_chunk(save, index, data)
        if part is not None:
            self._write(save, self._names.part(save, index // PART_CHUNKS), *part)

    def put_values(self, save: RankSave, data: bytes) -> None:
        committed = self._committed_manifest(save)
        if committed is not None and digest(data) != committed.values_digest:
            raise _save_exists_error(committed, "other values")
        self._write(save, self._names.object_name(save, "values"), data)

    def put_digests(self, save: RankSave, data: bytes) -> None:
        committed = self._committed_manifest(save)
        if committed is not None and digest(data) != committed.digests_digest:
            raise _save_exists_error(committed, "another digest table")
        self._write(save, self._names.object_name(save, "digests"), data)

    def has_committed(self, manifest: RankManifest) -> bool:
        save, committed = manifest.save, self._committed_manifest(manifest.save)
        if committed is None:
            return False
        if not committed.has_same_bytes_as(manifest):
            raise _save_exists_error(committed, _describe_bytes(manifest))
        sizes = self._store.list_sizes(self._names.folder(save))
        stream_bytes = sum(size for name, size in sizes.items() if part_of(name) is not None)
        present = (stream_bytes, sizes.get("digests"), sizes.get("values"))
        if present != (manifest.stream_bytes, manifest.digests_bytes, manifest.values_bytes):
            return False
        self._publish_checkpoint(manifest)  # the writer that committed the save may have died before it did this
        return True

    def commit(self, manifest: RankManifest, writer_generation: int, chunk_lengths: tuple[int, ...]) -> None:
        """Writes the manifest. `writer_epoch` is ignored, because readers ignore saves of an overtaken generation."""
        save = manifest.save
        if len(chunk_lengths) != manifest.chunks:
            raise ValueError(f"{save} has {manifest.chunks} chunks, but {len(chunk_lengths)} lengths were passed")
        committed = self._committed_manifest(save)
        if committed is not None and not committed.has_same_bytes_as(manifest):
            raise _save_exists_error(committed, _describe_bytes(manifest))
        # Every part must exist in its full length before the manifest makes the save visible.
        self._write_last_part(save, chunk_lengths)
        expected_sizes = {"digests": manifest.digests_bytes, "values": manifest.values_bytes}
        name, layout = self._last_layout
        if name == manifest.layout:
            self._write(save, self._names.object_name(save, "layout"), layout)
            expected_sizes["layout"] = len(layout)
        expected_sizes |= {part_name(number): length for number, length in enumerate(part_lengths(chunk_lengths))}
        sizes = self._store.list_sizes(self._names.folder(save))
        for part, length in expected_sizes.items():
            if sizes.get(part) != length:
                raise incomplete_error(save, part, sizes.get(part), length)
        layout_bytes = self._store.list_sizes(self._names.layouts).get(f"{manifest.layout}.json")
        if layout_bytes is None or (name == manifest.layout and layout_bytes != len(layout)):
            raise ChunkMissing(
                f"{save} cannot be committed: its layout record {manifest.layout} is missing or incomplete"
            )
        # All of it must survive a power failure before the manifest does.
        self._store.make_durable(self._names.layouts)
        self._store.make_durable(self._names.folder(save))
        self._publish_manifest(manifest)
        self._publish_checkpoint(manifest)

    def manifests(self) -> tuple[RankManifest, ...]:
        return self._manifests_of(self.list_all_checkpoints())

    def manifests_of(self, checkpoint: Checkpoint) -> tuple[RankManifest, ...]:
        return self._manifests_of((checkpoint,))

    def _manifests_of(self, checkpoints: Sequence[Checkpoint]) -> tuple[RankManifest, ...]:
        manifests, self._damaged = self._read_manifests(checkpoints)
        self._layouts.digest_by_save = {manifest.save: manifest.layout for manifest in manifests}
        return manifests

    def damaged(self) -> tuple[str, ...]:
        return self._damaged

    def read_layout(self, digest: str) -> str:
        """Reads the shared layout record, or the copy of a save if the shared one is damaged or missing."""
        return self._layouts.read(digest)

    def read_layout_of(self, manifest: RankManifest) -> str:
        self._layouts.digest_by_save[manifest.save] = manifest.layout
        return self.read_layout(manifest.layout)

    def read_values(self, save: RankSave) -> bytes:
        return self._store.read(self._names.object_name(save, "values"))

    def read_digests(self, save: RankSave, offset: int, length: int) -> bytes:
        return read_exactly(self._store, self._names.object_name(save, "digests"), offset, length)

    def read_chunk(self, save: RankSave, index: int, offset: int, length: int) -> bytes | memoryview:
        location = self._chunk_map(save).locate_chunk(index)
        if location is None:
            raise ChunkMissing(f"{save} has no chunk {index} in the persistent tier")
        part, start, size = location
        if offset + length > size:
            raise ChunkMissing(f"chunk {index} of {save} has {size} bytes, not {length} from {offset}")
        return read_exactly(self._store, self._names.part(save, part), start + offset, length)

    def delete_save(self, save: RankSave, writer_generation: int, chunks: int) -> None:
        """Deletes a save: its manifest first, durably, then its data."""
        self._layouts.digest_by_save.pop(save, None)
        self._store.remove(self._names.manifest_list(save.checkpoint))
        self._store.remove(self._names.manifest(save))
        self._store.make_durable(self._names.checkpoint(save.checkpoint))
        self._store.remove_folder(self._names.folder(save))

    def close(self) -> None:
        self._store.close()

    # ---- beyond `Tier` ----------------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        """The job's folder or bucket prefix, for messages."""
        return f"{self._store.location}/{self._job}"

    def check_folder_exists(self) -> None:
        """Raises TierUnavailable if the job's folder is missing, which means a lost disk or mount, not an empty tier."""
        self._store.check_folder_exists(self._job)

    def list_all_checkpoints(self) -> tuple[Checkpoint, ...]:
        """Lists every checkpoint with any object here, complete or not."""
        return tuple(sorted(c for name in self._store.list_folders(self._job) if (c := checkpoint_of(name))))

    def read_newest_manifests(self) -> tuple[RankManifest, ...]:
        """Reads the manifests of the newest checkpoint that has every rank's; empty if there is none.

        Uses the record that the writer of the last rank left. If that is missing or outdated, the tier is listed. The
        caller must check whether the checkpoint is on its lineage and covers every tensor.
        """
        try:
            record = persistent_records.read_newest_record(self._store.read(self._names.newest()))
        except ChunkMissing:
            record = None
        if record is not None:
            checkpoint, world_size = record
            if world_size < persistent_records.MIN_MANIFEST_LIST_RANKS:
                saves = [RankSave(checkpoint.generation, checkpoint.step, rank) for rank in range(world_size)]
                results = read_in_threads(self._manifest_or_error, saves)
                manifests = tuple(result for result in results if isinstance(result, RankManifest))
            else:
                manifests, _ = self._read_manifests((checkpoint,))
            if len(manifests) == world_size:
                return manifests
        metrics.fallbacks.labels("persistent_listed").inc()
        return persistent_records.select_newest_manifests(self.manifests())

    def read_newest_record(self) -> Checkpoint | None:
        """Reads from its record which checkpoint is the newest with every rank's manifest; None: there is no record.

        Raises:
            Corrupt: The record is damaged.
            TierUnavailable: The tier does not answer.
        """

        def read() -> Checkpoint | None:
            try:
                text = self._store.read(self._names.newest())
            except ChunkMissing:
                return None
            record = persistent_records.read_newest_record(text)
            if record is None:
                raise Corrupt(f"persistent: {self._names.newest()} is damaged")
            return record[0]

        return read_with_retries(read)

    def drop_unfinished(self, save: RankSave) -> None:
        """Deletes the remains of an abandoned save; does nothing if the save has a manifest."""
        if save not in self._manifest_sizes(save.checkpoint)[0]:
            self._store.remove_folder(self._names.folder(save))

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Deletes all rank saves of a checkpoint, all manifests first, so that no incomplete save appears complete."""
        self._store.remove(self._names.manifest_list(checkpoint))
        for save in self.list_committed(checkpoint):
            self._layouts.digest_by_save.pop(save, None)
            self._store.remove(self._names.manifest(save))
        self._store.make_durable(self._names.checkpoint(checkpoint))
        self._store.remove_folder(self._names.checkpoint(checkpoint))

    def remove_all(self) -> None:
        """Deletes everything of a job that no longer exists; drop its checkpoints first."""
        self._store.remove_folder(self._job)

    def claim_generation(self) -> int:
        """Claims the next generation, newer than every claim and every save here; no other program gets the same."""
        return self.generations.claim(
            max((checkpoint.generation for checkpoint in self.list_all_checkpoints()), default=0)
        )

    def claim_and_find_newest_generation(
        self, claimed_generation: int = 0, ticket: str = "", is_writable: bool = True
    ) -> int:
        """Claims a generation for the bearer of a ticket, and returns the newest generation of any other program.

        Args:
            claim_epoch: The generation to claim, from the job's status; 0: none.
            ticket: Content of the claim, which identifies the claimant.
            is_writable: False for a tier that is full or read-only, in which the claim is only checked.

        Returns:
            The newest generation of another claim or of a save; 0: there is none. If it is not older than `claim_epoch`,
            that generation belongs to another program.
        """
        claim = self.generations.claim_with_ticket if is_writable else self.generations.is_claim_free
        is_own = claimed_generation > 0 and claim(claimed_generation, ticket)
        claimed = self.generations.list_claimed() - ({claimed_generation} if is_own else set())
        return max((*claimed, *(checkpoint.generation for checkpoint in self.list_all_checkpoints())), default=0)

    def list_committed(self, checkpoint: Checkpoint) -> list[RankSave]:
        """Returns the rank saves of a checkpoint that have a manifest, readable or not."""
        return sorted(self._manifest_sizes(checkpoint)[0])

    def split_cached_manifests(
        self, checkpoint: Checkpoint, cached_manifests: Mapping[RankSave, RankManifest] | None = None
    ) -> tuple[tuple[RankManifest, ...], tuple[RankSave, ...]]:
        """Returns a checkpoint's manifests as far as they are known, and the saves whose manifest must be read.

        `remembered` are manifests that were read before; if some are missing there, the checkpoint's list is read.
        """
        sizes, has_list = self._manifest_sizes(checkpoint)
        valid, unread = persistent_records.split_cached_manifests(cached_manifests or {}, sizes)
        if unread and has_list:
            valid, unread = persistent_records.split_cached_manifests(
                {**(cached_manifests or {}), **self._read_manifest_list(checkpoint)}, sizes
            )
        self._layouts.digest_by_save |= {manifest.save: manifest.layout for manifest in valid}
        return valid, unread

    def read_manifest(self, save: RankSave) -> RankManifest:
        """Reads one manifest.

        Raises:
            ChunkMissing: It does not exist.
            Corrupt: It is damaged; the message names the file and the cause.
            TierUnavailable: The tier does not answer.
        """
        return read_with_retries(lambda: self._read_manifest_once(save))

    def _read_manifest_once(self, save: RankSave) -> RankManifest:
        path = self._names.manifest(save)
        try:
            manifest = RankManifest.from_json(self._store.read(path))
        except ProtocolError as error:
            raise Corrupt(f"persistent: {path} of {save}: {error}") from error
        if manifest.save != save:
            raise Corrupt(f"persistent: {path} of {save} describes {manifest.save}; another copy is needed")
        self._layouts.digest_by_save[save] = manifest.layout
        return manifest

    def list_parts(self, save: RankSave) -> dict[int, int]:
        """Returns the size of each part that exists; parts are written atomically, so each is complete."""
        sizes = self._store.list_sizes(self._names.folder(save))
        return {part: size for name, size in sizes.items() if (part := part_of(name)) is not None}

    def has_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> bool:
        stored_crc = self._store.checksum(self._names.part(save, part))
        if stored_crc is None:
            metrics.fallbacks.labels("part_without_checksum").inc()
            return False
        crc = 0
        for chunk in chunks:
            crc = crc32(chunk, crc)
        return stored_crc == crc

    def put_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> None:
        committed = self._committed_manifest(save)
        if committed is not None:
            for index, data in enumerate(chunks, part * PART_CHUNKS):
                self._check_same_bytes(committed, index, data)
        self._write(save, self._names.part(save, part), *chunks)

    def copy_part(self, source: RankSave, save: RankSave, part: int) -> bool:
        if self._committed_manifest(save) is not None:
            return False  # the part is sent instead, which compares it with the committed one
        return self._store.copy(self._names.part(source, part), self._names.part(save, part))

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _write_last_part(self, save: RankSave, chunk_lengths: tuple[int, ...]) -> None:
        """Writes the last part of a save from the buffered chunks; raises ChunkMissing if one is missing."""
        buffered_sizes = self._part_buffer.buffered_sizes(save)
        if not buffered_sizes:
            return
        part = min(buffered_sizes) // PART_CHUNKS
        for index in range(part * PART_CHUNKS, min(len(chunk_lengths), (part + 1) * PART_CHUNKS)):
            if buffered_sizes.get(index) != chunk_lengths[index]:
                raise incomplete_error(save, f"chunk {index}", buffered_sizes.get(index), chunk_lengths[index])
        self._write(save, self._names.part(save, part), *self._part_buffer.take_chunks(save))

    def _committed_manifest(self, save: RankSave) -> RankManifest | None:
        """Returns the manifest committed under a save's name; None: there is none, or no copy of it can be read."""
        if save in self._uncommitted:
            return None
        try:
            # A single read suffices for a new save: if it misses a manifest, exclusive creation detects that later.
            return self._read_manifest_once(save)
        except ChunkMissing:
            committed = None
        except Corrupt:
            committed = self._read_damaged_manifest(save)
        if committed is None:
            if len(self._uncommitted) >= _MAX_UNCOMMITTED:
                self._uncommitted.clear()
            self._uncommitted.add(save)
        return committed

    def _read_damaged_manifest(self, save: RankSave) -> RankManifest | None:
        """Reads a damaged manifest again, or from the checkpoint's list; None: no copy can be read."""
        try:
            return self.read_manifest(save)
        except (Corrupt, ChunkMissing):
            return self._read_manifest_list(save.checkpoint).get(save)

    def _write(self, save: RankSave, path: str, *pieces: bytes | memoryview) -> None:
        """Creates one object of a save; replaces an existing one only if it is damaged or no manifest refers to it."""
        is_committed = save not in self._uncommitted
        if not is_committed and self._store.create(path, *pieces, durable=False):
            return
        # An object exists. If it has the same bytes there is nothing to do.
        crc = 0
        for piece in pieces:
            crc = crc32(piece, crc)
        if self._store.checksum(path) == crc:
            return
        if not is_committed:
            self._uncommitted.discard(save)
            other = self._committed_manifest(save)  # another writer may have committed it in the meantime
            if other is not None:
                raise _save_exists_error(other, "other bytes")
        self._store.put(path, *pieces)

    def _check_same_bytes(self, committed: RankManifest, index: int, data: memoryview) -> None:
        """Raises SaveExists unless the bytes of a committed save's chunk match its digest table."""
        stream = read_layout(committed.layout, self.read_layout(committed.layout))
        table = self.read_digests(committed.save, 0, committed.digests_bytes)
        if digest(table) != committed.digests_digest:
            raise Corrupt(
                f"the digest table of {committed.save} in the persistent tier is damaged and must be repaired first"
            )
        blocks = stream.blocks_of_chunk(index)
        expected_digests = table[blocks.start * DIGEST_BYTES : blocks.stop * DIGEST_BYTES]
        if first_bad_block(data, stream.edges, blocks, expected_digests) is not None:
            raise _save_exists_error(committed, f"another chunk {index}")

    def _repair_chunk(self, committed: RankManifest, index: int, data: memoryview) -> None:
        """Rewrites a chunk of a committed save within its part; a missing part is first filled with zeros."""
        save = committed.save
        chunk_map = self._chunk_map(save)
        location = chunk_map.locate_chunk(index)
        if location is None or location[2] != len(data):
            raise TierError(f"{save} is already in the persistent tier with other bytes, and is not changed")
        part, start, size = location
        path, length = self._names.part(save, part), chunk_map.part_bytes(part)
        try:
            part_content = bytearray(read_exactly(self._store, path, 0, length))
        except ChunkMissing:
            part_content = bytearray(length)
        if part_content[start : start + size] == data:
            return
        self._check_same_bytes(committed, index, data)
        part_content[start : start + size] = data
        self._store.put(path, memoryview(part_content))

    def _chunk_map(self, save: RankSave) -> ChunkMap:
        """Returns where a save's chunks are in its parts, according to its layout."""
        digest = self._layouts.digest_by_save.get(save)
        if digest is None:
            digest = self.read_manifest(save).layout
        if digest not in self._chunk_maps:
            try:
                layout = json.loads(self.read_layout(digest))
                self._chunk_maps[digest] = ChunkMap(
                    tuple(map(int, layout["chunk_starts"])), int(layout["stream_bytes"])
                )
            except (KeyError, TypeError, ValueError) as error:
                raise Corrupt(f"layout {digest} in the persistent tier is damaged; another copy is needed") from error
        return self._chunk_maps[digest]

    def _record_complete(self, checkpoint: Checkpoint, world_size: int) -> None:
        """Writes the newest record, and the list of manifests, of a checkpoint with every rank's manifest.

        If several ranks commit last at the same time, each of them does this.
        """
        self._store.change(
            self._names.newest(),
            lambda old_record: persistent_records.update_newest_record(old_record, checkpoint, world_size),
        )
        if world_size < persistent_records.MIN_MANIFEST_LIST_RANKS:
            return
        try:
            manifests, _ = self._read_manifests((checkpoint,))
            if len(manifests) == world_size:
                text = persistent_records.manifest_list_text(manifests)
                self._store.put(self._names.manifest_list(checkpoint), text)
        except TierError as problem:
            metrics.fallbacks.labels("manifest_list_write_failed").inc()
            log.warning(
                "could not write the list of manifests of %s, so readers read each manifest: %s", checkpoint, problem
            )

    def _read_manifest_list(self, checkpoint: Checkpoint) -> dict[RankSave, RankManifest]:
        """Reads a checkpoint's list of manifests; empty if it cannot be read, so that each manifest is read itself."""
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

    def _manifest_sizes(self, checkpoint: Checkpoint) -> tuple[dict[RankSave, int], bool]:
        """Returns the size of each rank's manifest, and whether the list of manifests exists."""
        names = self._store.list_sizes(self._names.checkpoint(checkpoint))
        ranks = {name: rank for name in names if (rank := rank_of(name)) is not None}
        sizes = {RankSave(checkpoint.generation, checkpoint.step, rank): names[name] for name, rank in ranks.items()}
        return sizes, persistent_records.MANIFEST_LIST_NAME in names

    def _publish_manifest(self, manifest: RankManifest) -> None:
        save, text = manifest.save, manifest.to_json().encode()
        path = self._names.manifest(save)
        is_new = self._store.create(path, text)
        self._uncommitted.discard(save)
        if is_new:
            return
        committed = self._committed_manifest(save)
        if committed is not None and not committed.has_same_bytes_as(manifest):
            raise _save_exists_error(committed, _describe_bytes(manifest))
        try:
            self.read_manifest(save)
        except Corrupt:
            self._store.put(path, text)  # every copy is damaged, so none shows that it is another save
            self._store.make_durable(self._names.checkpoint(save.checkpoint))
            self._uncommitted.discard(save)

    def _publish_checkpoint(self, manifest: RankManifest) -> None:
        """Writes the records of a checkpoint once every rank's manifest exists."""
        if len(self.list_committed(manifest.save.checkpoint)) >= manifest.world_size:
            self._record_complete(manifest.save.checkpoint, manifest.world_size)

    def _read_manifests(self, checkpoints: Sequence[Checkpoint]) -> tuple[tuple[RankManifest, ...], tuple[str, ...]]:
        """Returns the manifests that can be read, sorted by save, and the errors of the damaged ones."""
        splits = read_in_threads(self.split_cached_manifests, checkpoints)
        results = read_in_threads(self._manifest_or_error, [save for _, unread in splits for save in unread])
        manifests = [manifest for valid, _ in splits for manifest in valid]
        manifests += [result for result in results if isinstance(result, RankManifest)]
        errors = tuple(str(result) for result in results if isinstance(result, Corrupt))
        return tuple(sorted(manifests, key=lambda m: m.save)), errors

    def _manifest_or_error(self, save: RankSave) -> RankManifest | Corrupt | None:
        """Reads a manifest, or returns its error; None if it is not written yet or its writer died."""
        try:
            return self.read_manifest(save)
        except ChunkMissing:
            return None
        except Corrupt as damaged:
            return damaged


def _describe_bytes(manifest: RankManifest) -> str:
    """Describes a save's bytes, so that users can compare it with another one of its name."""
    return f"one saved by {manifest.incarnation} (digests {manifest.digests_digest}, values {manifest.values_digest})"


def _save_exists_error(committed: RankManifest, other: str) -> SaveExists:
    return SaveExists(
        f"{committed.save} is already in the persistent tier with other bytes: {_describe_bytes(committed)} is not changed, and"
        f" {other} is rejected"
    )


# ---- opening a tier by its URI ---------------------------------------------------------------------------------------
# Opens the persistent tier that the settings specify; used by uploads, restores and tools.


def open_persistent(
    settings: PersistentSettings, job: str, *, read_only: bool = False, create_root: bool = False
) -> ObjectStoreTier:
    """Opens a job's persistent tier by its URI, `file:///folder` or `s3://bucket/prefix`; sends no request yet.

    Args:
        settings: URI, endpoint and credentials.
        job: The job's folder.
        read_only: The tier is that of the source job, in which nothing is written.
        begin: Create the folder if it is missing. A process does that once when it starts: a folder that is missing later
            is on a lost disk, and a new, empty folder would hide its checkpoints.
    """
    return ObjectStoreTier(open_store(settings, create_root=create_root), job, read_only)


def open_store(settings: PersistentSettings, *, create_root: bool = False) -> ObjectStore:
    """Opens the store that contains all jobs' objects; `begin` as in `open_persistent`."""
    parts = urlsplit(settings.uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return DirectoryStore(Path(unquote(parts.path)), create_root)
    if parts.scheme == "s3" and parts.netloc:
        from surefoot.tiers.s3 import S3Store  # imported only when needed, as botocore takes half a second

        return S3Store(settings, parts.netloc, unquote(parts.path))
    raise ConfigurationError(
        f"checkpoint.persistent.uri is {settings.uri!r}: file:///folder (absolute) and s3://bucket/prefix are allowed"
    )
