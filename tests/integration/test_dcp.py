"""torch.distributed.checkpoint on the engine: the cases that PyTorch's own tests of DCP hold its storage to."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from support.gloo_world import ended, started
from surefoot import Checkpointer
from surefoot.errors import TierError
from surefoot.integrations.dcp import SurefootReader, SurefootWriter, step_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (unavailable|disabled).*")


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SurefootWriter]:
    for name in [n for n in os.environ if n.startswith("SUREFOOT_")]:
        monkeypatch.delenv(name)
    opened = SurefootWriter(str(tmp_path / "kept"))
    yield opened
    opened.close()


@pytest.fixture
def reader(tmp_path: Path, writer: SurefootWriter) -> Iterator[SurefootReader]:
    opened = SurefootReader(str(tmp_path / "kept"))
    yield opened
    opened.close()


def state(fill: float) -> dict[str, Any]:
    return {
        "model": {
            "w": torch.full((70, 33), fill),
            "half": torch.full((3,), fill).bfloat16(),
            "scalar": torch.tensor(fill),
        },
        "empty": torch.full((0, 4), fill),
        "strided": torch.full((4, 6), fill).t(),
        "bytes": {"lr": fill, "name": f"run {fill}", "list": [1, "a", fill]},
        "mixed": [torch.full((2,), fill), {"deep": torch.full((3,), fill)}],
    }


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list):
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    else:
        assert a == b


def test_a_state_dict_returns_with_tensors_and_plain_values(writer: SurefootWriter, reader: SurefootReader) -> None:
    dcp.save(state(1.5), storage_writer=writer, checkpoint_id="step-10")
    dcp.save(state(2.5), storage_writer=writer, checkpoint_id="step-20")
    for step, fill in ((20, 2.5), (10, 1.5)):
        found = state(0.0)
        dcp.load(found, storage_reader=reader, checkpoint_id=f"step-{step}")
        assert_equal(found, state(fill))
    newest = state(0.0)
    dcp.load(newest, storage_reader=SurefootReader(reader._options.folder))
    assert_equal(newest, state(2.5))


def test_part_of_a_checkpoint_can_be_loaded(writer: SurefootWriter, reader: SurefootReader) -> None:
    dcp.save(state(1.0), storage_writer=writer, checkpoint_id="step-1")
    found = {"model": {"w": torch.zeros(70, 33)}}
    dcp.load(found, storage_reader=reader, checkpoint_id="step-1")
    assert torch.equal(found["model"]["w"], torch.ones(70, 33))


def test_what_the_checkpoint_lacks_is_named_unless_partial_loads_are_allowed(
    writer: SurefootWriter, reader: SurefootReader
) -> None:
    dcp.save(state(1.0), storage_writer=writer, checkpoint_id="step-1")
    found = {"model": {"w": torch.zeros(70, 33), "other": torch.zeros(2)}}
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.other"):
        dcp.load(found, storage_reader=reader, checkpoint_id="step-1")
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, storage_reader=reader, checkpoint_id="step-1", planner=planner)
    assert found["model"]["w"][0, 0] == 1.0
    assert found["model"]["other"].tolist() == [0.0, 0.0]


def test_another_shape_is_refused_and_another_type_is_converted(writer: SurefootWriter, reader: SurefootReader) -> None:
    dcp.save({"w": torch.arange(6.0)}, storage_writer=writer, checkpoint_id="step-1")
    with pytest.raises(CheckpointException, match=r"[Ss]ize mismatch"):
        dcp.load({"w": torch.zeros(7)}, storage_reader=reader, checkpoint_id="step-1")
    found = {"w": torch.zeros(6, dtype=torch.float64)}
    dcp.load(found, storage_reader=reader, checkpoint_id="step-1")
    assert found["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("name", ["step-1", "latest", None])
def test_who_does_not_allow_overwriting_is_refused_before_a_byte_is_written(
    writer: SurefootWriter, reader: SurefootReader, name: str | None
) -> None:
    careful = SurefootWriter(writer._options.folder, overwrite=False)
    dcp.save(state(1.0), storage_writer=careful, checkpoint_id=name)
    # without hidden files: the mark of a live writer is written anew in the background, by a file beside it
    folder = Path(str(writer._options.folder))
    before = sorted(path for path in folder.rglob("*") if not path.name.startswith("."))
    with pytest.raises(CheckpointException, match=r"Checkpoint already exists: .* is step 1, and overwrite is False"):
        dcp.save(state(2.0), storage_writer=careful, checkpoint_id=name)
    assert sorted(path for path in folder.rglob("*") if not path.name.startswith(".")) == before
    dcp.save(state(3.0), storage_writer=careful, checkpoint_id="step-3")
    found = state(0.0)
    dcp.load(found, storage_reader=reader, checkpoint_id=name)
    assert_equal(found, state(1.0 if name else 3.0))


def test_saving_in_the_background(writer: SurefootWriter, reader: SurefootReader) -> None:
    dcp.async_save(state(3.0), storage_writer=writer, checkpoint_id="step-3", no_dist=True).result()
    found = state(0.0)
    dcp.load(found, storage_reader=reader, checkpoint_id="step-3")
    assert_equal(found, state(3.0))


def test_a_checkpoint_that_is_not_there_is_an_error(writer: SurefootWriter, reader: SurefootReader) -> None:
    dcp.save(state(1.0), storage_writer=writer, checkpoint_id="step-1")
    with pytest.raises(CheckpointException, match="no complete checkpoint 'step-2'"):
        dcp.load(state(0.0), storage_reader=reader, checkpoint_id="step-2")


def test_a_step_is_saved_once_and_other_bytes_are_refused(writer: SurefootWriter, reader: SurefootReader) -> None:
    dcp.save(state(1.0), storage_writer=writer, checkpoint_id="step-1")
    with pytest.raises(CheckpointException, match="was saved before by this program"):
        dcp.save(state(2.0), storage_writer=writer, checkpoint_id="step-1")
    found = state(0.0)
    dcp.load(found, storage_reader=reader, checkpoint_id="step-1")
    assert_equal(found, state(1.0))


def test_an_id_names_its_step() -> None:
    assert step_of("s3://bucket/run/step-120/") == 120
    assert step_of(Path("out/7")) == 7
    assert SurefootWriter.validate_checkpoint_id("step-1")
    assert step_of("latest") is None
    assert SurefootWriter.validate_checkpoint_id("latest")
    assert not SurefootWriter.validate_checkpoint_id("")


def test_an_id_without_a_number_is_the_step_after_all_others_and_its_newest_is_read(
    writer: SurefootWriter, reader: SurefootReader
) -> None:
    dcp.save(state(1.0), storage_writer=writer, checkpoint_id="step-41")
    dcp.save(state(2.0), storage_writer=writer, checkpoint_id="latest")
    dcp.save(state(3.0), storage_writer=writer, checkpoint_id="best")
    dcp.save(state(4.0), storage_writer=writer, checkpoint_id="latest")
    for name, fill in (("latest", 4.0), ("best", 3.0), ("step-41", 1.0)):
        found = state(0.0)
        dcp.load(found, storage_reader=reader, checkpoint_id=name)
        assert_equal(found, state(fill))
    with pytest.raises(CheckpointException, match="no complete checkpoint 'step-42'"):  # that step is of "latest"
        dcp.load(state(0.0), storage_reader=reader, checkpoint_id="step-42")
    with pytest.raises(CheckpointException, match="no complete checkpoint 'worst'"):
        dcp.load(state(0.0), storage_reader=reader, checkpoint_id="worst")


def test_a_script_without_ids_saves_again_and_again_also_after_it_began_anew(
    tmp_path: Path, writer: SurefootWriter
) -> None:
    for fill in (1.0, 2.0):
        dcp.save(state(fill), storage_writer=writer)
    writer.close()
    again = SurefootWriter(str(tmp_path / "kept"))
    dcp.save(state(3.0), storage_writer=again)
    again.close()
    found = state(0.0)
    dcp.load(found, storage_reader=SurefootReader(str(tmp_path / "kept")))
    assert_equal(found, state(3.0))


def test_a_free_step_is_not_guessed_while_a_tier_gives_no_answer(tmp_path: Path, writer: SurefootWriter) -> None:
    dcp.save(state(1.0), storage_writer=writer, checkpoint_id="step-1")
    (tmp_path / "kept").rename(tmp_path / "elsewhere")
    (tmp_path / "kept").touch()
    with pytest.raises(CheckpointException, match="the next free step is unknown"):
        dcp.save(state(2.0), storage_writer=writer, checkpoint_id="latest")
    (tmp_path / "kept").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "kept")


def test_ranks_that_saved_one_checkpoint_as_different_steps_are_told(writer: SurefootWriter) -> None:
    writer.reset("latest")
    results = [[WriteResult(MetadataIndex("w"), 4, step)] for step in (7, 8)]
    with pytest.raises(TierError, match=r"different steps, \[7, 8\]"):
        writer.finish(Metadata({}), results)


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def test_what_a_checkpointer_saved_is_read_by_dcp(
    tmp_path: Path, writer: SurefootWriter, reader: SurefootReader
) -> None:
    model, optimizer, scheduler = trained(1)
    with Checkpointer(
        model=model, optimizer=optimizer, scheduler=scheduler, folder=str(tmp_path / "kept"), interval_steps=1
    ) as c:
        c.restore()
        c.step()
    other, its_optimizer, its_scheduler = trained(2)
    weights, states = get_state_dict(other, its_optimizer)
    found = {"model": weights, "optimizer": states, "scheduler": its_scheduler.state_dict()}
    dcp.load(found, storage_reader=reader, checkpoint_id="1")
    set_state_dict(other, its_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
    assert_equal(its_optimizer.state_dict()["param_groups"], optimizer.state_dict()["param_groups"])
    for index, kept in optimizer.state_dict()["state"].items():
        assert_equal(its_optimizer.state_dict()["state"][index], kept)
    assert found["scheduler"]["last_epoch"] == scheduler.last_epoch


def test_fsdp2_shards_are_resharded(tmp_path: Path) -> None:
    seen = []
    for number, (world, doing) in enumerate(((3, "save"), (2, "load"))):
        out = tmp_path / f"{doing}.pt"
        ended(started("dcp_world.py", [str(tmp_path / "kept"), doing, str(out)], world, tmp_path / f"group-{number}"))
        seen.append(torch.load(out, weights_only=True))
    assert_equal(seen[1], seen[0])


def test_writers_of_one_folder_share_one_staging_memory(
    tmp_path: Path, writer: SurefootWriter, reader: SurefootReader
) -> None:
    """Else the one that was made first goes on staging where nobody reads once the other has asked for more room."""
    other = SurefootWriter(str(tmp_path / "kept"))
    dcp.save(state(1.0), storage_writer=writer, checkpoint_id="step-1")
    dcp.save({"large": torch.arange(3e6)}, storage_writer=other, checkpoint_id="step-2")
    dcp.save(state(3.0), storage_writer=writer, checkpoint_id="step-3")
    found = state(0.0)
    dcp.load(found, storage_reader=reader, checkpoint_id="step-3")
    assert_equal(found, state(3.0))
    with pytest.raises(CheckpointException, match="was saved before"):
        dcp.save(state(4.0), storage_writer=other, checkpoint_id="step-3")


def test_writers_that_nobody_closes_leave_one_thread_each_folder(tmp_path: Path, writer: SurefootWriter) -> None:
    dcp.save(state(1.0), storage_writer=writer, checkpoint_id="step-1")
    before = copying_threads()
    for step in range(2, 7):
        dcp.save(state(1.0), storage_writer=SurefootWriter(str(tmp_path / "kept")), checkpoint_id=f"step-{step}")
    assert copying_threads() == before


def copying_threads() -> int:
    return sum(thread.name == "surefoot-staging" for thread in threading.enumerate())


def test_everything_that_a_script_saved_is_kept(writer: SurefootWriter, reader: SurefootReader) -> None:
    """As with every other storage of DCP: whoever names checkpoints also removes them."""
    for step in range(1, 7):
        dcp.save({"w": torch.full((3,), float(step))}, storage_writer=writer, checkpoint_id=f"step-{step}")
    found = {"w": torch.zeros(3)}
    dcp.load(found, storage_reader=reader, checkpoint_id="step-1")
    assert found["w"].tolist() == [1.0, 1.0, 1.0]


def test_the_metadata_tells_whose_they_are(writer: SurefootWriter, reader: SurefootReader) -> None:
    dcp.save(state(1.0), storage_writer=writer, checkpoint_id="run/step-1")
    reader.reset("run/step-1")
    about = reader.read_metadata().storage_meta
    assert about is not None
    assert (about.checkpoint_id, about.save_id) == ("run/step-1", writer.save_id)
    assert (about.load_id, reader.load_id) == (reader.load_id, reader.load_id)
    assert reader.load_id


def test_a_rank_whose_first_look_fails_takes_the_others_along(tmp_path: Path) -> None:
    """DCP would ask its reader again, and go on without the collectives that the others wait in."""
    ranks = started("dcp_faltering.py", [str(tmp_path / "kept")], 2, tmp_path / "group")
    told = ended(ranks)
    assert all("CheckpointException" in said and "the disk was away" in said for said in told), told


def test_a_tier_without_an_answer_is_not_taken_for_an_empty_one(
    tmp_path: Path, writer: SurefootWriter, reader: SurefootReader
) -> None:
    dcp.save(state(1.0), storage_writer=writer, checkpoint_id="step-1")
    (tmp_path / "kept").rename(tmp_path / "elsewhere")
    (tmp_path / "kept").touch()
    with pytest.raises(CheckpointException, match="gave no answer: whether the checkpoint is there is unknown"):
        dcp.load(state(0.0), storage_reader=reader, checkpoint_id="step-1")
    (tmp_path / "kept").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "kept")
