"""Which of several errors came first, and which are only echoes."""

import json

import pytest

from surefoot.agent.trainers.exit_cause import (
    Cause,
    ErrorReport,
    RankExit,
    describe,
    first_cause,
    is_secondary,
    read_report,
)

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
        ([RankExit(0, -9, None)], Cause(0, "killed by SIGKILL", False)),
        ([RankExit(0, 3, None)], Cause(0, "exit code 3", False)),
        ([RankExit(0, 1, ECHO)], Cause(0, f"RuntimeError: {ECHO.message}", True)),
        ([RankExit(0, 1, ECHO), RankExit(1, None, OWN)], Cause(1, "ValueError: the data is bad", False)),
        ([RankExit(0, 1, ECHO), RankExit(1, -9, None)], Cause(1, "killed by SIGKILL", False)),
        ([RankExit(0, 1, OWN), RankExit(1, -9, None)], Cause(0, "ValueError: the data is bad", False)),
        (
            [RankExit(0, 0, None), RankExit(1, None, None), RankExit(2, 1, ECHO)],
            Cause(2, f"RuntimeError: {ECHO.message}", True),
        ),
    ],
    ids=["signal", "code", "echo", "own after echo", "death beside echo", "own beside death", "finished do not count"],
)
def test_the_first_cause_is_no_echo_if_there_is_another(endings: list[RankExit], expected: Cause) -> None:
    assert first_cause(endings) == expected


def test_a_cause_is_one_line() -> None:
    assert describe(1, ErrorReport("ValueError", "one\ntwo", 0.0)) == "ValueError: one"
    assert describe(1, ErrorReport("SystemExit", "no data folder", 0.0)) == "exited: no data folder"
    assert describe(-77, None) == "killed by signal 77"


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
