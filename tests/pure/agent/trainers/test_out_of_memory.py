"""The OOM killer is named where its counters say so, and nowhere else."""

from pathlib import Path

import pytest

from surefoot.agent.memory.headroom import MemoryHeadroom
from surefoot.agent.trainers.exit_cause import ErrorReport, RankExit, first_cause
from surefoot.agent.trainers.out_of_memory import describe_oom_kill, kills

FULL = MemoryHeadroom(0, 2 << 30, (2 << 30) - 4096)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fs/cgroup/memory.events", "low 0\nhigh 0\nmax 12\noom 1\noom_kill 3\noom_group_kill 0\n"),
        ("fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    ],
)
def test_a_container_s_own_counter_is_read_before_the_machine_s(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 77\n")
    assert kills(tmp_path, tmp_path) == 77
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert kills(tmp_path, tmp_path) == 3


def test_what_cannot_be_read_blames_nobody(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("oom_kill many\n")
    assert kills(tmp_path, tmp_path) == 0
    assert kills(tmp_path / "none", tmp_path / "none") == 0


def test_a_trainer_killed_by_the_oom_killer_is_told_so_with_limit_and_use() -> None:
    oom = describe_oom_kill(3, 4, FULL)
    cause = first_cause([RankExit(0, None, None, oom), RankExit(1, -9, None, oom)])
    assert (cause.local, cause.secondary) == (1, False)
    assert cause.text.startswith("killed by the kernel's OOM killer: the container's memory limit is 2.15 GB")
    assert "resources.limits.memory" in cause.text


def test_one_whose_worker_process_it_ended_says_both() -> None:
    report = ErrorReport("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.", 1.0)
    text = first_cause([RankExit(0, 1, report, describe_oom_kill(0, 1, FULL))]).text
    assert text.startswith(
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.; the kernel's OOM killer"
    )


def test_any_other_kill_is_only_a_kill() -> None:
    assert describe_oom_kill(3, 3, FULL) == ""
    assert first_cause([RankExit(0, -9, None, describe_oom_kill(3, 3, FULL))]).text == "killed by SIGKILL"


def test_without_a_limit_it_was_the_machine() -> None:
    assert "this machine's memory was used up" in describe_oom_kill(0, 1, MemoryHeadroom(0, None, 0))
