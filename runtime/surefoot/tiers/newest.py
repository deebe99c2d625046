"""Encodes the record of the newest checkpoint in the persistent tier.

Pure. Read and written by `persistent`. Checkpoints are ordered by epoch, then step: what a newer epoch saves is newer
whatever its step, since it went on from where the older one was left.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable

from surefoot.errors import OutOfBounds
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.records import FORMAT, RankManifest
from surefoot.protocol.identities import Checkpoint

log = logging.getLogger(__name__)


def read(text: bytes | None) -> tuple[Checkpoint, int] | None:
    """Decodes the record: checkpoint and world size.

    None where it is absent, damaged or of another format.
    """
    record = "newest.json"
    try:
        bounds.check_json(record, text or b"", bounds.MAX_SMALL_BYTES, bounds.MAX_SMALL_VALUES)
        body = json.loads(text or b"")
        if body["format"] != FORMAT:
            return None
        checkpoint, world = Checkpoint(epoch=int(body["epoch"]), step=int(body["step"])), int(body["world"])
        bounds.check(record, "world", world, bounds.MAX_RANKS, 1)
        for field, value in (("epoch", checkpoint.epoch), ("step", checkpoint.step)):
            bounds.check(record, field, value, bounds.MAX_COUNT)
        return checkpoint, world
    except OutOfBounds as error:
        log.warning("%s; the tier is listed instead", error)
        return None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def grown(before: bytes | None, checkpoint: Checkpoint, world: int) -> bytes | None:
    """Encodes the record once `checkpoint` is there too.

    None if it stays as it is.
    """
    told = read(before)
    if told is not None and told[0] >= checkpoint:
        return None
    body = {"format": FORMAT, "epoch": checkpoint.epoch, "step": checkpoint.step, "world": world}
    return json.dumps(body, separators=(",", ":")).encode()


def of(manifests: Iterable[RankManifest]) -> tuple[RankManifest, ...]:
    """The manifests of the newest checkpoint with one of every rank."""
    by_checkpoint: dict[Checkpoint, list[RankManifest]] = defaultdict(list)
    for manifest in manifests:
        by_checkpoint[manifest.save.checkpoint].append(manifest)
    whole = [checkpoint for checkpoint, found in by_checkpoint.items() if len(found) == found[0].world]
    return tuple(by_checkpoint[max(whole)]) if whole else ()
