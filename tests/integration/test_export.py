"""Checkpoints leave for other formats and come back: torch's own loader and the safetensors library are the judges."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from support.same_state import assert_same
from surefoot import Checkpointer
from surefoot.tools import exporting, importing, rank_streams
from surefoot_operator.api.parse import parse_job
from surefoot_operator.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (unavailable|disabled).*")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [n for n in os.environ if n.startswith("SUREFOOT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SUREFOOT_PERSISTENT_URI", (tmp_path / "kept").as_uri())
    monkeypatch.setattr(rank_streams, "BAND_BYTES", 4096)  # many bands, also of a small model
    return tmp_path / "kept"


class Net(nn.Module):
    """Odd sizes, two types, a counter, an empty tensor, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(31, 67), nn.BatchNorm1d(67), nn.Linear(67, 31)
        self.again = nn.Linear(31, 67)
        self.again.weight = self.first.weight
        self.lean = nn.Parameter(torch.randn(300, 9).bfloat16())
        self.register_buffer("none", torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.again(self.last(self.norm(self.first(x)))) + self.lean.float().sum()
        return out


def trained(seed: int, steps: int = 3) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    groups = [{"params": list(model.first.parameters()), "lr": 0.1}]
    groups.append({"params": [p for p in model.parameters() if all(p is not q for q in groups[0]["params"])]})
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.randn(4, 31)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def kept_by_checkpointer(objects: dict[str, Any], folder: Path, job: str = "one") -> None:
    with Checkpointer(**objects, folder=str(folder), interval_steps=1, job_uid=job) as checkpointer:
        checkpointer.restore()
        checkpointer.step()


def ran(tool: Any, capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    code = tool.main([str(a) for a in arguments])
    body: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (1 if "problem" in body else 0)
    return body


def test_dcp_reads_what_is_exported_and_what_it_wrote_comes_back(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = trained(1)
    kept_by_checkpointer(objects, kept)
    told = ran(exporting, capsys, "--job", "one", "--to", tmp_path / "out")
    assert told["step"] == 1
    other = trained(2)
    weights, states = get_state_dict(other["model"], other["optimizer"])
    found = {"model": weights, "optimizer": states, "scheduler": other["scheduler"].state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(
        other["model"], other["optimizer"], model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    other["scheduler"].load_state_dict(found["scheduler"])
    assert_same(objects, other)

    # what torch writes of that comes back as a checkpoint of a new job, and a Checkpointer goes on from it
    weights, states = get_state_dict(objects["model"], objects["optimizer"])
    whole = {"model": weights, "optimizer": states, "scheduler": objects["scheduler"].state_dict()}
    dcp.save(whole, checkpoint_id=tmp_path / "theirs", no_dist=True)
    told = ran(importing, capsys, "--job", "two", "--step", 12, "--from", tmp_path / "theirs")
    assert told["step"] == 12
    fresh = trained(3, steps=0)
    with Checkpointer(**fresh, folder=str(kept), job_uid="two") as checkpointer:
        assert checkpointer.restore() == 12
        assert_same(objects, fresh)


def test_flattened_optimizer_state_is_understood(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = trained(1)
    weights, states = get_state_dict(
        objects["model"], objects["optimizer"], options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    whole = {"model": weights, "optimizer": states, "scheduler": objects["scheduler"].state_dict()}
    dcp.save(whole, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ran(importing, capsys, "--job", "two", "--step", 3, "--from", tmp_path / "theirs")
    fresh = trained(3, steps=0)
    with Checkpointer(**fresh, folder=str(kept), job_uid="two") as checkpointer:
        assert checkpointer.restore() == 3
        assert_same(objects, fresh)


@pytest.mark.parametrize("file_bytes", [1 << 40, 6000])
def test_the_safetensors_library_reads_what_is_exported(
    kept: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file_bytes: int,
) -> None:
    objects = trained(1)
    kept_by_checkpointer(objects, kept)
    weights = ("--as", "safetensors", "--file-bytes", file_bytes)
    ran(exporting, capsys, "--job", "one", "--to", tmp_path / "out", *weights)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    wanted = {n: t for n, t in objects["model"].state_dict().items() if n != "again.weight"}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if len(files) > 1:
        assert json.loads(index.read_text())["weight_map"].keys() == wanted.keys()


def test_weights_are_exported_as_another_type_and_never_beyond_its_values(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = trained(1)
    with torch.no_grad():
        next(objects["model"].parameters()).view(-1)[0] = 1e6  # more than float16 has
    kept_by_checkpointer(objects, kept)
    arguments = ["--job", "one", "--to", tmp_path / "out", "--as", "safetensors", "--dtype"]
    said = ran(exporting, capsys, *arguments, "bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = objects["model"].state_dict()
    assert said["bytes"] == sum(tensor.nbytes for tensor in found.values())
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name].bfloat16() if wanted[name].is_floating_point() else wanted[name])
    assert exporting.main([str(one) for one in (*arguments, "float16")]) == 1
    assert "has values beyond float16" in json.loads(capsys.readouterr().out)["problem"]


def test_weights_of_safetensors_can_be_taken_by_a_program(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained(1)["model"]
    (tmp_path / "theirs").mkdir()
    names = {n: t.clone() for n, t in model.state_dict().items() if n != "again.weight"}
    halves = [dict(list(names.items())[:4]), dict(list(names.items())[4:])]
    for number, half in enumerate(halves):
        save_file(half, tmp_path / "theirs" / f"model-{number}.safetensors")
    ran(importing, capsys, "--job", "two", "--step", 1, "--from", tmp_path / "theirs", "--as", "safetensors")
    fresh = Net()
    with Checkpointer(model=fresh, folder=str(kept), job_uid="two") as checkpointer:
        assert checkpointer.load_weights(fresh) == 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_what_cannot_be_done_is_said(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept_by_checkpointer({"model": nn.Linear(2, 2)}, kept)
    (tmp_path / "empty").mkdir()
    for tool, arguments, words in (
        (exporting, ["--job", "one", "--step", 9, "--to", tmp_path / "o"], "no complete checkpoint of step 9"),
        (
            exporting,
            ["--job", "one", "--to", tmp_path / "o", "--as", "safetensors", "--name", "ema"],
            "no tensors of 'ema'",
        ),
        (importing, ["--job", "one", "--step", 1, "--from", tmp_path / "empty"], "has no .metadata"),
        (
            importing,
            ["--job", "x", "--step", 1, "--from", tmp_path / "empty", "--as", "safetensors"],
            "no .safetensors",
        ),
    ):
        assert words in ran(tool, capsys, *arguments)["problem"]
    ran(exporting, capsys, "--job", "one", "--to", tmp_path / "o")
    assert "has a checkpoint already" in ran(exporting, capsys, "--job", "one", "--to", tmp_path / "o")["problem"]
    told = ran(importing, capsys, "--job", "one", "--step", 1, "--from", tmp_path / "o")
    assert "has checkpoints already" in told["problem"]


def test_a_folder_that_would_run_code_is_refused(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save(
        {"model": {"w": torch.ones(2)}, "odd": {"value": Path("x")}}, checkpoint_id=tmp_path / "theirs", no_dist=True
    )
    told = ran(importing, capsys, "--job", "two", "--step", 1, "--from", tmp_path / "theirs")
    assert "odd.value is not a plain value" in told["problem"]


def test_the_command_exports_and_imports(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        f"""
apiVersion: surefoot.dev/v1alpha1
kind: TrainingJob
metadata: {{name: one}}
spec:
  replicas: 1
  checkpoint: {{persistent: {{uri: "{kept.as_uri()}", intervalSteps: 1}}}}
  template: {{spec: {{containers: [{{name: trainer, image: x, command: [python, x.py]}}]}}}}
"""
    )
    kept_by_checkpointer({"model": nn.Linear(3, 2)}, kept)
    out = tmp_path / "out"
    assert main(["checkpoints", "export", "-f", str(job), "--job", "one", "--to", str(out)]) == 0
    assert "step 1 of job one: 2 tensors, 32 bytes" in capsys.readouterr().out
    assert main(["checkpoints", "import", "-f", str(job), "--job", "two", "--step", "4", "--from", str(out)]) == 0
    told = capsys.readouterr().out
    assert "as step 4 of job two" in told
    field = yaml.safe_load(told.partition("set checkpoint.")[2])
    document = yaml.safe_load(job.read_text())
    document["spec"]["checkpoint"] |= field
    assert parse_job(document).spec.checkpoint.restore_from is not None, "what is printed is what a job takes"
    assert main(["checkpoints", "verify", "-f", str(job), "--job", "two"]) == 0
    assert "step 4 of generation 1: verified" in capsys.readouterr().out
    assert main(["checkpoints", "import", "-f", str(job), "--job", "two", "--step", "4", "--from", str(out)]) == 1
    assert "has checkpoints already" in capsys.readouterr().err
    assert main(["checkpoints", "export", "-f", str(job)]) == 2
    assert "--to FOLDER" in capsys.readouterr().err


def test_a_folder_alone_says_where_and_whose(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept_by_checkpointer({"model": nn.Linear(3, 2)}, kept)
    assert main(["checkpoints", "list", str(kept)]) == 0
    assert "step 1 of generation 1: complete" in capsys.readouterr().out
    assert main(["checkpoints", "verify", kept.as_uri(), "--job", "one", "--step", "1"]) == 0
    assert "step 1 of generation 1: verified" in capsys.readouterr().out
    assert main(["checkpoints", "export", str(kept), "--to", str(tmp_path / "out")]) == 0
    assert (
        main(["checkpoints", "import", str(kept), "--job", "two", "--step", "4", "--from", str(tmp_path / "out")]) == 0
    )
    # as a job's file must say it
    assert "checkpoint.restoreFrom: {uid: two}" in capsys.readouterr().out
    assert main(["checkpoints", "list", str(kept)]) == 2
    assert "holds 2 jobs; give --job, one of one, two" in capsys.readouterr().err
    assert main(["checkpoints", "delete", str(kept), "--job", "two"]) == 0
    assert "checkpoints of steps 4 in" in capsys.readouterr().out
    assert (kept / "two").is_dir()
    assert main(["checkpoints", "delete", str(kept), "--job", "two", "--yes"]) == 0
    assert not (kept / "two").exists()
    assert main(["checkpoints", "verify", str(kept)]) == 0
