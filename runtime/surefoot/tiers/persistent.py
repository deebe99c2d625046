"""The persistent tier: rank saves of one job as files or objects, manifests last. One `Tier` over any `ObjectStore`.

    {job}/{step}-{epoch}/rank-{N}/c0000 …, digests, values, and last manifest.json
    {job}/layouts/{digest}.json
    {job}/epochs/{E}                     who runs without a coordinator claims its epoch by creating this

There is no fence here: a save of an overtaken world is not on the lineage, so nobody reads it and retention removes it.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from surefoot.errors import ChunkMissing, ProtocolError, TierError, TierUnavailable
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.records import RankManifest
from surefoot.tiers.objects import ObjectStore

_CHECKPOINT = re.compile(r"(\d+)-(\d+)")
_RANK = re.compile(r"rank-(\d+)")
_CHUNK = re.compile(r"c(\d{4,})")
_CLAIM_TRIES = 50
_READERS = 8
"""Manifests read at once: a listing of a thousand ranks is a thousand round trips."""


class PersistentTier:
    """One job in a store."""

    name = "persistent"
    at_once = 4
    """Puts at once. One stream to a bucket is a tenth of what several are."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store = store
        self._job = job
        self._damaged: tuple[str, ...] = ()

    def put_layout(self, digest: str, text: str) -> None:
        self._store.put(self._layout(digest), text.encode())

    def put_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        self._store.put(self._part(save, _chunk(index)), data)

    def put_values(self, save: RankSave, data: bytes) -> None:
        self._store.put(self._part(save, "values"), data)

    def put_digests(self, save: RankSave, data: bytes) -> None:
        self._store.put(self._part(save, "digests"), data)

    def commit(self, manifest: RankManifest, writer_epoch: int, chunk_lengths: tuple[int, ...]) -> None:
        """`writer_epoch` is not looked at: what an old world commits here is ignored, not refused."""
        save = manifest.save
        if len(chunk_lengths) != manifest.chunks:
            raise ValueError(f"{save} has {manifest.chunks} chunks; {len(chunk_lengths)} lengths were given")
        wanted = {"digests": manifest.digests_bytes, "values": manifest.values_bytes}
        wanted |= {_chunk(index): length for index, length in enumerate(chunk_lengths)}
        found = self._store.sizes(self._folder(save))
        for part, length in wanted.items():
            if found.get(part) != length:
                raise ChunkMissing(
                    f"{save} cannot be committed: {part} has {found.get(part, 'no')} bytes, not {length}"
                )
        if f"{manifest.layout}.json" not in self._store.sizes(f"{self._job}/layouts"):
            raise ChunkMissing(f"{save} cannot be committed: its layout record {manifest.layout} is not there")
        self._store.make_durable(f"{self._job}/layouts")
        self._store.make_durable(self._folder(save))
        self._publish(manifest)

    def manifests(self) -> tuple[RankManifest, ...]:
        found, damaged = [], []
        with ThreadPoolExecutor(_READERS, thread_name_prefix="surefoot-manifests") as pool:
            saves = [save for listed in pool.map(self._saves, self.seen()) for save in listed]
            for save, (there, manifest) in zip(saves, pool.map(self._visible, saves), strict=True):
                if manifest is not None:
                    found.append(manifest)
                elif there:
                    damaged.append(f"persistent: {self._part(save, 'manifest.json')}")
        self._damaged = tuple(damaged)
        return tuple(sorted(found, key=lambda m: m.save))

    def damaged(self) -> tuple[str, ...]:
        return self._damaged

    def read_layout(self, digest: str) -> str:
        return self._store.read(self._layout(digest)).decode(errors="replace")

    def read_values(self, save: RankSave) -> bytes:
        return self._store.read(self._part(save, "values"))

    def read_digests(self, save: RankSave, offset: int, length: int) -> bytes:
        return self._exactly(self._part(save, "digests"), offset, length)

    def read_chunk(self, save: RankSave, index: int, offset: int, length: int) -> bytes | memoryview:
        return self._exactly(self._part(save, _chunk(index)), offset, length)

    def drop(self, save: RankSave, writer_epoch: int, chunks: int) -> None:
        """Manifest first, durably, then everything beside it."""
        self._store.remove(self._part(save, "manifest.json"))
        self._store.make_durable(self._folder(save))
        self._store.remove_folder(self._folder(save))

    def close(self) -> None:
        self._store.close()

    # ---- beyond `Tier` ----------------------------------------------------------------------------------------------

    def seen(self) -> tuple[Checkpoint, ...]:
        """Every checkpoint of which anything is here, complete or not."""
        matches = [_CHECKPOINT.fullmatch(name) for name in self._store.folders(self._job)]
        return tuple(sorted(Checkpoint(epoch=int(m[2]), step=int(m[1])) for m in matches if m))

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Drops all ranks of it: every manifest first, so that no part of it is taken for whole."""
        saves = self._saves(checkpoint)
        for save in saves:
            self._store.remove(self._part(save, "manifest.json"))
        for save in saves:
            self._store.make_durable(self._folder(save))
        self._store.remove_folder(self._of_checkpoint(checkpoint))

    def remove_all(self) -> None:
        """Everything of the job, whatever it is. For a job that is gone; checkpoints should be dropped first."""
        self._store.remove_folder(self._job)

    def claim_epoch(self) -> int:
        """Takes the next epoch: newer than every claim and every save here, and nobody else gets the same."""
        names = self._store.sizes(f"{self._job}/epochs")
        taken = [int(name) for name in names if name.isdecimal()] + [c.epoch for c in self.seen()]
        first = max(taken, default=0) + 1
        for epoch in range(first, first + _CLAIM_TRIES):
            if self._store.create(f"{self._job}/epochs/{epoch}", b"claimed\n"):
                return epoch
        raise TierUnavailable(
            f"epochs {first} to {first + _CLAIM_TRIES - 1} of job {self._job} were all taken meanwhile"
        )

    def record_epoch(self, epoch: int, text: str) -> None:
        """Says what the claimed epoch stands on; written once, by whoever claimed it."""
        self._store.create(f"{self._job}/epochs/{epoch}.json", text.encode())

    def recorded_epochs(self) -> dict[int, str]:
        """What the epochs of library mode stand on, by epoch; one that was claimed and never recorded is left out."""
        names = [name.removesuffix(".json") for name in self._store.sizes(f"{self._job}/epochs")]
        epochs = sorted({int(name) for name in names if name.isdecimal()})
        found = {}
        for epoch in epochs:
            try:
                found[epoch] = self._store.read(f"{self._job}/epochs/{epoch}.json").decode(errors="replace")
            except ChunkMissing:
                continue
        return found

    def kept(self, save: RankSave) -> dict[int, int]:
        """Chunks that are here; each was written in one piece, and a name always means the same bytes."""
        sizes = self._store.sizes(self._folder(save))
        return {int(m[1]): size for name, size in sizes.items() if (m := _CHUNK.fullmatch(name))}

    # ---- how --------------------------------------------------------------------------------------------------------

    def _publish(self, manifest: RankManifest) -> None:
        path, text = self._part(manifest.save, "manifest.json"), manifest.to_json().encode()
        if self._store.create(path, text):
            return
        there = self._read_manifest(manifest.save)
        if there is None:
            self._store.put(path, text)  # it was damaged, and this is the same save
            self._store.make_durable(self._folder(manifest.save))
        elif not there.same_bytes_as(manifest):
            raise TierError(f"{manifest.save} is already in the persistent tier, with other bytes; it stays as it is")

    def _visible(self, save: RankSave) -> tuple[bool, RankManifest | None]:
        """Whether a manifest is there, and it, unless it is damaged; none is while it is written, or its writer died."""
        try:
            return True, self._read_manifest(save)
        except ChunkMissing:
            return False, None

    def _read_manifest(self, save: RankSave) -> RankManifest | None:
        """None where it is damaged or describes another save."""
        try:
            manifest = RankManifest.from_json(self._store.read(self._part(save, "manifest.json")))
        except ProtocolError:
            return None
        return manifest if manifest.save == save else None

    def _exactly(self, path: str, offset: int, length: int) -> bytes:
        data = self._store.read(path, offset, length) if length else b""
        if len(data) != length:
            raise ChunkMissing(f"{path} has {len(data)} of {length} bytes from {offset}")
        return data

    def _saves(self, checkpoint: Checkpoint) -> list[RankSave]:
        names = self._store.folders(self._of_checkpoint(checkpoint))
        matches = [_RANK.fullmatch(name) for name in names]
        return sorted(RankSave(checkpoint.epoch, checkpoint.step, int(m[1])) for m in matches if m)

    def _of_checkpoint(self, checkpoint: Checkpoint) -> str:
        return f"{self._job}/{checkpoint.step}-{checkpoint.epoch}"

    def _folder(self, save: RankSave) -> str:
        return f"{self._of_checkpoint(save.checkpoint)}/rank-{save.rank}"

    def _part(self, save: RankSave, name: str) -> str:
        return f"{self._folder(save)}/{name}"

    def _layout(self, digest: str) -> str:
        return f"{self._job}/layouts/{digest}.json"


def _chunk(index: int) -> str:
    return f"c{index:04d}"
