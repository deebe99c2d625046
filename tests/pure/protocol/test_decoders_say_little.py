"""No strict decoder repeats more than a glance of what it refuses: errors go to logs, events and statuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from surefoot.ipc import trainer_messages as line
from surefoot.protocol.checkpoints.records import Layout, RankManifest
from surefoot.protocol.wire import decode
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.status_json import status_from_json

LONG = "abcdefghij" * 5_000
MOST = 450
"""The sentence, a path of our own names, and at most 100 characters each of a name and a value."""


def _messages(text: str) -> object:
    return decode(text)


def _trainer(text: str) -> object:
    return line.decode(text.encode())


@pytest.mark.parametrize(
    "read", [_messages, _trainer, Layout.from_json, RankManifest.from_json], ids=lambda f: f.__qualname__
)
@pytest.mark.parametrize(
    "body",
    [
        {"v": LONG, "type": "Heartbeat"},
        {"v": 1, "type": LONG},
        {"v": 2, "type": [LONG]},
        {"v": 2, "type": "Heartbeat", LONG: 1},
        {"v": 2, "type": "Heartbeat", "epoch": LONG},
        {"v": 2, "type": "Heartbeat", "epoch": [[LONG] * 50] * 50},
        {"v": 2, "type": "Heartbeat", "epoch": {LONG: {LONG: LONG}}},
        {"v": 2, "type": "Heartbeat", "pending": LONG},
        {"v": 2, "type": "Listing", "request": 1, "layouts": {LONG: 5}},
        {"v": 2, "type": "Barrier", "generation": 1, "step": 1, "phase": LONG},
        {"v": 1, "type": "Attach", "rank": LONG},
        {"v": 1, "type": "Stepped", "rank": LONG},
        {"format": LONG},
        {"format": 3, "tensors": LONG, "chunk_starts": [LONG], "stream_bytes": LONG},
        {"format": 1, "save": LONG, "epoch": LONG},
        [LONG],
        LONG,
    ],
    ids=lambda body: json.dumps(body)[:40],
)
def test_an_error_of_a_decoder_is_short(read: Callable[[str], object], body: Any) -> None:
    with pytest.raises(Exception) as refusal:
        read(json.dumps(body))
    assert len(str(refusal.value)) < MOST


@pytest.mark.parametrize("value", [LONG, [LONG], {LONG: LONG}, 10**4000], ids=["text", "list", "mapping", "number"])
def test_an_error_of_the_api_is_short(value: Any) -> None:
    for document in (
        value,
        {"apiVersion": value},
        {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": value},
        {
            "apiVersion": "surefoot.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "a"},
            "spec": {"replicas": value},
        },
        {
            "apiVersion": "surefoot.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "a"},
            "spec": {LONG: value},
        },
    ):
        with pytest.raises(Exception) as refusal:
            parse_job(document)
        assert len(str(refusal.value)) < 900  # the names of all fields stand in it
    for status in ({"phase": value}, {"world": value}, {"step": value if not isinstance(value, int) else str(value)}):
        with pytest.raises(Exception) as refusal:
            status_from_json(status)
        assert len(str(refusal.value)) < MOST
