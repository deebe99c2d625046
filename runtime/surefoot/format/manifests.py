"""Builds rank manifests of saves, and checks digest tables and values that were read against them."""

from __future__ import annotations

import json
import re

from surefoot.errors import Corrupt
from surefoot.format.layouts import DIGEST_BYTES, Stream, digest
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import RankSave

_OBJECTS = re.compile(rb'\{"format":\d+,"values":\{("loss_anomaly":true,)?"objects":')
"""Start of values that contain the objects' digests; the rest, which may be long, need not be parsed."""
_OBJECTS_BYTES = 1 << 20


def objects_of(values: bytes) -> tuple[tuple[str, str], ...]:
    """Reads the objects' digests from a rank's values, for its manifest.

    Empty for values of older writers.
    """
    head = _OBJECTS.match(values)
    if head is None:
        return ()
    objects_json = values[head.end() : head.end() + _OBJECTS_BYTES].decode(errors="replace")
    digests_by_object, _ = json.JSONDecoder().raw_decode(objects_json)
    return tuple(sorted((str(name), str(value)) for name, value in digests_by_object.items()))


def is_suspect(values: bytes) -> bool:
    """Returns whether a rank's values record a loss anomaly."""
    head = _OBJECTS.match(values)
    return head is not None and head[1] is not None


def build_manifest(
    save: RankSave, world_size: int, incarnation: str, stream: Stream, tables: tuple[bytes, bytes], saved_at: float
) -> RankManifest:
    """Builds a manifest; `tables` are the digest table and the values."""
    digests, values = tables
    if len(digests) != stream.blocks * DIGEST_BYTES:
        raise ValueError(
            f"{save} has {stream.blocks} blocks and {len(digests) // DIGEST_BYTES} digests: hash every block"
        )
    return RankManifest(
        save=save,
        world_size=world_size,
        incarnation=incarnation,
        layout=stream.digest,
        stream_bytes=stream.layout.stream_bytes,
        chunks=len(stream.layout.chunk_starts),
        digests_digest=digest(digests),
        digests_bytes=len(digests),
        values_digest=digest(values),
        values_bytes=len(values),
        saved_at=saved_at,
        objects=objects_of(values),
        suspect=is_suspect(values),
    )


def check_digests(manifest: RankManifest, table: bytes, where: str) -> None:
    """Raises Corrupt, naming the copy, if a digest table is not the manifest's."""
    _check(manifest, "digest table", (table, manifest.digests_bytes, manifest.digests_digest), where)


def check_values(manifest: RankManifest, values: bytes, where: str) -> None:
    """Raises Corrupt, naming the copy, if values are not the manifest's."""
    _check(manifest, "values", (values, manifest.values_bytes, manifest.values_digest), where)


def _check(manifest: RankManifest, part: str, data_size_digest: tuple[bytes, int, str], where: str) -> None:
    data, size, expected_digest = data_size_digest
    if len(data) != size or digest(data) != expected_digest:
        raise Corrupt(f"the {part} of {manifest.save} at {where} does not match its manifest; another copy is needed")
