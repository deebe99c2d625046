"""Names each record of a job in an object store.

Pure. Two places that make up a name by themselves come apart one day, and what one of them wrote nobody finds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.tiers import manifest_lists
from surefoot.tiers.chunk_parts import part_name

_CHECKPOINT = re.compile(r"(\d+)-(\d+)")
_MANIFEST = re.compile(r"rank-(\d+)\.json")
_PART = re.compile(r"p(\d{4,})")


def checkpoint_of(folder: str) -> Checkpoint | None:
    """The checkpoint whose folder bears that name; None for any other folder."""
    found = _CHECKPOINT.fullmatch(folder)
    return Checkpoint(epoch=int(found[2]), step=int(found[1])) if found else None


def rank_of(manifest: str) -> int | None:
    """The rank whose manifest bears that name; None for any other name."""
    found = _MANIFEST.fullmatch(manifest)
    return int(found[1]) if found else None


def part_of(name: str) -> int | None:
    """Decodes a part's number; None for any other name."""
    found = _PART.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one job's objects; `job` is its folder."""

    job: str

    def checkpoint(self, checkpoint: Checkpoint) -> str:
        return f"{self.job}/{checkpoint.step}-{checkpoint.epoch}"

    def manifest_list(self, checkpoint: Checkpoint) -> str:
        return f"{self.checkpoint(checkpoint)}/{manifest_lists.NAME}"

    def folder(self, save: RankSave) -> str:
        return f"{self.checkpoint(save.checkpoint)}/rank-{save.rank}"

    def manifest(self, save: RankSave) -> str:
        return f"{self.folder(save)}.json"

    def named(self, save: RankSave, name: str) -> str:
        return f"{self.folder(save)}/{name}"

    def part(self, save: RankSave, part: int) -> str:
        return self.named(save, part_name(part))

    @property
    def layouts(self) -> str:
        return f"{self.job}/layouts"

    def layout(self, digest: str) -> str:
        return f"{self.layouts}/{digest}.json"

    def newest(self) -> str:
        return f"{self.job}/newest.json"
