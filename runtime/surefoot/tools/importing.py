"""`python -m surefoot.tools.importing --job UID --step N --from PATH --as dcp|safetensors [--name model]`

Creates a checkpoint of a new job in the persistent tier (named by the environment) from a folder that
torch.distributed.checkpoint wrote, or from Hugging Face safetensors. One stored chunk is in memory at a time. A job
continues from it with `checkpoint.restoreFrom`, or takes its weights with `Checkpointer.load_weights`. Prints one line
of JSON: {"step", "generation", "tensors", "bytes"}, or {"problem"}.
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
    """Returns a DCP folder's stored chunks, its values, and a reader of one chunk."""
    folder = Folder(path)
    imported = folder.parts(name)
    parts = []
    for tensor in imported.tensors:
        saved = folder.saved(tensor)
        parts.append(TensorParts(tensor, saved.dtype, saved.shape, folder.boxes(tensor)))
    return parts, imported.values, folder.read


def from_safetensors(path: Path, name: str) -> tuple[list[TensorParts], dict[str, Any], ReadBox]:
    """Returns bands, values and a reader of one band for a program that has only this model."""
    weights = Weights(path)
    prefix = f"{name}/"
    parts = [_split_into_bands(prefix + escaped(leaf), saved) for leaf, saved in weights.saved().items()]
    return parts, {"parts": {name: {}}}, lambda tensor, box: weights.read(unescaped(tensor.removeprefix(prefix)), box)


def _split_into_bands(name: str, saved: SavedTensor) -> TensorParts:
    boxes = tuple(band.box for band in bands_of({name: saved}) if band.box.volume)
    return TensorParts(name, saved.dtype, saved.shape, boxes)


def import_checkpoint(
    tier: ObjectStoreTier, step: int, source: tuple[list[TensorParts], dict[str, Any], ReadBox]
) -> dict[str, Any]:
    """Writes the first checkpoint of a job.

    `source`: its tensors with the boxes to write, its values, and a reader of one box. Raises ConfigurationError if the
    job already has checkpoints.
    """
    if tier.list_all_checkpoints():
        raise ConfigurationError("this job has checkpoints already: import into a new uid, so that none is mistaken")
    parts, values, read = source
    generation = tier.claim_generation()
    write_record(tier, LineageEntry(generation, None, 1))
    blob = values_blob(
        {"seed": 0, **values, "step": step, "world_size": 1}
        | ({"weights_only": True} if not any(values["parts"].values()) else {})
    )
    written_bytes = write_save(tier, RankSave(generation, step, 0), parts, blob, read)
    return {"step": step, "generation": generation, "tensors": len(parts), "bytes": written_bytes}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="make a checkpoint of a new job from another format")
    parser.add_argument("--job", required=True, help="the new job's uid")
    parser.add_argument("--step", type=int, required=True, help="how many steps the checkpoint stands for")
    parser.add_argument("--from", dest="path", type=Path, required=True, help="a folder, or one safetensors file")
    parser.add_argument("--as", dest="kind", choices=("dcp", "safetensors"), default="dcp")
    parser.add_argument("--name", default="model", help="the object that weights without a name belong to")
    args = parser.parse_args(arguments)
    try:
        tier = open_tier(args.job, begin=True)
        source = from_dcp(args.path, args.name) if args.kind == "dcp" else from_safetensors(args.path, args.name)
        result = import_checkpoint(tier, args.step, source)
        tier.close()
    except (SurefootError, OSError) as error:
        result = {"problem": str(error)}
    print(json.dumps(result))
    return 1 if "problem" in result else 0


if __name__ == "__main__":
    sys.exit(main())
