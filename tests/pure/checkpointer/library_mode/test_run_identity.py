"""Whose run a start continues, in which folder: what is recorded, compared and said."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surefoot import Checkpointer, ElasticLoader
from surefoot.checkpointer.library_mode import library, run_identity
from surefoot.checkpointer.library_mode.epoch_records import write_record
from surefoot.checkpointer.library_mode.other_writers import WriterWatch
from surefoot.checkpointer.library_mode.run_identity import (
    GenerationOwner,
    changed_folder_hint,
    default_folder,
    start_line,
)
from surefoot.errors import OtherWriter
from surefoot.tiers import ObjectStoreTier
from surefoot.tiers.object_store import DirectoryStore

Arguments = Callable[..., None]


@pytest.fixture
def argv(monkeypatch: pytest.MonkeyPatch) -> Arguments:
    return lambda *arguments: monkeypatch.setattr(sys, "argv", ["/work/train.py", *arguments])


def test_a_record_names_arguments_and_what_may_change_a_training(argv: Arguments) -> None:
    argv("--lr", "0.1", "--api-key", "geheim", "--hub_token=geheim", "data dir")
    environment = {
        "LR": "0.1",
        "RANK": "3",
        "SSH_TTY": "/dev/pts/1",
        "SLURM_JOB_ID": "7",
        "MY_TOKEN": "geheim",
        "_": "x",
    }
    owner = GenerationOwner.here(environment)
    assert list(owner.environment) == ["LR"]
    text = json.dumps(asdict(owner))
    assert "geheim" not in text
    assert owner.arguments[:3] == ("--lr", "0.1", "--api-key")
    assert owner.command.endswith("'data dir'")
    assert GenerationOwner.from_record(json.loads(text)) == owner
    argv(*map(str, range(1000)))
    assert GenerationOwner.here({}).arguments[0].startswith("1000 arguments with digest ")


def test_the_start_line_names_the_run_it_continues_and_how_this_one_differs(argv: Arguments) -> None:
    argv("0.001", "60")
    earlier = replace(GenerationOwner.here({"LR": "1", "SEED": "1"}), host="alpha", began_at=0.0)
    argv("0.5", "60")
    present = GenerationOwner.here({"LR": "2", "MODE": "x", "SEED": "1"})
    line = start_line("/work/ck/default", 60, earlier, present)
    assert line.startswith(
        "checkpoints go to /work/ck/default; this run continues from step 60 of the run begun with `train.py 0.001 60`"
        " (/work/train.py on alpha, at some time); this run's arguments differ: train.py 0.5 60 and these environment"
        " variables differ: LR, MODE. "
    )
    assert start_line("/w", 0, None, present, "!") == "checkpoints go to /w; this run begins at step 0!"
    same = start_line("/w", 4, replace(present, began_at=1.0), present)
    assert same.endswith("on " + present.host + ", 1970-01-01 00:00:01 UTC)"), "a restart is accused of nothing"


def test_the_default_folder_is_where_the_script_was_started(
    argv: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv()
    monkeypatch.chdir(tmp_path)
    assert default_folder("ck") == tmp_path / "ck" / "train"
    monkeypatch.setattr(run_identity, "START_FOLDER", tmp_path)
    assert changed_folder_hint() == ""
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path / "outputs")
    assert f"changed its working folder from {tmp_path} to {tmp_path}/outputs" in changed_folder_hint()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "outputs" / "train.py")])
    assert changed_folder_hint() == "", "a script that goes to its own folder finds its checkpoints again"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert default_folder("ck").name == "python"


@pytest.mark.parametrize(
    ("mode", "folder", "arguments"), [("RUN", "train", ("lr=1",)), ("MULTIRUN", "train/lr=1,opt=_x_", ("lr=1",))]
)
def test_hydras_folder_of_each_run_hides_no_checkpoints(
    mode: str, folder: str, arguments: tuple[str, ...], tmp_path: Path, argv: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv("-m", "lr=1,2")
    config = SimpleNamespace(
        runtime=SimpleNamespace(cwd=str(tmp_path)),
        job=SimpleNamespace(override_dirname="lr=1,opt=/x/"),
        mode=SimpleNamespace(name=mode),
        overrides=SimpleNamespace(task=["lr=1"]),
    )
    hydra = SimpleNamespace(HydraConfig=SimpleNamespace(initialized=lambda: True, get=lambda: config))
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", hydra)
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path / "outputs")
    assert default_folder("ck") == tmp_path / "ck" / folder
    assert changed_folder_hint() == ""
    assert GenerationOwner.here({}).arguments == arguments


# ---- two runs in one folder ------------------------------------------------------------------------------------------


def train(folder: Path, steps: int, checkpointer: Checkpointer | None = None) -> Checkpointer:
    if checkpointer is None:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = ElasticLoader(torch.ones(64, 4), 8)
        checkpointer = Checkpointer(
            model=model, optimizer=optimizer, loader=loader, folder=str(folder), interval_steps=1
        )
        checkpointer.restore()
        checkpointer.batches = iter(loader)  # type: ignore[attr-defined]
        checkpointer.train = lambda data: (optimizer.zero_grad(), model(data).sum().backward(), optimizer.step())  # type: ignore[attr-defined]
    for _ in range(steps):
        checkpointer.train(next(checkpointer.batches).data)  # type: ignore[attr-defined]
        checkpointer.step(1.0)
        checkpointer._backend.wait_for_flush(5.0)
    return checkpointer


def test_a_run_whose_generation_was_overtaken_is_refused_at_its_next_save(
    tmp_path: Path, argv: Arguments, caplog: pytest.LogCaptureFixture
) -> None:
    argv("0.1")
    first = train(tmp_path, 3)
    argv("0.001")
    second = train(tmp_path, 2)
    assert f"checkpoints go to {tmp_path}/default; this run begins at step 0" in caplog.text
    assert re.search(r"continues from step \d of the run begun with `train.py 0.1`", caplog.text)
    assert "this run's arguments differ: train.py 0.001. It replaces" in caplog.text
    with pytest.raises(
        OtherWriter, match=r"process \d+ on .*, last seen at .*, has begun generation 2 while"
    ) as refused:
        train(tmp_path, 100, first)
    first.__exit__(OtherWriter, refused.value, None)
    second.close()
    argv("0.001")
    caplog.clear()
    assert train(tmp_path, 0).status.restored_step == second.status.step
    assert "differ" not in caplog.text


def test_an_overtaken_run_learns_who_overtook_it_even_before_that_start_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = ObjectStoreTier(DirectoryStore(tmp_path, create_root=True), "job")
    library.claim(tier, 1)
    watch = WriterWatch(1)

    def save_of_the_first_then_write_record(*arguments: Any) -> None:
        watch.check(tier)
        write_record(*arguments)

    monkeypatch.setattr(library, "write_record", save_of_the_first_then_write_record)
    library.claim(tier, 1)
    assert "last seen at" in watch.refusal


def test_a_restart_with_another_environment_is_told_so_and_not_to_end(argv: Arguments) -> None:
    argv("0.1")
    earlier, present = GenerationOwner.here({"LR": "1"}), GenerationOwner.here({"LR": "2"})
    line = start_line("/w", 4, earlier, present)
    assert line.endswith("; these environment variables differ: LR")
