"""Tests of `agent.trainers.exit_cause`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.agent.staging_memory import MemoryHeadroom
from surefoot.agent.trainers.exit_cause import (
    ErrorReport,
    ExitCause,
    OomCounts,
    OomKill,
    RankExit,
    consume_injected_kill,
    describe_exit,
    exceeded_limit_of,
    find_oom_kill,
    first_cause,
    is_secondary,
    read_oom_counts,
    read_report,
)

# ---- out of memory ---------------------------------------------------------------------------------------------------
# The OOM killer is named where its counters say so, with whose limit it was, and nowhere else.

FULL = MemoryHeadroom(0, 2 << 30, (2 << 30) - 4096)
NO_LIMIT = MemoryHeadroom(0, None, 0)
LINE = (
    "oom-kill:constraint={constraint},nodemask=(null),cpuset=c1,mems_allowed=0,{whose},"
    "task_memcg=/kubepods/burstable/podA/c1,task=python,pid=4711,uid=0"
)
GLOBAL = LINE.format(constraint="CONSTRAINT_NONE", whose="global_oom")
OF_NODES_SHARE = LINE.format(constraint="CONSTRAINT_MEMCG", whose="oom_memcg=/kubepods")
OF_SYSTEMDS_SHARE = LINE.format(
    constraint="CONSTRAINT_MEMCG", whose="oom_memcg=/kubepods.slice/kubepods-burstable.slice"
)
OF_POD = LINE.format(constraint="CONSTRAINT_MEMCG", whose="oom_memcg=/kubepods/burstable/podA")
OF_CONTAINER = LINE.format(constraint="CONSTRAINT_MEMCG", whose="oom_memcg=/kubepods/burstable/podA/c1")


def kill(before: int, after: int, hits: tuple[int | None, int | None] = (0, 1), **other: object) -> OomKill | None:
    return find_oom_kill(OomCounts(before, hits[0]), OomCounts(after, hits[1]), **{"headroom": FULL, **other})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"fs/cgroup/memory.events": "low 0\nhigh 0\nmax 12\noom 1\noom_kill 3\noom_group_kill 0\n"},
            OomCounts(3, 1),
        ),
        (
            {
                "fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
                "fs/cgroup/memory/memory.failcnt": "17\n",
            },
            OomCounts(3, 17),
        ),
    ],
    ids=["v2", "v1"],
)
def test_a_container_s_own_counters_are_read_before_the_machine_s(
    files: dict[str, str], expected: OomCounts, tmp_path: Path
) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 77\n")
    assert read_oom_counts(tmp_path, tmp_path) == OomCounts(77, None)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_oom_counts(tmp_path, tmp_path) == expected


def test_what_cannot_be_read_blames_nobody(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("oom_kill many\n")
    assert (
        read_oom_counts(tmp_path, tmp_path)
        == read_oom_counts(tmp_path / "none", tmp_path / "none")
        == OomCounts(0, None)
    )


@pytest.mark.parametrize(
    ("hits", "left", "kernel", "limit"),
    [
        ((0, 1), FULL, (), "limit"),
        ((5, 5), FULL, (), "node"),
        ((None, None), FULL, (), "limit"),
        ((None, None), NO_LIMIT, (), "node"),
        ((0, 9), NO_LIMIT, (), "node"),
        ((0, 1), FULL, (GLOBAL,), "node"),
        ((0, 1), FULL, (OF_NODES_SHARE,), "node"),
        ((0, 1), FULL, (OF_SYSTEMDS_SHARE,), "node"),
        ((0, 0), FULL, (OF_POD,), "limit"),
        ((0, 0), FULL, (OF_CONTAINER,), "limit"),
        ((0, 1), FULL, (GLOBAL, OF_CONTAINER), "limit"),
        ((0, 0), FULL, ("EXT4-fs error", GLOBAL, OF_CONTAINER), "node"),
        ((0, 1), FULL, ("Out of memory: Killed process 1", "python invoked oom-killer"), "limit"),
    ],
)
def test_whose_memory_it_was(
    hits: tuple[int | None, int | None], left: MemoryHeadroom, kernel: tuple[str, ...], limit: str
) -> None:
    """The kernel's own word where it names one limit; else the container's limit only if it was reached."""
    found = kill(0, 1, hits, headroom=left, kernel=kernel)
    assert found is not None
    assert found.limit == limit


def test_a_trainer_killed_by_the_oom_killer_is_told_so_with_limit_and_use() -> None:
    oom = kill(3, 4)
    assert oom is not None
    endings = [RankExit(0, None, None, oom.text), RankExit(1, -9, None, oom.text)]
    cause = first_cause(endings)
    assert (cause.local, cause.secondary) == (1, False)
    assert cause.text.startswith("killed by the kernel's OOM killer: the container's memory limit is 2.15 GB")
    assert "resources.limits.memory" in cause.text
    assert exceeded_limit_of(endings[1], oom) == "limit"


def test_the_node_s_memory_is_told_as_the_node_s() -> None:
    oom = kill(3, 4, (7, 7))
    assert oom is not None
    text = first_cause([RankExit(1, -9, None, oom.text)]).text
    assert text.startswith("killed by the kernel's OOM killer: the node's memory was used up")
    assert "limit of 2.15 GB was not reached" in text
    bare = kill(0, 1, headroom=NO_LIMIT)
    assert bare is not None
    assert "no memory limit of its own" in bare.text


CHILD = ErrorReport("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.", 1.0)


def test_one_whose_worker_process_it_ended_says_both() -> None:
    oom = kill(0, 1)
    assert oom is not None
    text = first_cause([RankExit(0, 1, CHILD, oom.text)]).text
    assert text.startswith(
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.; the kernel's OOM killer"
    )


@pytest.mark.parametrize(
    ("ending", "limit"),
    [
        (RankExit(0, -9, None), "node"),
        (RankExit(0, 1, CHILD), "node"),
        (RankExit(0, -11, None), ""),
        (RankExit(0, 1, ErrorReport("ValueError", "bad data", 1.0)), ""),
        (RankExit(0, None, None), ""),
    ],
)
def test_a_rank_that_ended_otherwise_is_not_taken_for_what_was_killed(ending: RankExit, limit: str) -> None:
    assert exceeded_limit_of(ending, OomKill("node", "")) == limit
    assert exceeded_limit_of(ending, None) == ""


def test_any_other_kill_is_only_a_kill() -> None:
    assert kill(3, 3) is None
    assert first_cause([RankExit(0, -9, None)]).text == "killed by SIGKILL"


@pytest.mark.parametrize("counters", ["memory.events", "memory.oom_control"])
def test_a_kill_that_was_made_is_told_once_and_only_where_the_group_counted_it(counters: str, tmp_path: Path) -> None:
    word, group = tmp_path / "oom-n1", tmp_path / "group"
    group.mkdir()
    (group / counters).write_text("oom_kill 0\n")
    assert consume_injected_kill(None) is None
    assert consume_injected_kill(word) is None
    word.write_text(json.dumps({"group": str(group), "stands_in": ""}))
    assert consume_injected_kill(word) is None, "it ended by something else, and the kernel's kill may still come"
    (group / counters).write_text("oom_kill 1\n")
    made = consume_injected_kill(word)
    assert made is not None
    assert (made.limit, "memory group that it was put into" in made.text) == ("limit", True)
    assert consume_injected_kill(word) is None


def test_a_kill_that_the_kernel_did_not_make_says_what_stood_in(tmp_path: Path) -> None:
    word = tmp_path / "oom-n1"
    word.write_text(json.dumps({"group": "", "stands_in": "no memory group can be made: Permission denied"}))
    made = consume_injected_kill(word)
    assert made is not None
    assert made.limit == exceeded_limit_of(RankExit(0, -9, None), made) == "limit"
    assert "SIGKILL stands in here (no memory group can be made: Permission denied)" in made.text


# ---- exit cause ------------------------------------------------------------------------------------------------------
# Which of several errors came first, and which are only echoes.

ECHO = ErrorReport("RuntimeError", "[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:4711", 2.0)
OWN = ErrorReport("ValueError", "the data is bad", 3.0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", "[../gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.1.1]:5143"),
        ("RuntimeError", "[enforce fail at pair.cc] Read error [10.0.0.2]:4242: Connection reset by peer"),
        ("RuntimeError", "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"),
        ("torch.distributed.DistBackendError", "NCCL error: remote process exited or there was a network error"),
        ("torch.distributed.DistNetworkError", "The client socket has timed out after 300000ms"),
        ("torch.distributed.DistStoreError", "Timed out after 61 seconds waiting for clients. 1/2 clients joined."),
        ("RuntimeError", "Connection reset by peer"),
        ("RuntimeError", "Broken pipe"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("RuntimeError", "Application timeout caused pair closure"),
    ],
)
def test_errors_of_a_lost_peer_are_echoes(kind: str, message: str) -> None:
    assert is_secondary(ErrorReport(kind, message, 0.0))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ValueError", "connection closed by peer"),
        ("RuntimeError", "CUDA out of memory. Tried to allocate 2 GiB"),
        ("torch.OutOfMemoryError", "CUDA out of memory"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        ("ModuleNotFoundError", "No module named 'gloo'"),
        ("KeyError", "'store'"),
        ("torch.distributed.DistBackendError", "NCCL error: ncclInvalidUsage: duplicate GPU detected"),
        ("SystemExit", "reset"),
    ],
)
def test_a_program_s_own_errors_are_not(kind: str, message: str) -> None:
    assert not is_secondary(ErrorReport(kind, message, 0.0))


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        ([RankExit(0, -9, None)], ExitCause(0, "killed by SIGKILL", False)),
        ([RankExit(0, 3, None)], ExitCause(0, "exit code 3", False)),
        ([RankExit(0, 1, ECHO)], ExitCause(0, f"RuntimeError: {ECHO.message}", True)),
        ([RankExit(0, 1, ECHO), RankExit(1, None, OWN)], ExitCause(1, "ValueError: the data is bad", False)),
        ([RankExit(0, 1, ECHO), RankExit(1, -9, None)], ExitCause(1, "killed by SIGKILL", False)),
        ([RankExit(0, 1, OWN), RankExit(1, -9, None)], ExitCause(0, "ValueError: the data is bad", False)),
        (
            [RankExit(0, 0, None), RankExit(1, None, None), RankExit(2, 1, ECHO)],
            ExitCause(2, f"RuntimeError: {ECHO.message}", True),
        ),
    ],
    ids=["signal", "code", "echo", "own after echo", "death beside echo", "own beside death", "finished do not count"],
)
def test_the_first_cause_is_no_echo_if_there_is_another(endings: list[RankExit], expected: ExitCause) -> None:
    assert first_cause(endings) == expected


def test_a_cause_is_one_line() -> None:
    assert describe_exit(1, ErrorReport("ValueError", "one\ntwo", 0.0)) == "ValueError: one"
    assert describe_exit(1, ErrorReport("SystemExit", "no data folder", 0.0)) == "exited: no data folder"
    assert describe_exit(-77, None) == "killed by signal 77"


def test_both_kinds_of_error_files_are_read() -> None:
    own = json.dumps({"kind": "ValueError", "message": "x", "at": 5.0, "trace": "t"})
    assert read_report(own) == ErrorReport("ValueError", "x", 5.0)
    torch_s = json.dumps(
        {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "t", "timestamp": "5"}}}
    )
    assert read_report(torch_s) == ErrorReport("ValueError", "x", 5.0)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"message": 3}', '{"message": {"message": 1}}'])
def test_a_file_that_is_no_report_is_none(text: str) -> None:
    assert read_report(text) is None
