"""Real gloo worlds without an agent: saved at one size, restored at another, to the bit and to the loss."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from support.gloo_world import ended, started
from surefoot import Checkpointer
from surefoot.tiers.object_store import DirectoryStore
from surefoot.tiers.persistent import ObjectStoreTier


def run(kind: str, world: int, steps: int, folder: Path, out: Path) -> dict[str, Any]:
    """One world from start to end; what rank 0 saw, with every rank's samples."""
    out.mkdir()
    ended(started("tiny_training.py", [kind, str(steps), str(folder), str(out)], world, out / "group"))
    seen = [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(world)]
    return seen[0] | {"all_samples": [s["samples"] for s in seen]}


def in_order(seen: dict[str, Any]) -> list[int]:
    return [i for step in seen["losses"] for samples in seen["all_samples"] for i in samples[step]]


def assert_bit_exact(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert one
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("kind", [pytest.param("fsdp", marks=pytest.mark.nightly), "ddp"])
def test_three_ranks_become_two_and_three_again(kind: str, tmp_path: Path) -> None:
    undisturbed = run(kind, 3, 9, tmp_path / "whole", tmp_path / "a")
    first = run(kind, 3, 3, tmp_path / "cut", tmp_path / "b")
    shutil.copytree(tmp_path / "cut", tmp_path / "same")
    second = run(kind, 2, 6, tmp_path / "cut", tmp_path / "c")
    third = run(kind, 3, 9, tmp_path / "cut", tmp_path / "d")
    same = run(kind, 3, 9, tmp_path / "same", tmp_path / "e")

    assert [second["start"], third["start"], same["start"]] == [3, 6, 3]
    assert_bit_exact(second["restored"], first["final"])
    assert_bit_exact(third["restored"], second["final"])
    losses = first["losses"] | second["losses"] | third["losses"]
    assert losses.keys() == undisturbed["losses"].keys()
    worst = max(abs(losses[step] - undisturbed["losses"][step]) for step in losses)
    assert worst < 1e-10
    assert in_order(first) + in_order(second) + in_order(third) == in_order(undisturbed)
    assert_bit_exact(same["restored"], first["final"])
    if kind == "fsdp":
        # at the same world size nothing differs at all
        assert_bit_exact(same["final"], undisturbed["final"])
        assert same["losses"] == {step: undisturbed["losses"][step] for step in range(4, 10)}
    else:
        # DDP orders its buckets anew after the first step of each process, and with them its sums
        for name, value in same["final"].items():
            torch.testing.assert_close(value, undisturbed["final"][name], rtol=0, atol=1e-12)


def test_plain_python_goes_on_where_it_was_and_keeps_what_it_may(tmp_path: Path) -> None:
    undisturbed = run("plain", 1, 14, tmp_path / "whole", tmp_path / "a")
    run("plain", 1, 5, tmp_path / "cut", tmp_path / "b")
    again = run("plain", 1, 14, tmp_path / "cut", tmp_path / "c")
    assert again["start"] == 5
    assert_bit_exact(again["final"], undisturbed["final"])
    tier = ObjectStoreTier(DirectoryStore(tmp_path / "cut", create_root=True), "default")
    steps = [checkpoint.step for checkpoint in tier.list_all_checkpoints()]
    assert max(steps) == 14
    assert {6, 8, 10, 12, 14} >= set(steps) - {2, 4, 5}
    assert sorted(tier.generations.read_lineage_records()) == [1, 2]


WITHOUT_CLOSE = """
import sys, torch, surefoot
model = torch.nn.Linear(1024, 4096)  # two parts, written side by side
checkpointer = surefoot.Checkpointer(model=model, folder=sys.argv[1], interval_steps=1, keep=1)
start = checkpointer.restore()
for step in range(start, start + 3):
    checkpointer.step(1.0)
"""


def test_a_script_that_ends_without_close_saves_its_last_step_and_keeps_no_more_than_it_may(tmp_path: Path) -> None:
    for last in (3, 6):
        script = [sys.executable, "-c", WITHOUT_CLOSE, str(tmp_path)]
        done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True)
        assert "Traceback" not in done.stderr
        with closing(ObjectStoreTier(DirectoryStore(tmp_path), "default")) as tier:
            assert [checkpoint.step for checkpoint in tier.list_all_checkpoints()] == [last]


class Growing:
    """An object whose state outgrows the staging memory."""

    def __init__(self) -> None:
        self.text = ""

    def state_dict(self) -> dict[str, str]:
        return {"text": self.text}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.text = state["text"]


def test_saves_go_on_in_larger_staging_memory(tmp_path: Path) -> None:
    """Whoever drains the larger memory has not heard of the layout, which has not changed."""
    model, growing = torch.nn.Linear(2, 2), Growing()
    with Checkpointer(model=model, growing=growing, folder=str(tmp_path), interval_steps=1, keep=9) as checkpointer:
        checkpointer.restore()
        for length in (1, 1_000_000, 1_000_001):
            growing.text = "x" * length
            checkpointer.step()
            assert checkpointer.save_now()
        assert checkpointer._backend.wait_for_flush(30)
        assert [c.step for c in checkpointer.list()] == [1, 2, 3]


def test_a_world_of_one_takes_up_what_ranks_of_a_group_saved(tmp_path: Path) -> None:
    first = run("ddp", 2, 4, tmp_path / "job", tmp_path / "a")
    second = run("plain", 1, 4, tmp_path / "job", tmp_path / "b")
    assert second["start"] == 4
    assert_bit_exact(second["restored"], first["final"])


def test_what_one_rank_cannot_read_no_rank_restores(tmp_path: Path) -> None:
    first = run("ddp", 2, 4, tmp_path / "job", tmp_path / "a")
    struck = tmp_path / "job" / "default" / "4-1" / "rank-1" / "digests"
    struck.write_bytes(bytes([struck.read_bytes()[0] ^ 1]) + struck.read_bytes()[1:])
    second = run("ddp", 2, 4, tmp_path / "job", tmp_path / "b")
    assert second["start"] == 2, "the newest before it, on both ranks"
    assert set(second["losses"]) == {3, 4}
    assert max(abs(second["losses"][step] - first["losses"][step]) for step in (3, 4)) < 1e-12


def test_steps_whose_loss_is_no_number_push_out_no_checkpoint_of_before(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"folder": str(tmp_path), "interval_steps": 1, "keep": 1, "job_uid": "nan"}
    with Checkpointer(model=model, optimizer=optimizer, **options) as checkpointer:
        for step in range(1, 7):
            loss = model(torch.full((1, 2), float("nan") if step > 3 else 1.0)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.step(loss)
            assert checkpointer.save_now()
        checkpointer.close()
    with closing(ObjectStoreTier(DirectoryStore(tmp_path), "nan")) as tier:
        kept = {m.save.step: m.suspect for m in tier.manifests()}
    assert kept == {3: False, 6: True}
