"""The agent's small parts: commands, environments, framing, imports, the book of saves."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fakes.fake_coordinator import assignment
from surefoot.agent import staging_memory as saves
from surefoot.agent.staging_memory import SaveTracker
from surefoot.agent.trainers.supervisor import TrainerPlace, trainer_environment
from surefoot.errors import ProtocolError
from surefoot.ipc.trainer_messages import LARGEST, Unframer, framed
from surefoot.launcher.fork_server import top_level_imports
from surefoot.launcher.job_program import LaunchProgram, forkable, with_own_interpreter
from surefoot.protocol.checkpoints.save_state import Settled
from surefoot.protocol.identities import Checkpoint, RankSave

OWN = with_own_interpreter({"PATH": "/usr/bin"})


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["python", "train.py", "--x", "1"], LaunchProgram(("--x", "1"), script="train.py")),
        ([sys.executable, "-u", "train.py"], LaunchProgram((), script="train.py")),
        (["python", "-m", "job.train", "-v"], LaunchProgram(("-v",), module="job.train")),
        (["python", "-u", "-m", "job"], LaunchProgram((), module="job")),
        (["python", "-X", "dev", "train.py"], None),
        (["python", "-c", "print(1)"], None),
        (["python", "-m"], None),
        (["python"], None),
        (["torchrun", "train.py"], None),
        (["/no/such/python", "train.py"], None),
        (["sh", "-c", "python train.py"], None),
        ([], None),
    ],
)
def test_only_a_plain_program_of_this_interpreter_is_forked(command: list[str], program: LaunchProgram | None) -> None:
    assert forkable(command, OWN) == program


def test_the_same_binary_under_another_prefix_is_another_interpreter(tmp_path: Path) -> None:
    other = tmp_path / "venv" / "bin"
    other.mkdir(parents=True)
    (other.parent / "pyvenv.cfg").write_text("")
    (other / "python").symlink_to(os.path.realpath(sys.executable))
    assert forkable([str(other / "python"), "train.py"], OWN) is None


def test_the_own_interpreter_comes_first_and_once() -> None:
    assert with_own_interpreter(OWN) == OWN
    assert OWN["PATH"].split(os.pathsep) == [os.path.dirname(sys.executable), "/usr/bin"]


ASSIGN = replace(assignment(7, 2, 3, local_ranks=2), restarts=1, lineage=(), store="[::1]:99", replicas=2)


def test_a_trainer_finds_what_it_finds_under_torchrun() -> None:
    base = {"SUREFOOT_TOKEN": "secret", "SUREFOOT_COORDINATOR_URL": "ws://x", "SUREFOOT_JOB_UID": "u", "MINE": "1"}
    found = trainer_environment(base, TrainerPlace(ASSIGN, 1, "[::1]:99", "/run/a.sock", "/run/e.json"))
    wanted = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "99",
        "TORCHELASTIC_RESTART_COUNT": "7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "u",
        "SUREFOOT_AGENT_SOCKET": "/run/a.sock",
        "SUREFOOT_EPOCH": "7",
        "OMP_NUM_THREADS": "1",
        "MINE": "1",
    }
    assert wanted.items() <= found.items()
    assert "secret" not in found.values(), "a trainer has no business with the coordinator"
    assert "SUREFOOT_COORDINATOR_URL" not in found
    assert (
        trainer_environment({"OMP_NUM_THREADS": "4"}, TrainerPlace(ASSIGN, 0, "h:1", "", ""))["OMP_NUM_THREADS"] == "4"
    )


@given(st.lists(st.binary(max_size=50), max_size=10), st.integers(1, 7))
def test_frames_come_out_as_they_went_in_however_they_are_cut(messages: list[bytes], cut: int) -> None:
    data = b"".join(framed(m) for m in messages)
    unframer = Unframer()
    out = [m for i in range(0, len(data), cut) for m in unframer.feed(data[i : i + cut])]
    assert out == messages


def test_a_frame_of_absurd_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not spoken here"):
        Unframer().feed((LARGEST + 1).to_bytes(4, "little"))


def test_only_unconditional_imports_at_the_top_are_preloaded() -> None:
    source = """
from __future__ import annotations
import a, b.c as d
from e.f import g, h
from . import sibling
if True:
    import never
def run():
    import never
"""
    assert top_level_imports(source) == ("a", "b.c", "e.f:g", "e.f:h")


def test_a_save_is_pending_until_every_rank_is_done_and_saved_once_all_are_written() -> None:
    first, second = RankSave(3, 10, 0), RankSave(3, 10, 1)
    book = saves.track_staged(saves.track_staged(SaveTracker(), first), second)
    assert book.pending() == (Checkpoint(3, 10),)
    book = saves.track_freed(saves.track_written(saves.track_written(book, first, 1), first, 2), first)
    assert book.pending() == (Checkpoint(3, 10),)
    assert book.saved(3, local_ranks=2) == (None, 0)
    book = saves.track_freed(saves.track_written(book, second, 1), second)
    assert book.pending() == ()
    assert book.saved(3, local_ranks=2) == (Checkpoint(3, 10), 1)
    assert book.saved(4, local_ranks=2) == (None, 0)


def test_a_save_that_was_given_up_is_neither_pending_nor_saved() -> None:
    save = RankSave(3, 10, 0)
    book = saves.track_freed(saves.track_staged(SaveTracker(), save), save)
    assert (book.pending(), book.saved(3, 1)) == ((), (None, 0))


def test_the_book_forgets_what_is_long_overtaken() -> None:
    book = SaveTracker()
    for step in range(1000):
        save = RankSave(1, step, 0)
        book = saves.track_freed(saves.track_written(saves.track_staged(book, save), save, 2), save)
    assert len(book.committed) < 20
    assert len(book.handed) < 40
    assert book.saved(1, 1) == (Checkpoint(1, 999), 2)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["staged", "lost", "missed"])), max_size=90), st.booleans()
)
def test_what_is_said_to_be_missed_is_on_no_holder_and_everything_recent_that_is_missed_is_said(
    saves_of: list[tuple[int, str]], two_ranks: bool
) -> None:
    ranks = (0, 1) if two_ranks else (0,)
    book, missed = SaveTracker(), set()
    for step, (rank, fate) in enumerate(saves_of, 1):
        for one in ranks:
            save = RankSave(4, step, one)
            if fate == "missed" and one == rank % len(ranks):
                missed.add(step)
                continue
            book = saves.track_staged(book, save)
            if fate == "lost" and one == rank % len(ranks):
                book = saves.track_lost(book, save)
                missed.add(step)
    upto = len(saves_of) - 1
    told = book.settled(4, len(ranks), upto)
    assert {step for step in range(1, 200) if told.misses(step)} <= missed - {upto + 1}
    assert all(told.misses(step) for step in missed if upto - 30 < step <= upto)
    assert book.settled(5, len(ranks), 0) == Settled(), "nothing is said of an epoch before it has begun"


def test_a_worker_that_never_staged_anything_misses_every_step_behind_it() -> None:
    told = SaveTracker().settled(1, 1, 500)
    assert all(map(told.misses, (1, 10, 500)))
    assert not told.misses(501)
