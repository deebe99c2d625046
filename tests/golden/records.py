"""Records what is sent and stored: messages, statuses, S3 objects, Redis keys, run-folder files."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import tempfile
import typing
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np

from golden import sources
from golden.schemas import schema, text
from golden.sources import JobStatus, RankSave, trainer_messages, wire
from simulator.rules import ALL
from simulator.world import REAL, Simulation
from support.builders import running
from support.samples import sample
from support.saves import arrays, put_save, split, stream_of
from support.stored import stored_document

SEEDS = (1, 3, 5)
"""Simulated jobs whose last status is a copy."""
RANKS = 9
"""Ranks of the sample save: the fewest for which all manifests are also written to one object."""
JOB = "job-uid"


def copies() -> dict[str, str]:
    agent_types, trainer_types = (
        tuple(sorted(get_args(typing.get_type_hints(encode)["message"]), key=lambda cls: cls.__name__))
        for encode in (wire.encode, trainer_messages.encode)
    )
    return {
        "agent_messages.jsonl": text(_agent_messages(agent_types)),
        "agent_messages_schema.txt": schema(agent_types),
        "trainer_messages.jsonl": text(_trainer_messages(trainer_types)),
        "trainer_messages_schema.txt": schema(trainer_types),
        "statuses.json": json.dumps(_statuses(), indent=1, ensure_ascii=False) + "\n",
        "status_schema.txt": schema([JobStatus]),
        "stored_objects.txt": text(_stored_objects()),
        "stored_keys.txt": text(_stored_keys()),
        "run_folder.txt": text(_run_folder()),
    }


def _agent_messages(classes: tuple[type[Any], ...]) -> Iterator[str]:
    """Yields each type's sample, and checks that decoding gives it back."""
    for message in map(sample, classes):
        yield wire.encode(message)
        _require_equal(wire.decode(wire.encode(message)), message)


def _trainer_messages(classes: tuple[type[Any], ...]) -> Iterator[str]:
    for message in map(sample, classes):
        yield trainer_messages.encode(message).decode()
        _require_equal(trainer_messages.decode(trainer_messages.encode(message)), message)


def _require_equal(read: object, written: object) -> None:
    if read != written:
        raise AssertionError(f"{written} was written, and is read as {read}")


@functools.cache
def statuses() -> dict[str, JobStatus]:
    """The status of a running job, and those that simulated jobs ended with."""
    by_name = {"running": running().status}
    for seed in SEEDS:
        simulation = Simulation(seed, None, ALL, REAL)
        simulation.run()
        by_name[f"end of seed {seed}"] = simulation.store.status
    return by_name


def _statuses() -> dict[str, Any]:
    bodies: dict[str, Any] = {}
    for name, status in {"every field": sample(JobStatus), **statuses()}.items():
        bodies[name] = sources.status_to_json(status)
        read = sources.status_from_json(json.loads(json.dumps(bodies[name])))
        _require_equal(sources.status_to_json(read), bodies[name])
    snapshot = running()
    shown = sources.api_writes.add_printer_columns(
        snapshot.status, snapshot.workers, stored_document(), snapshot.now_seconds
    )
    bodies["running, with columns"] = shown
    stamp = sources.precondition_of(snapshot.status)
    bodies["patch"] = sources.api_writes.build_status_patch(stored_document(shown), {}, stamp)
    return bodies


def _stored_objects() -> Iterator[str]:
    """Every object of a job that saved one checkpoint of nine ranks, claimed a generation and recorded its lineage."""
    values = sources.encode_values(_values())
    _require_equal(sources.encode_values(sources.decode_values(values)), values)
    with tempfile.TemporaryDirectory() as folder:
        tier = sources.open_persistent(sources.PersistentSettings(uri=f"file://{folder}/store"), JOB, create_root=True)
        tier.generations.claim(2)
        tier.generations.claim_with_ticket(7, "ticket")
        tier.generations.write_lineage_record(3, '{"parent":null}')
        tier.generations.write_heartbeat(3, "a beat")
        for rank in range(RANKS):
            stream, data = _sample_stream(rank)
            put_save(tier, RankSave(3, 40, rank), RANKS, stream, data, values if rank == 0 else b"{}")
        written: dict[bytes, Path] = {}
        for path in sorted(path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file()):
            data = (Path(folder) / path).read_bytes()
            first = written.setdefault(data, path)
            yield f"{path}: " + (_content(data) if first == path else f"as {first}")
    for record in (sample(sources.RankManifest), sample(sources.Layout)):
        yield f"{type(record).__name__}: {record.to_json()}"
        _require_equal(type(record).from_json(record.to_json()), record)


def _sample_stream(rank: int) -> Any:
    tensors = arrays(40, {"model.weight": (18, 6), "model.bias": (9,), "optimizer.step": ()})
    return stream_of(tensors, {name: split(array.shape, RANKS, rank) for name, array in tensors.items()}, 1)


def _values() -> dict[str, Any]:
    """A value of each kind that state dictionaries hold."""
    return {
        "numbers": [1, -(2**70), 2**2000, 0.1, -0.0, math.inf, -math.inf, math.nan, 1 + 2j, True, None],
        "texts": ["täxt", b"\x00\xff", "~"],
        "containers": [(1, (2,)), {3}, {"a": 1}, {5: "five", (6, 7): None, "~": 8}, OrderedDict(b=1, a=2)],
        "numpy": [np.float32(1.5), np.arange(6, dtype=np.int16).reshape(2, 3)],
    }


def _content(data: bytes) -> str:
    """Text in full, its further lines indented; anything else as length and digest."""
    try:
        return data.decode().strip("\n").replace("\n", "\n  ")
    except UnicodeDecodeError:
        return f"{len(data)} bytes {hashlib.sha256(data).hexdigest()[:32]}"


def _stored_keys() -> Iterator[str]:
    """The keys of a sample save, the fields and values beside them, and each script by its digest."""
    keys, save = sources.scripts, RankSave(3, 40, 5)
    whole = (keys.job_prefix, keys.fence_key, keys.instance_key, keys.index_key, keys.watermark_key, keys.absent_key)
    yield from sorted(
        (*(key(JOB) for key in whole), keys.layout_key(JOB, "0123abcd"), *keys.list_data_keys(JOB, save, 3))
    )
    yield from (keys.PREFAULT_PREFIX, keys.PREFAULTING_KEY, f"field of the index: {keys.index_field(save)}")
    stored = [script for script in vars(sources.scripts).values() if isinstance(script, sources.Script)]
    yield from sorted({f"script {script.name}: {script.sha}" for script in stored})


def _run_folder() -> Iterator[str]:
    for cls in (sources.DeletionRequest, sources.NodeRecord, sources.WorkerRecord, sources.WorkerState):
        body = sources.record_to_json(sample(cls))
        _require_equal(sources.record_from_json(cls, body), sample(cls))
        yield f"{cls.__name__}: {json.dumps(body, ensure_ascii=False)}"
    folder = sources.RunFolder(Path("run"))
    members = [name for name, member in vars(type(folder)).items() if isinstance(member, property)]
    yield from sorted(str(path) for name in members if isinstance(path := getattr(folder, name), Path))
