"""Without an agent: a program whose last step is not saved ends with an error, and two in one folder hear of each other."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.checkpointer.library_mode import other_writers
from surefoot.checkpointer.library_mode.epoch_records import Patience
from surefoot.checkpointer.library_mode.other_writers import WriterMark, WriterWatch, wait_for_former_writers
from surefoot.errors import LastStepNotSaved, OtherWriter, TierFull
from surefoot.flush import engine
from surefoot.flush.engine import FlushOptions
from surefoot.flush.state_machine import RetryLimits
from surefoot.tiers.object_store import DirectoryStore
from surefoot.tiers.persistent import ObjectStoreTier

PROGRAM = Path(__file__).parent.parent / "support" / "programs" / "library_trainer.py"


class Program:
    """One run of `library_trainer`."""

    def __init__(self, folder: Path, log: Path, steps: int, pace: float = 0.0, end: str = "close", **env: str) -> None:
        command = [sys.executable, str(PROGRAM), str(folder), str(steps), "2", str(pace), "9", end]
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **env})

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        until(lambda: text in self.text() or self.process.poll() is not None, seconds)
        assert text in self.text(), self.text()

    def ended(self, seconds: float = 150.0) -> int:
        return self.process.wait(seconds)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(steps: int, folder: Path = tmp_path / "job", **how: Any) -> Program:
        started.append(Program(folder, tmp_path / f"log-{len(started)}", steps, **how))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves that no folder takes are given up soon."""
    soon = FlushOptions(limits=RetryLimits(no_target_timeout_seconds=3.0))
    monkeypatch.setattr(engine, "FlushOptions", lambda: soon)


@pytest.mark.parametrize("end", ["with", "exit"])
def test_a_script_whose_last_step_is_not_saved_ends_with_an_error_that_names_both_steps(
    end: str, program: Callable[..., Program], tmp_path: Path
) -> None:
    run = program(60, pace=0.05, end=end)
    run.wait_for("step 20")
    shutil.move(tmp_path / "job", tmp_path / "gone")
    assert run.ended() == 1
    text = run.text()
    (saved,) = {
        word.partition(":")[0] for word in text.split("the newest saved step is ")[1:] for word in word.split()[:1]
    }
    assert 0 < int(saved) <= 24
    assert f"step 60 is not saved, the newest saved step is {saved}: " in text
    assert "No such file" in text.rpartition("step 60 is not saved")[2], "the cause is named"
    failures = [line for line in text.splitlines() if " failed" in line and "No such file" in line]
    assert len(failures) < 20, "equal lines are counted, not repeated"


def trained(checkpointer: surefoot.Checkpointer, model: torch.nn.Module, first: int, last: int) -> None:
    for step in range(first, last + 1):
        for parameter in model.parameters():
            parameter.data.fill_(float(step))
        checkpointer.step()


def checkpointer(folder: Path, keep: int = 3) -> tuple[surefoot.Checkpointer, torch.nn.Module]:
    model = torch.nn.Linear(100, 100)
    made = surefoot.Checkpointer(model=model, folder=str(folder), interval_steps=1000, keep=keep)
    made.restore()
    return made, model


def fails_in_block(folder: Path) -> None:
    with checkpointer(folder)[0] as made:
        made.step()
        shutil.rmtree(folder)
        raise KeyError("the program's own")


def test_an_exception_in_flight_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="the program's own"):
        fails_in_block(tmp_path / "job")


def test_close_raises_once_and_only_for_a_step_that_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: None
) -> None:
    made, model = checkpointer(tmp_path / "job")
    trained(made, model, 1, 3)
    assert made.save_now()
    made.close()
    again, model = checkpointer(tmp_path / "job")
    trained(again, model, 4, 5)

    def refuse(self: DirectoryStore, path: str, *pieces: bytes | memoryview) -> None:
        raise TierFull("no room on this disk")

    monkeypatch.setattr(DirectoryStore, "put", refuse)
    with pytest.raises(
        LastStepNotSaved, match=r"step 5 is not saved, the newest saved step is 3: .*no room on this disk"
    ) as told:
        again.close()
    assert (told.value.step, told.value.saved_step) == (5, 3)
    again.close()


def test_what_is_not_to_be_saved_is_no_error(tmp_path: Path) -> None:
    made, model = checkpointer(tmp_path / "job")
    trained(made, model, 1, 2)
    made.close(save=False)
    assert surefoot.LastStepNotSaved is LastStepNotSaved


def left_in(folder: Path) -> list[str]:
    return sorted((p.name for p in (folder / "default").iterdir() if p.name[0].isdecimal()), key=lambda n: int(n[:-2]))


