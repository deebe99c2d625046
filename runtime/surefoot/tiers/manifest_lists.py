"""Encodes the manifests of all ranks of a checkpoint as one record.

Pure. Read and written by `persistent`. Of 2,048 ranks it is one read instead of as many. It vouches for nothing by
itself: whoever reads it looks which manifests lie there and how long they are, and one that the list does not tell, or
tells otherwise, is read itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import xxhash

from surefoot.errors import ProtocolError
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.records import FORMAT, RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave

NAME = "manifests.jsonl"
LEAST_RANKS = 9
"""Of fewer ranks the manifests themselves are read as quickly."""


def text_of(manifests: Iterable[RankManifest]) -> bytes:
    """Encodes a checkpoint's manifests as one record.

    A line that names the checkpoint and the digest of what follows, then a manifest a line, by rank.
    """
    order = sorted(manifests, key=lambda m: m.save)
    lines = "\n".join(m.to_json() for m in order).encode()
    head = {
        "format": FORMAT,
        "epoch": order[0].save.epoch,
        "step": order[0].save.step,
        "world": order[0].world,
        "digest": xxhash.xxh3_64_hexdigest(lines),
    }
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + lines


def read(text: bytes, checkpoint: Checkpoint) -> dict[RankSave, RankManifest]:
    """Each manifest by its save.

    Raises:
        ProtocolError: the record is damaged, of another format or of another checkpoint.
    """
    first, _, lines = text.partition(b"\n")
    try:
        bounds.check_json("the head of a list of manifests", first, bounds.MAX_SMALL_BYTES, bounds.MAX_SMALL_VALUES)
        head = json.loads(first)
        told = (head["format"], head["epoch"], head["step"], head["digest"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError(f"the list of manifests of {checkpoint} cannot be read: {error!r}") from error
    if told != (FORMAT, checkpoint.epoch, checkpoint.step, xxhash.xxh3_64_hexdigest(lines)):
        raise ProtocolError(f"the list of manifests of {checkpoint} does not match its digest, or is of another one")
    manifests = [RankManifest.from_json(line) for line in lines.split(b"\n")]
    return {m.save: m for m in manifests if m.save.checkpoint == checkpoint}


def standing(
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
