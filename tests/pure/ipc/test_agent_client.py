"""What a rank says of PyTorch's flight recorder, from dumps as torch 2.15 writes them."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.ipc import agent_client
from surefoot.ipc.agent_client import MAX_GROUPS, current_calls, describe_collectives
from surefoot.protocol.hangs import Collective

NOW = 1000.0


def entry(
    number: int,
    state: str = "scheduled",
    retired: bool = False,
    group: tuple[str, ...] = ("0", "default_pg"),
    **more: Any,
) -> dict[str, Any]:
    return {
        "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "profiling_name": "gloo:all_reduce", "state": state,
        "retired": retired, "process_group": list(group), "input_sizes": [[4, 2]], "input_dtypes": ["Float"],
        "time_created_ns": int((NOW - 12.0) * 1e9), **more,
    }  # fmt: skip


def told(*entries: dict[str, Any], backend: str = "gloo") -> list[str]:
    return [f"{one.state} {one}" for one, _ in current_calls(3, backend, entries, NOW)]


def test_of_each_group_the_first_unfinished_is_told_else_the_last() -> None:
    assert told(entry(1, retired=True), entry(2), entry(3)) == ["scheduled all_reduce #2 of default_pg (Float[4, 2])"]
    assert told(entry(1, retired=True), entry(2, retired=True)) == [
        "finished all_reduce #2 of default_pg (Float[4, 2])"
    ]
    two = told(entry(7, retired=True), entry(1, group=("5", "undefined")), entry(2, group=("6", "mesh_dp")))
    assert [one.split(" (")[0] for one in two] == [
        "finished all_reduce #7 of default_pg", "scheduled all_reduce #1 of group 5", "scheduled all_reduce #2 of mesh_dp 6",
    ]  # fmt: skip


def test_nccl_says_what_is_over_and_what_has_begun_and_retires_what_timed_out() -> None:
    named = {"profiling_name": "nccl:_all_gather_base"}
    states = [
        current_calls(0, "nccl", [entry(4, state, retired, **named)], NOW)[0][0].state
        for state, retired in (("completed", True), ("started", False), ("scheduled", False), ("scheduled", True))
    ]
    assert states == ["finished", "started", "scheduled", "scheduled"]
    assert told(entry(4, **named), backend="nccl") == [
        "scheduled _all_gather_base #4 of default_pg, nccl (Float[4, 2])"
    ]


def test_sends_and_receives_stand_apart() -> None:
    pair = entry(2, is_p2p=True, p2p_seq_id=9, profiling_name="gloo:recv")
    found = current_calls(0, "gloo", [entry(2, retired=True), pair], NOW)
    assert [(one.number, one.call, one.is_pairwise, one.is_waiting) for one, _ in found] == [
        (2, "all_reduce", False, False), (9, "recv", True, True),
    ]  # fmt: skip


def test_it_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"input_sizes": [[1000, 1000]] * 500, "input_dtypes": ["Float"] * 500, "profiling_name": "gloo:" + "x" * 900}
    entries = [entry(1, True, group=(str(group), "g" * 900), **wide) for group in range(40)] + [entry(5)]  # type: ignore[arg-type]
    _recorder(monkeypatch, json.dumps({"entries": entries}))
    found = describe_collectives(0, 1)
    assert len(found.collectives) == len(found.seconds) == MAX_GROUPS
    assert any(one.is_waiting for one in found.collectives), "what it waits in comes first"
    assert max(len(str(one)) for one in found.collectives) < 400


def _recorder(monkeypatch: pytest.MonkeyPatch, text: str | Exception) -> None:
    def dump() -> str:
        if isinstance(text, Exception):
            raise text
        return text

    bindings = SimpleNamespace(_dump_fr_trace_json=dump)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=bindings)))


@pytest.mark.parametrize(
    ("dump", "why"),
    [
        ('{"entries": []}', "its flight recorder is empty"),
        ("{}", "its flight recorder is empty"),
        ("nonsense", "its flight recorder cannot be read: JSONDecodeError"),
        ('{"entries": [{}]}', "its flight recorder cannot be read: KeyError"),
        (RuntimeError("off"), "its flight recorder cannot be read: RuntimeError('off')"),
    ],
)
def test_what_cannot_be_read_is_said(dump: str | Exception, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _recorder(monkeypatch, dump)
    found = describe_collectives(0, 4)
    assert (found.request, found.collectives) == (4, ())
    assert found.reason.startswith(why)


@pytest.mark.parametrize(
    "torch", [None, SimpleNamespace(), SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=object()))]
)
def test_a_torch_without_a_recorder_is_no_error(torch: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert describe_collectives(0, 1).reason == "this PyTorch has no flight recorder"


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.sampled_from("ab"))))
def test_one_of_each_group_is_told_and_no_later_one_than_the_first_that_waits(
    made: list[tuple[int, bool, str]],
) -> None:
    entries = [entry(n, retired=over, group=(name, name)) for n, (_, over, name) in enumerate(made)]
    found = [one for one, _ in current_calls(0, "gloo", entries, NOW)]
    assert len({one.group for one in found}) == len(found) == len({name for *_, name in made})
    for one in found:
        numbers = [n for n, (_, over, name) in enumerate(made) if f"group {name}" == one.group and not over]
        assert one.number == (
            numbers[0] if numbers else max(n for n, (*_, name) in enumerate(made) if f"group {name}" == one.group)
        )
        assert isinstance(one, Collective)
    assert len(found) <= agent_client.MAX_GROUPS
