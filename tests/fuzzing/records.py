"""`python -m fuzzing.records --records 3000 --seed 7`: records of Redis, buckets and agents with hostile numbers.

Each is decoded and used as the operator and the runtime use it, or refused by name; within the memory and time of
`LIMIT_BYTES` and `LIMIT_SECONDS`, which the kernel holds it to."""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any
from zlib import crc32

from surefoot.checkpointer.library_mode.epoch_records import parse_records
from surefoot.errors import ProtocolError, StateMismatch
from surefoot.format.layouts import Stream
from surefoot.format.values import decode_values
from surefoot.memory_server import scripts
from surefoot.protocol import wire
from surefoot.protocol.checkpoints.completeness import (
    LineageEntry,
    TierReading,
    complete_checkpoints,
    count_copies,
    describe_uncovered_tensor,
    layout_sets_to_check,
)
from surefoot.protocol.checkpoints.records import Layout, Piece, RankManifest, TensorLayout
from surefoot.protocol.identities import MemoryServerInstance, RankSave
from surefoot.protocol.messages import Heartbeat, PersistentPage, TrainerFailure
from surefoot.tiers import persistent_records

LIMIT_BYTES = 1 << 30
"""Beyond what the interpreter has when it begins."""
LIMIT_SECONDS = 5.0
"""Of one record."""

MANIFEST = RankManifest(RankSave(1, 5, 0), 1, "i" * 12, "a" * 16, 64, 1, "d" * 16, 8, "v" * 16, 2, 1.5, (("o", "x"),))
LAYOUT = Layout((TensorLayout("w", "float32", (4, 4), (Piece((0, 0), (4, 4), (4, 4), 0),)),), (0,), 64)
NUMBERS = (-1, 0, 2**20 + 1, 10**9, 2**53 + 1, 2**63, 10**30, 10**400, 1e308, -1e308, float("nan"), float("inf"))
OTHERS = (None, True, "", "9" * 50, "x" * 100_000, [], {}, [0] * 10_000, [[]] * 10_000, ["ab"] * 10_000)


def spoiled(draw: random.Random, body: Any) -> Any:
    """The same JSON with one value, wherever it is, made hostile."""
    if isinstance(body, (dict, list)) and body and draw.random() < 0.9:
        key = draw.choice(list(body)) if isinstance(body, dict) else draw.randrange(len(body))
        fresh: Any = dict(body) if isinstance(body, dict) else list(body)
        fresh[key] = spoiled(draw, body[key])
        return fresh
    return draw.choice(NUMBERS if draw.random() < 0.7 else OTHERS)


def text_of(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"), sort_keys=True)


def manifest(draw: random.Random) -> str:
    body = json.loads(MANIFEST.to_json())
    del body["crc32"]
    for _ in range(draw.randint(1, 3)):
        body = spoiled(draw, body)
    return text_of({**body, "crc32": crc32(text_of(body).encode())}) if isinstance(body, dict) else text_of(body)


def use_manifest(draw: random.Random) -> None:
    read = RankManifest.from_json(manifest(draw))
    holder = MemoryServerInstance("n", "i")
    reading = TierReading({holder: (read,)}, (read,))
    layout_sets_to_check(reading)
    complete_checkpoints(reading, (LineageEntry(read.save.generation, None, 1),), read.save.generation, frozenset(), {})
    count_copies(read.save.checkpoint, reading, {})
    scripts.list_data_keys("job", read.save, read.chunks)
    persistent_records.select_newest_manifests([read])


def use_layout(draw: random.Random) -> None:
    text = text_of(spoiled(draw, json.loads(LAYOUT.to_json())))
    read = Layout.from_json(text)
    describe_uncovered_tensor([read])
    read.chunk_lengths()
    try:
        Stream(read)
    except (ValueError, KeyError):
        pass  # a tile or a type that cannot be: `read_layout` is asked by who reads chunks


def use_newest(draw: random.Random) -> None:
    persistent_records.read_newest_record(
        text_of(spoiled(draw, {"format": 1, "generation": 1, "step": 5, "world_size": 7})).encode()
    )


def use_manifest_list(draw: random.Random) -> None:
    first, _, rest = persistent_records.manifest_list_text([MANIFEST]).partition(b"\n")
    persistent_records.read_manifest_list(
        text_of(spoiled(draw, json.loads(first))).encode() + b"\n" + rest, MANIFEST.save.checkpoint
    )


def use_epoch_record(draw: random.Random) -> None:
    body = spoiled(draw, {"generation": 1, "parent": [1, 5], "size": 2, "writer": {"program": "p", "began_at": 1.0}})
    parse_records({1: (text_of(body),)})


def use_message(draw: random.Random) -> None:
    message = draw.choice(
        [
            PersistentPage(1, (MANIFEST.to_json(),), {"a": "{}"}),
            Heartbeat(1, 1, True),
            TrainerFailure(1, 0, 1, "c", False, 5),
        ]
    )
    body = json.loads(wire.encode(message))
    head = {"v": body.pop("v"), "type": body.pop("type")}
    fresh = spoiled(draw, body)
    wire.decode(json.dumps({**head, **fresh} if isinstance(fresh, dict) else fresh, separators=(",", ":")))


def use_values(draw: random.Random) -> None:
    of = draw.choice(["1e99999999", "1/0", "9" * 5000, "fffffffffffffffffff", 10**9, [], ["0", "f" * 30, "1"], None])
    tag = draw.choice(["Fraction", "Decimal", "int", "float", "range", "numpy", "slice", "deque", "timedelta", "UUID"])
    value: Any = {"~": tag, "of": of, "dtype": "<f8", "shape": draw.choice([None, [10**12], [-1]]), "most": 10**9}
    text = text_of({"format": 2, "values": {"a": value}})
    if draw.random() < 0.1:
        text = '{"format":2,"values":{"a":' + "[" * 200_000 + "]" * 200_000 + "}}"
    decode_values(text.encode())


USES: tuple[Callable[[random.Random], None], ...] = (
    use_manifest, use_layout, use_newest, use_manifest_list, use_epoch_record, use_message, use_values,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzzing.records", description=__doc__)
    parser.add_argument("--records", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.disable()
    refused = 0
    for number in range(asked.records):
        use = USES[number % len(USES)]
        begun = time.process_time()
        try:
            use(random.Random(f"{asked.seed}/{number}"))
        except (ProtocolError, StateMismatch):
            refused += 1
        spent = time.process_time() - begun
        if spent > LIMIT_SECONDS:
            print(f"{use.__name__} of record {number} took {spent:.1f} s")
            return 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{asked.records} records from seed {asked.seed}: {refused} refused by name, 0 tracebacks, peak {peak} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
