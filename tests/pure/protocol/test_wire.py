"""Tests of `protocol.wire`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.errors import ProtocolError
from surefoot.ipc import trainer_messages as line
from surefoot.protocol import messages, wire
from surefoot.protocol.checkpoints.records import Layout, RankManifest
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import Assign, Barrier, Heartbeat, TrainersStopped
from surefoot.protocol.progress import Progress, RankActivity, add_activities, merge_rank_progress, subtract_activity
from surefoot.protocol.text import escape_control_characters
from surefoot.protocol.wire import decode, encode
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.status_json import status_from_json

# ---- messages --------------------------------------------------------------------------------------------------------
# The agents' line on the wire: every message round-trips, whatever is foreign is refused by name.

EVERY_TYPE = (*get_args(messages.FromAgent), *get_args(messages.ToAgent))


@given(st.one_of([st.from_type(t) for t in EVERY_TYPE]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_message_comes_back_as_it_was_sent_but_for_what_a_terminal_obeys(message: messages.Message) -> None:
    read = json.loads(encode(decode(encode(message))))
    assert read == written_out(json.loads(encode(message)))


@pytest.mark.parametrize("control", [chr(c) for c in (*range(0x20), 0x7F) if chr(c) not in "\t\n"])
def test_each_control_character_of_a_text_is_written_out(control: str) -> None:
    notice = decode(encode(messages.Notice("", f"a{control}b")))
    assert isinstance(notice, messages.Notice)
    assert notice.text == f"a\\x{ord(control):02x}b"


def written_out(value: object) -> object:
    if isinstance(value, str):
        return escape_control_characters(value)
    if isinstance(value, list):
        return [written_out(item) for item in value]
    return (
        {escape_control_characters(key): written_out(item) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def test_a_heartbeat_with_checkpoints_keeps_their_types() -> None:
    sent = Heartbeat(generation=2, stopped=2, is_warm=True, pending=(Checkpoint(2, 5),), saved=Checkpoint(1, 4),
                     progress=Progress(7, closed_steps=ClosedSteps(6, (5,), 3)))  # fmt: skip
    assert decode(encode(sent)) == sent


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "JSON list"),
        ('{"type":"TrainersStopped","generation":1}', "version None"),
        ('{"v":true,"type":"TrainersStopped","generation":1}', "version True"),
        ('{"v":0,"type":"TrainersStopped","generation":1}', "upgrade the older one"),
        (f'{{"v":{wire.VERSION + 1},"type":"TrainersStopped","generation":1}}', "upgrade the older one"),
        ('{"v":1,"type":"Stapped","generation":1}', "'Stapped'"),
        ('{"v":1,"type":["TrainersStopped"],"generation":1}', "no message"),
        ('{"v":1,"type":"TrainersStopped","generation":1,"colour":"red"}', "'colour'"),
        ('{"v":1,"type":"TrainersStopped"}', "generation"),
        ('{"v":1,"type":"TrainersStopped","generation":"1"}', "TrainersStopped.generation"),
        ('{"v":1,"type":"TrainersStopped","generation":true}', "TrainersStopped.generation"),
        ('{"v":1,"type":"Barrier","generation":1,"step":2,"phase":"maybe"}', "Barrier.phase"),
        (
            '{"v":1,"type":"DeleteReply","request":1,"error":{"a":1}}',
            "DeleteReply.error",
        ),
    ],
)
def test_what_is_foreign_is_refused_and_named(text: str, named: str) -> None:
    with pytest.raises(ProtocolError, match=named.replace("[", "\\[")):
        decode(text)


_BEAT = '{"v":1,"type":"Heartbeat","generation":1,"stopped":1,"is_warm":true,"step":1,'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (_BEAT + f'"loss":{10**400}}}', "Heartbeat.loss is 1000"),
        (_BEAT + '"loss":"2.5"}', "Heartbeat.loss is '2.5', which is not of type float"),
        (_BEAT + '"saved":5}', "Heartbeat.saved is 5, which is not of type mapping"),
        (_BEAT + '"saved":' + "[" * 900 + "]" * 900 + "}", "Heartbeat.saved is [[[[[[[...]]]]]]]"),
        (_BEAT + '"saved":{"generation":1,"step":1,"x":2}}', "Heartbeat.saved has no field 'x' in version 1"),
        (_BEAT + '"pending":7}', "Heartbeat.pending is 7, not a list"),
        (
            _BEAT + '"closed_steps":{"closed_up_to":1,"handed_over":[1,"a"]}}',
            "Heartbeat.closed_steps.handed_over[1] is 'a', which is not of type int",
        ),
        (_BEAT + '"a` - at `$.epoch":5}', "Heartbeat"),
        ('{"v":1,"type":"PersistentPage","request":1,"layouts":{"a":"b","c":5}}', "PersistentPage.layouts['c'] is 5"),
        ('{"v":1,"type":"Assign","generation":1,"lineage":[[1,null]]}', "Assign.lineage[0] has 2 entries, not 3"),
        (
            '{"v":1,"type":"Assign","generation":1,"lineage":[[1,{"generation":1},2]]}',
            "Assign.lineage[0][1] is incomplete: step",
        ),
        (
            '{"v":1,"type":"TrainerFailure","generation":1,"kind":7}',
            "TrainerFailure.kind is 7, not one of 'failed', 'hang'",
        ),
        ('{"v":1,"type":"Notice","reason":"' + "\udcff" + '","text":1}', "Notice.text is 1"),
        ('{"v":1,"type":"TrainersStopped","generation":' + "9" * 5000 + "}", "not JSON"),
        (b"\xff\xfe{", "not JSON"),
    ],
    ids=lambda given: ascii(given)[:60],
)
def test_a_refusal_says_where_what_stands_and_what_may_stand(text: str | bytes, sentence: str) -> None:
    with pytest.raises(ProtocolError) as refusal:
        decode(text)
    assert sentence in str(refusal.value)


def test_whole_numbers_of_any_size_and_repeated_fields_are_read_as_before() -> None:
    assert decode(_BEAT + f'"interval_exponent":{10**30}}}').progress.interval_exponent == 10**30  # type: ignore[union-attr]
    assert decode('{"v":1,"type":"TrainersStopped","generation":1,"generation":2}') == TrainersStopped(2)
    assert decode('{"type":"TrainersStopped","generation":3,"v":1}') == TrainersStopped(3)


def test_a_member_of_a_list_is_named_by_its_place() -> None:
    body = json.loads(encode(Heartbeat(generation=1, stopped=1, is_warm=True, pending=(Checkpoint(1, 1),))))
    body["pending"][0]["step"] = "one"
    with pytest.raises(ProtocolError, match=r"Heartbeat\.pending\[0\]\.step"):
        decode(json.dumps(body))


def test_numbers_that_json_does_not_have_are_read_as_python_writes_them() -> None:
    text = _BEAT + '"loss":%s,"step_seconds":1e999}'
    for written in ("NaN", "Infinity", "-Infinity"):
        beat = decode(text % written)
        assert isinstance(beat, Heartbeat)
        assert str(beat.progress.loss) == str(float(written))
        assert beat.progress.step_seconds == float("inf")
        assert str(json.loads(encode(beat))["loss"]) == str(float(written))


def test_plain_dictionaries_and_tuples_of_tuples_survive() -> None:
    assign = Assign(
        generation=3,
        world_size=2,
        first_rank=0,
        local_ranks=1,
        group_rank=0,
        group_size=2,
        restarts=1,
        parent=Checkpoint(2, 10),
        lineage=((1, None, 3), (2, Checkpoint(1, 4), 2)),
        token="t",
        hosts_store=True,
        store=None,
        servers=(),
        targets=(),
        replicas=2,
    )
    assert decode(encode(assign)) == assign
    listing = messages.PersistentPage(request=1, layouts={"d": "{}"})
    assert decode(encode(listing)) == listing
    assert decode(encode(Barrier(1, 2, "bound"))) == Barrier(1, 2, "bound")
    assert decode(encode(TrainersStopped(4)).encode()) == TrainersStopped(4)


# ---- decoders say little ---------------------------------------------------------------------------------------------
# No strict decoder repeats more than a glance of what it refuses: errors go to logs, events and statuses.

LONG = "abcdefghij" * 5_000
MOST = 450
"""The sentence, a path of our own names, and at most 100 characters each of a name and a value."""


def _messages(text: str) -> object:
    return decode(text)


def _trainer(text: str) -> object:
    return line.decode(text.encode())


@pytest.mark.gate_only
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
        {"v": 2, "type": "Heartbeat", "generation": LONG},
        {"v": 2, "type": "Heartbeat", "generation": [[LONG] * 50] * 50},
        {"v": 2, "type": "Heartbeat", "generation": {LONG: {LONG: LONG}}},
        {"v": 2, "type": "Heartbeat", "pending": LONG},
        {"v": 2, "type": "Listing", "request": 1, "layouts": {LONG: 5}},
        {"v": 2, "type": "Barrier", "generation": 1, "step": 1, "phase": LONG},
        {"v": 1, "type": "Attach", "rank": LONG},
        {"v": 1, "type": "Stepped", "rank": LONG},
        {"format": LONG},
        {"format": 3, "tensors": LONG, "chunk_starts": [LONG], "stream_bytes": LONG},
        {"format": 1, "save": LONG, "generation": LONG},
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
    for status in (
        {"phase": value},
        {"membership": value},
        {"step": value if not isinstance(value, int) else str(value)},
    ):
        with pytest.raises(Exception) as refusal:
            status_from_json(status)
        assert len(str(refusal.value)) < MOST


# ---- rank pace -------------------------------------------------------------------------------------------------------
# Totals of looks become windows, and what is of another count is none.

BEFORE = RankActivity(1, 100, observations=50, busy_observations=20, samples=80, lines=((7, 0, 4), (9, 5, 16)))
LATER = RankActivity(
    1, 100, observations=100, busy_observations=60, samples=112, lines=((0, 0, 3), (7, 0, 4), (9, 5, 50))
)


def test_two_totals_are_a_window_and_windows_add_up_again() -> None:
    window = subtract_activity(BEFORE, LATER)
    assert window == RankActivity(1, 100, 50, 40, 32, ((0, 0, 3), (9, 5, 34)))
    assert window.share == 0.8
    assert add_activities(BEFORE, window) == LATER
    assert RankActivity(0, 0, 0, 0, 0).share == 0.0


def test_what_is_of_another_count_is_no_window() -> None:
    others = {"rank": 2, "work": 7, "observations": 40, "busy_observations": 10, "samples": 60}
    for name, value in others.items():
        assert subtract_activity(BEFORE, LATER._replace(**{name: value})) is None, name
    assert subtract_activity(BEFORE, LATER._replace(busy_observations=90)) is None, "more at work than looked at"


def test_a_worker_tells_all_its_ranks_in_a_hundred_and_thirty_bytes_each() -> None:
    lines = tuple((line, 1502, 12_345) for line in (104, 105, 107, 110, 112))
    ranks = [RankActivity(rank, 7_000_000_000, 123_456, 98_765, 9_999_999, lines) for rank in (1000, 1001)]
    told = merge_rank_progress([Progress(5, activities=(pace,)) for pace in ranks])
    assert told.activities == tuple(ranks)
    text = wire.encode(messages.Heartbeat(1, 0, True, told))
    assert len(text) - len(wire.encode(messages.Heartbeat(1, 0, True, Progress(5)))) <= 130 * len(ranks)
    assert wire.decode(text).progress.activities == tuple(ranks)
