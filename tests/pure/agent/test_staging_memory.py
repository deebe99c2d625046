"""Tests of `agent.staging_memory`."""

from __future__ import annotations

import os
import ssl
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fakes.fake_coordinator import assignment
from support.servers.certificates import authority
from surefoot.agent import coordinator_client as identity
from surefoot.agent import staging_memory as saves
from surefoot.agent.__main__ import missing_folders
from surefoot.agent.staging_memory import (
    MemoryHeadroom,
    SaveTracker,
    StagingDemand,
    StagingDemandByRank,
    missing_bytes,
    read_headroom,
    require_headroom,
    with_denial,
    with_grant,
    with_released,
    with_request,
    with_staged,
)
from surefoot.agent.trainers.supervisor import TrainerPlace, common_environment, trainer_environment
from surefoot.errors import ConfigurationError, ProtocolError
from surefoot.ipc.trainer_messages import MAX_FRAME_BYTES, FrameDecoder, add_frame
from surefoot.launcher.import_observer import RANK_VARIABLES
from surefoot.launcher.job_program import LaunchProgram, parse_forkable_program, with_own_interpreter
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.text import format_bytes
from surefoot.settings import agent_settings

# ---- agent parts -----------------------------------------------------------------------------------------------------
# The agent's small parts: commands, environments, framing, imports, the book of saves.

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
    assert parse_forkable_program(command, OWN) == program


def test_the_same_binary_under_another_prefix_is_another_interpreter(tmp_path: Path) -> None:
    other = tmp_path / "venv" / "bin"
    other.mkdir(parents=True)
    (other.parent / "pyvenv.cfg").write_text("")
    (other / "python").symlink_to(os.path.realpath(sys.executable))
    assert parse_forkable_program([str(other / "python"), "train.py"], OWN) is None


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
        "SUREFOOT_GENERATION": "7",
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
    data = b"".join(add_frame(m) for m in messages)
    unframer = FrameDecoder()
    out = [m for i in range(0, len(data), cut) for m in unframer.add_bytes(data[i : i + cut])]
    assert out == messages


