"""What former versions sent and stored is still read: files of their very bytes, one value of every kind.

`formats/wire_vN.jsonl` were written by the last commit whose newest version was N, and are never written again: a new
version gets a file of its own (`sample` of every message type, encoded). A file that does not fit any more means that
running agents, statuses or checkpoints of the version before can no longer be read.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from support.samples import sample
from surefoot.protocol import messages, wire
from surefoot.protocol.checkpoints.records import Layout, RankManifest, TensorLayout
from surefoot.protocol.checkpoints.save_state import Settled
from surefoot.protocol.codec import Codec
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.progress import Progress, RankPace
from surefoot_operator.api.status import JobStatus, StoredCheckpoints, TimeSpent
from surefoot_operator.api.status_json import SCHEMA_VERSION, status_from_json, status_to_json
from surefoot_operator.platforms.local.run_folder import (
    Deletion,
    NodeRecord,
    WorkerRecord,
    WorkerState,
    from_json,
    to_json,
)

ADDED: dict[str, Any] = {
    "loss": None,
    "time_spent": TimeSpent(),
    "sick_nodes": (),
    "stragglers": (),
    "replaced_stragglers": (),
    "last_good": None,
    "rollback": None,
    "rollbacks": 0,
    "skipped": (),
    "checkpoints": StoredCheckpoints(),
    "failed_starts_counted": 0,
    "ending": None,
}
"""Fields of a status that came without a new version: files of before lack them, and former operators leave them out."""

FORMATS = Path(__file__).with_name("formats")
TYPES = {cls.__name__: cls for cls in (*get_args(messages.FromAgent), *get_args(messages.ToAgent))}
LINES = [
    (version, line)
    for version in range(wire.OLDEST, wire.VERSION + 1)
    for line in (FORMATS / f"wire_v{version}.jsonl").read_bytes().splitlines()
]


def _heartbeat(body: dict[str, Any]) -> messages.Heartbeat:
    """What of it stood beside each other before a rank's progress became one value, and stands so still."""
    told = {
        **{f.name: body[f.name] for f in fields(Progress) if f.name in body},
        "settled": Settled(**{**body["settled"], "steps": tuple(body["settled"]["steps"])}),
        "ended": tuple(body["ended"]),
        "paces": tuple(RankPace(*one[:5], tuple(map(tuple, one[5]))) for one in body.get("paces", ())),
    }
    return messages.Heartbeat(
        body["epoch"], body["stopped"], body["warm"], Progress(**told),
        pending=tuple(Checkpoint(**one) for one in body["pending"]), saved=Checkpoint(**body["saved"]),
        copies=body["copies"], leaving=body["leaving"],
    )  # fmt: skip


def _names(version: int) -> set[str]:
    return {name for name, cls in TYPES.items() if getattr(cls, "SINCE", 1) <= version}


@pytest.mark.parametrize(
    ("version", "line"), LINES, ids=lambda given: ascii(given)[2:42] if isinstance(given, bytes) else None
)
def test_a_message_of_a_former_version_is_read_as_it_was_meant_and_written_the_same(version: int, line: bytes) -> None:
    body = json.loads(line)
    meant = _heartbeat(body) if body["type"] == "Heartbeat" else sample(TYPES[body["type"]], version)
    assert wire.decode_versioned(line) == (meant, version)
    assert wire.decode_versioned(line.decode()) == (meant, version)
    assert json.loads(wire.encode(meant, version)) == json.loads(line)


@pytest.mark.parametrize("version", range(wire.OLDEST, wire.VERSION + 1))
def test_every_kind_of_message_of_a_version_is_among_the_samples(version: int) -> None:
    assert {json.loads(line)["type"] for of, line in LINES if of == version} == _names(version)


def test_numbers_that_json_does_not_have_are_read_as_the_former_version_writes_them() -> None:
    text = '{"v":2,"type":"Heartbeat","epoch":1,"stopped":1,"warm":true,"step":1,"loss":%s,"step_seconds":1e999}'
    for written in ("NaN", "Infinity", "-Infinity"):
        beat = wire.decode(text % written)
        assert isinstance(beat, messages.Heartbeat)
        assert str(beat.progress.loss) == str(float(written))
        assert beat.progress.step_seconds == float("inf")
        assert str(json.loads(wire.encode(beat))["loss"]) == str(float(written))


def test_a_rank_manifest_of_a_former_version_is_read_and_written_the_same() -> None:
    for line in (FORMATS / "manifests.jsonl").read_bytes().splitlines():
        manifest = RankManifest.from_json(line)
        assert manifest.to_json().encode() == line
    assert manifest == sample(RankManifest)


def test_a_layout_of_a_former_version_is_read_and_written_the_same() -> None:
    text = (FORMATS / "layout.json").read_bytes()
    assert Layout.from_json(text) == sample(Layout)
    assert sample(Layout).to_json().encode() == text
    assert [tensor.name for tensor in Layout.from_json(text).tensors if isinstance(tensor, TensorLayout)]


@pytest.mark.parametrize("version", [1, SCHEMA_VERSION])
def test_a_status_of_each_version_is_read_the_same_and_written_as_the_newest(version: int) -> None:
    body = json.loads((FORMATS / f"status_v{version}.json").read_bytes())
    assert body.get("schemaVersion", 1) == version
    status = status_from_json(body)
    whole = sample(JobStatus, later=frozenset({"replaced_seconds", "cost_share", "server"}))
    assert status == replace(whole, **ADDED)
    assert status.extra == whole.extra
    newest = json.loads((FORMATS / f"status_v{SCHEMA_VERSION}.json").read_bytes())
    assert json.loads(json.dumps(status_to_json(status))) == newest


@pytest.mark.parametrize("cls", [NodeRecord, WorkerRecord, WorkerState, Deletion], ids=lambda cls: cls.__name__)
def test_records_of_a_run_folder_of_a_former_version_are_read_and_written_the_same(cls: type[Any]) -> None:
    body = json.loads((FORMATS / "records.json").read_bytes())[cls.__name__]
    assert from_json(cls, body) == sample(cls)
    assert json.loads(json.dumps(to_json(sample(cls)))) == body
    with pytest.raises(ValueError, match=rf"{cls.__name__}.uid is 5|{cls.__name__}.name is 5"):
        from_json(cls, {**body, "uid" if "uid" in body else "name": 5})


def test_the_samples_would_show_another_format() -> None:
    line = next(line for version, line in LINES if version == wire.VERSION and b'"Heartbeat"' in line)
    other = Codec((messages.Stopped,), wire.VERSION, wire.OLDEST)
    with pytest.raises(Exception, match="no message"):
        other.decode(line)
    renamed = line.replace(b'"step_seconds"', b'"stepSeconds"')
    with pytest.raises(Exception, match="stepSeconds"):
        wire.decode(renamed)
