"""`python -m surefoot.tools.importing --job UID --step N --from PATH --as dcp|safetensors [--name model]`

Makes a checkpoint of a new job in the persistent tier (named by the environment) from a folder that
torch.distributed.checkpoint wrote, or from Hugging Face safetensors. One stored chunk is in memory at a time. A job goes
on from it by `checkpoint.restoreFrom`, or takes its weights with `Checkpointer.load_weights`. Prints one line of JSON:
{"step", "generation", "tensors", "bytes"}, or {"problem"}.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from surefoot.checkpointer.library_mode.epoch_records import write_record
from surefoot.errors import ConfigurationError, SurefootError
from surefoot.format.layouts import TensorParts
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.identities import RankSave
from surefoot.state import SavedTensor
from surefoot.state.entries import escaped, unescaped
from surefoot.state.objects import values_blob
from surefoot.tiers.persistent import ObjectStoreTier
from surefoot.tools.foreign_formats import Folder, Weights
from surefoot.tools.rank_streams import ReadBox, bands_of, open_tier, write_save


def from_dcp(path: Path, name: str) -> tuple[list[TensorParts], dict[str, Any], ReadBox]:
    """Parts as they are stored, values, and how to read a part."""
    folder = Folder(path)
    found = folder.parts(name)
    parts = []
    for tensor in found.tensors:
        what = folder.saved(tensor)
        parts.append(TensorParts(tensor, what.dtype, what.shape, folder.boxes(tensor)))
    return parts, found.values, folder.read


def from_safetensors(path: Path, name: str) -> tuple[list[TensorParts], dict[str, Any], ReadBox]:
    """Bands, values and reader of a program with this model alone."""
    weights = Weights(path)
    prefix = f"{name}/"
    parts = [_in_bands(prefix + escaped(leaf), what) for leaf, what in weights.saved().items()]
    return parts, {"parts": {name: {}}}, lambda tensor, box: weights.read(unescaped(tensor.removeprefix(prefix)), box)


def _in_bands(name: str, what: SavedTensor) -> TensorParts:
    boxes = tuple(band.box for band in bands_of({name: what}) if band.box.volume)
    return TensorParts(name, what.dtype, what.shape, boxes)


def import_checkpoint(
    tier: ObjectStoreTier, step: int, found: tuple[list[TensorParts], dict[str, Any], ReadBox]
) -> dict[str, Any]:
    """Writes the checkpoint of a job that has none."""
    if tier.list_all_checkpoints():
        raise ConfigurationError("this job has checkpoints already: import into a new uid, so that none is mistaken")
    parts, values, read = found
    epoch = tier.claim_generation()
    write_record(tier, LineageEntry(epoch, None, 1))
    blob = values_blob(
        {"seed": 0, **values, "step": step, "world_size": 1}
        | ({"weights_only": True} if not any(values["parts"].values()) else {})
    )
    written = write_save(tier, RankSave(epoch, step, 0), parts, blob, read)
    return {"step": step, "generation": epoch, "tensors": len(parts), "bytes": written}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="make a checkpoint of a new job from another format")
    parser.add_argument("--job", required=True, help="the new job's uid")
    parser.add_argument("--step", type=int, required=True, help="how many steps the checkpoint stands for")
    parser.add_argument("--from", dest="path", type=Path, required=True, help="a folder, or one safetensors file")
    parser.add_argument("--as", dest="kind", choices=("dcp", "safetensors"), default="dcp")
    parser.add_argument("--name", default="model", help="the object that weights without a name belong to")
    given = parser.parse_args(arguments)
    try:
        tier = open_tier(given.job, begin=True)
        found = from_dcp(given.path, given.name) if given.kind == "dcp" else from_safetensors(given.path, given.name)
        body = import_checkpoint(tier, given.step, found)
        tier.close()
    except (SurefootError, OSError) as error:
        body = {"problem": str(error)}
    print(json.dumps(body))
    return 1 if "problem" in body else 0


if __name__ == "__main__":
    sys.exit(main())