def test_a_frame_of_absurd_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="the other end is not a trainer or agent of this version"):
        FrameDecoder().add_bytes((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_every_variable_of_a_rank_is_unknown_to_the_fork_server() -> None:
    base = {"SUREFOOT_TOKEN": "secret", "MINE": "1"}
    ranks = trainer_environment(base, TrainerPlace(ASSIGN, 1, "[::1]:99", "/run/a.sock", "/run/e.json"))
    assert ranks.keys() - common_environment(base).keys() == RANK_VARIABLES


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
    assert len(book.copies_by_save) < 20
    assert len(book.staged_not_lost) < 40
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
    told = book.closed_steps(4, len(ranks), upto)
    assert {step for step in range(1, 200) if told.is_missing(step)} <= missed - {upto + 1}
    assert all(told.is_missing(step) for step in missed if upto - 30 < step <= upto)
    assert book.closed_steps(5, len(ranks), 0) == ClosedSteps(), "nothing is said of an epoch before it has begun"


def test_a_worker_that_never_staged_anything_misses_every_step_behind_it() -> None:
    told = SaveTracker().closed_steps(1, 1, 500)
    assert all(map(told.is_missing, (1, 10, 500)))
    assert not told.is_missing(501)


# ---- container -------------------------------------------------------------------------------------------------------
# What an agent makes of its container: where it may write, what memory is left, how it proves itself.

ROOT = Path("/run/surefoot")
SETTINGS = agent_settings(
    {
        "SUREFOOT_JOB_UID": "u",
        "SUREFOOT_WORKER_INDEX": "0",
        "SUREFOOT_WORKER_ATTEMPT": "0",
        "SUREFOOT_NODE": "n",
        "SUREFOOT_COORDINATOR_URL": "wss://coordinator:8443/v1/agents",
        "SUREFOOT_RUN_FOLDER": "/run/surefoot",
        "SUREFOOT_METRICS_PORT": "9464",
    }
)


def test_what_the_image_allows_stays_as_it_is() -> None:
    assert missing_folders({"HOME": "/root"}, ROOT, lambda _: True, has_user_name=True) == {}


def test_a_read_only_root_finds_everything_in_the_run_folder() -> None:
    added = missing_folders({"HOME": "/"}, ROOT, lambda _: False, has_user_name=False)
    assert added == {
        "HOME": "/run/surefoot/home",
        "TMPDIR": "/run/surefoot/tmp",
        "TORCHINDUCTOR_CACHE_DIR": "/run/surefoot/cache/torchinductor",
        "TRITON_CACHE_DIR": "/run/surefoot/cache/triton",
        "USER": "surefoot",
    }


def test_the_template_s_own_choice_is_kept() -> None:
    own = {"HOME": "/mine", "TMPDIR": "/scratch", "TRITON_CACHE_DIR": "/scratch/t", "LOGNAME": "me"}
    added = missing_folders(own, ROOT, lambda path: path == "/mine", has_user_name=False)
    assert added == {}


def groups(folder: Path, limit: str, used: int, reclaimable: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\n")
    return folder


def machine(folder: Path, kilobytes: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal: 99 kB\nMemAvailable: {kilobytes} kB\n")
    return path


def test_room_is_what_the_limit_leaves_without_what_can_be_given_back(tmp_path: Path) -> None:
    found = read_headroom(groups(tmp_path, "1000", 700, 200), machine(tmp_path, 10))
    assert found == MemoryHeadroom(free_bytes=500, limit_bytes=1000, used_bytes=500)


def test_without_a_limit_the_machine_s_room_counts(tmp_path: Path) -> None:
    assert read_headroom(groups(tmp_path, "max", 700, 0), machine(tmp_path, 2)) == MemoryHeadroom(
        free_bytes=2048, limit_bytes=None, used_bytes=0
    )
    assert read_headroom(tmp_path / "none", tmp_path / "none") is None


def test_memory_that_does_not_fit_is_refused_with_the_numbers() -> None:
    require_headroom(StagingDemand(2, (250,)), MemoryHeadroom(500, 1000, 500))
    require_headroom(StagingDemand(2, (10**15,)), None)
    refused = (
        r"2 slots of 1\.20 GB for 4 ranks, 9\.60 GB of staging memory, do not fit: the container's memory limit is"
    )
    refused += r" 8\.00 GB and 3\.10 GB are in use; raise resources\.limits\.memory of the trainer by 4\.70 GB or more"
    with pytest.raises(OSError, match=refused):
        require_headroom(
            StagingDemand(2, (1_200_000_000,) * 4), MemoryHeadroom(4_900_000_000, 8_000_000_000, 3_100_000_000)
        )
    with pytest.raises(
        OSError, match=r"2 slots of up to 6 bytes for 2 ranks, 18 bytes.*the node has 10 bytes of memory left"
    ):
        require_headroom(StagingDemand(2, (6, 3)), MemoryHeadroom(10, None, 0))
    with pytest.raises(OSError, match="the node has 10 bytes of memory left"):
        require_headroom(StagingDemand(2, (6,)), MemoryHeadroom(10, 1000, 0))


def test_memory_that_is_given_back_first_counts_as_free() -> None:
    found = MemoryHeadroom(100, 1000, 900)
    with pytest.raises(OSError, match="do not fit"):
        require_headroom(StagingDemand(2, (150,)), found)
    require_headroom(StagingDemand(2, (150,)), with_released(found, 200))
    assert with_released(None, 200) is None


def test_a_token_s_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "token"
    settings = replace(SETTINGS, token="fixed", token_file=str(path))
    with pytest.raises(identity.TokenUnavailable, match=r"SUREFOOT_TOKEN_FILE.*projected"):
        identity.read_token(settings)
    path.write_text("")
    with pytest.raises(identity.TokenUnavailable, match="empty"):
        identity.read_token(settings)
    for text in ("first", "second"):
        path.write_text(f"{text}\n")
        assert identity.read_token(settings) == text
    assert identity.read_token(replace(settings, token_file="")) == "fixed"


def test_the_authority_must_be_one_and_the_line_encrypted() -> None:
    assert identity.tls_context(SETTINGS) is None
    with pytest.raises(ConfigurationError, match="PEM"):
        identity.tls_context(replace(SETTINGS, coordinator_ca="nonsense"))
    with pytest.raises(ConfigurationError, match="only wss://"):
        identity.tls_context(replace(SETTINGS, coordinator_ca="x", coordinator_url="ws://coordinator/v1/agents"))


def test_nothing_but_the_given_authority_is_trusted() -> None:
    context = identity.tls_context(replace(SETTINGS, coordinator_ca=authority("surefoot test").pem))
    assert context is not None
    assert len(context.get_ca_certs()) == 1
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_the_metrics_port_is_read() -> None:
    assert SETTINGS.metrics_port == 9464


# ---- demand ----------------------------------------------------------------------------------------------------------
# What a worker's ranks need for their saves, and how such numbers are written.


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_600, "1.00 MB"),
        (8 << 30, "8.59 GB"),
        (14_400_000_000, "14.4 GB"),
        (5 * 10**18, "5000 PB"),
    ],
)
def test_bytes_are_written_with_three_digits(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_a_worker_s_save_is_known_once_every_rank_has_asked() -> None:
    book = with_request(StagingDemandByRank(), 0, 100, ranks=2)
    assert book.save_bytes == 0
    book = with_request(book, 1, 300, ranks=2)
    assert book.save_bytes == 400
    assert with_staged(book, 1, 250).save_bytes == 350


def test_a_rank_that_has_not_asked_yet_is_expected_to_want_what_the_others_do() -> None:
    book = with_request(StagingDemandByRank(), 1, 100, ranks=3)
    assert missing_bytes(book, {}) == {0: 100, 1: 100, 2: 100}
    assert missing_bytes(book, {0: 100}) == {1: 100, 2: 100}
    book = with_request(with_request(book, 0, 40, 3), 2, 60, 3)
    assert missing_bytes(book, {}) == {0: 40, 1: 100, 2: 60}
    assert missing_bytes(book, {0: 39, 1: 100, 2: 70}) == {0: 40}


def test_a_refusal_lasts_until_that_rank_has_memory() -> None:
    book = with_denial(with_denial(StagingDemandByRank(), 2, "too much"), 1, "too much too")
    assert book.rejection_reason == "too much too"
    assert with_grant(book, 1).rejection_reason == "too much"
    assert with_grant(with_grant(book, 1), 2).rejection_reason == ""