def on_a_disk_for(checkpoints: float, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the folder refuse what would take it beyond so many checkpoints of `checkpointer`."""
    true, most = DirectoryStore._write, checkpoints * 50_000

    def write(self: DirectoryStore, path: str, *pieces: bytes | memoryview) -> Path:
        used = sum(p.stat().st_size for p in list(disk.rglob("*")) if p.is_file())
        if used + sum(memoryview(piece).nbytes for piece in pieces) > most:
            raise OSError(errno.ENOSPC, "No space left on device")
        return true(self, path, *pieces)

    monkeypatch.setattr(DirectoryStore, "_write", write)


def test_a_full_disk_makes_room_for_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: None) -> None:
    on_a_disk_for(3.5, tmp_path, monkeypatch)
    made, model = checkpointer(tmp_path / "job")
    for step in range(1, 7):
        trained(made, model, step, step)
        assert made.save_now()
        assert made._backend.wait_for_flush(60)
    made.close()
    assert left_in(tmp_path / "job")[-2:] == ["5-1", "6-1"]


def test_a_save_that_was_given_up_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: None
) -> None:
    on_a_disk_for(1.5, tmp_path, monkeypatch)
    made, model = checkpointer(tmp_path / "job", keep=1)
    trained(made, model, 1, 1)
    assert made.save_now()
    assert made._backend.wait_for_flush(30)
    trained(made, model, 2, 2)
    with pytest.raises(LastStepNotSaved, match=r"step 2 is not saved, the newest saved step is 1: .*No space left"):
        made.close()
    assert left_in(tmp_path / "job") == ["1-1"], "nor is the only one removed"


def test_a_second_program_is_refused_and_names_the_first(program: Callable[..., Program], tmp_path: Path) -> None:
    first = program(10_000, pace=0.05)
    first.wait_for("step 4")
    second = program(10, end="close", SUREFOOT_TEST="1")
    second.wait_for("has not ended its epoch 1")
    assert f"process {first.process.pid} on " in second.text()
    assert "restored" not in second.text()
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    assert second.ended() == 0, "a program that was ending is waited for"
    assert "restored " in second.text()


def test_a_program_that_does_not_end_is_an_error_and_nothing_is_claimed(tmp_path: Path) -> None:
    made, _ = checkpointer(tmp_path / "job")
    other = replace(WriterMark.here(), process="1:1", program="other.py")
    with closing(ObjectStoreTier(DirectoryStore(tmp_path / "job"), "default")) as tier:
        now = [0.0]
        patience = Patience(lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds))
        with pytest.raises(OtherWriter, match=rf"process {os.getpid()} on .*SUREFOOT_SECOND_WRITER=allow"):
            wait_for_former_writers(tier, other, False, patience)
        wait_for_former_writers(tier, other, True)
        assert tier.generations.list_with_heartbeat() == [1]
        made.close()
        assert tier.generations.list_with_heartbeat() == [], "one that ended in order leaves no mark"


@pytest.mark.parametrize("beats", [True, False])
def test_a_program_of_another_host_writes_if_its_mark_changes(
    beats: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_writers, "_WATCH_SECONDS", 0.2)
    far = replace(WriterMark.here(), kernel="another boot", host="far-away")
    with closing(ObjectStoreTier(DirectoryStore(tmp_path, create_root=True), "default")) as tier:
        tier.generations.write_heartbeat(1, far.to_text())
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds
            time.sleep(0.02)
            if beats:
                tier.generations.write_heartbeat(1, replace(far, at=time.time()).to_text())

        patience = Patience(lambda: now[0], sleep)
        if beats:
            with pytest.raises(OtherWriter, match="far-away"):
                wait_for_former_writers(tier, WriterMark.here(), False, patience)
        else:
            wait_for_former_writers(tier, WriterMark.here(), False, patience)
            assert tier.generations.list_with_heartbeat() == [], "it is dead: its mark goes"


def test_an_overtaken_program_says_so_and_removes_nothing_that_the_other_may_stand_on(
    program: Callable[..., Program], tmp_path: Path
) -> None:
    first = program(100_000, pace=0.05, STOP=str(tmp_path / "stop"))
    first.wait_for("step 8")
    second = program(24, pace=0.05, SUREFOOT_SECOND_WRITER="allow")
    assert second.ended() == 0
    assert "writes here too, as epoch 1" in second.text()
    [restored] = map(int, re.findall(r"^restored (\d+)$", second.text(), re.MULTILINE))
    assert first.ended() == 1, "its next steps would be on a branch that nobody takes up"
    assert "OtherWriter: " in first.text()
    assert f"process {second.process.pid} on " in first.text()
    assert "has begun generation 2 while this program runs generation 1" in first.text()
    third = program(0)
    assert third.ended() == 0
    assert f"restored {restored + 24}" in third.text(), "what the newer start saved counts"


def test_an_overtaken_program_is_found_by_one_small_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(ObjectStoreTier(DirectoryStore(tmp_path, create_root=True), "default")) as tier:
        watch = WriterWatch(tier.claim_generation())
        watch.beat(tier)
        assert json.loads(tier.generations.read_heartbeat(1) or "")["process"] == WriterMark.here().process
        assert not watch.check(tier)
        tier.claim_generation()
        assert watch.check(tier)
        assert "has begun generation 2 while this program runs generation 1" in caplog.text
        assert watch.refusal in caplog.text
