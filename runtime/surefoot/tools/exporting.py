"""`python -m surefoot.tools.exporting --job UID [--step N] --to FOLDER --as dcp|safetensors [--name model]
[--dtype bfloat16] [--file-bytes N]`

Exports a checkpoint of the persistent tier (named by the environment): either its shared state as a folder of
torch.distributed.checkpoint, or the weights of one model as Hugging Face safetensors. Every byte is verified as it is
read, and at most a few bands of tensors are in memory. Prints one line of JSON: {"step", "tensors", "bytes"}, or
{"problem"}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigurationError, SurefootError
from surefoot.restore.catalogue import persistent_source
from surefoot.restore.reader import CheckpointReader
from surefoot.settings import job_settings
from surefoot.state import read_values
from surefoot.state.modules import state_dict_of
from surefoot.tools import foreign_formats
from surefoot.tools.foreign_formats import FileForm
from surefoot.tools.rank_streams import BandReader, bands_of, open_checkpoint, saved_tensors


def export_state(reader: CheckpointReader, folder: Path) -> dict[str, Any]:
    """Writes the shared state of all ranks as a DCP folder."""
    tensors = saved_tensors(reader)
    values = read_values(reader.read_values(0))
    state_dict = state_dict_of(tensors, values)
    foreign_formats.write_dcp_folder(folder, state_dict, tensors, BandReader(reader, tensors, list(bands_of(tensors))))
    total_bytes = sum(band.size_bytes for band in bands_of(tensors))
    return {"step": values["step"], "tensors": len(tensors), "bytes": total_bytes}


def export_weights(reader: CheckpointReader, folder: Path, name: str, form: FileForm) -> dict[str, Any]:
    """Writes one model's weights as safetensors.

    Raises:
        ConfigurationError: the checkpoint has no object of that name.
        StateMismatch: safetensors, or the dtype in `form`, cannot represent them.
    """
    prefix = f"{name}/"
    tensors = {n: saved for n, saved in saved_tensors(reader).items() if n.startswith(prefix)}
    if not tensors:
        raise ConfigurationError(f"the checkpoint has no tensors of {name!r}: --name says which model's weights")
    bands = BandReader(reader, tensors, list(bands_of(tensors)))
    total_bytes = foreign_formats.write_safetensors(folder, tensors, bands, prefix, form)
    return {"step": read_values(reader.read_values(0))["step"], "tensors": len(tensors), "bytes": total_bytes}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="export a checkpoint of the persistent tier")
    parser.add_argument("--job", required=True, help="the job's uid")
    parser.add_argument("--step", type=int, help="default: the newest complete checkpoint")
    parser.add_argument("--to", type=Path, required=True, help="a folder")
    parser.add_argument("--as", dest="kind", choices=("dcp", "safetensors"), default="dcp")
    parser.add_argument("--name", default="model", help="whose weights go into safetensors (default: model)")
    parser.add_argument("--dtype", choices=foreign_formats.DTYPES, help="what floating point weights become")
    parser.add_argument("--file-bytes", type=int, default=foreign_formats.FILE_BYTES, help="the most of a weight file")
    args = parser.parse_args(arguments)
    form = FileForm(args.file_bytes, args.dtype)
    try:
        settings = job_settings({**os.environ, "SUREFOOT_JOB_UID": args.job}).persistent
        if settings is None:
            raise ConfigurationError("SUREFOOT_PERSISTENT_URI is not set: it names the tier to read")
        with open_checkpoint(persistent_source(settings, args.job), args.step) as reader:
            is_weights = args.kind == "safetensors"
            result = export_weights(reader, args.to, args.name, form) if is_weights else export_state(reader, args.to)
    except (SurefootError, OSError) as error:
        result = {"problem": str(error)}
    print(json.dumps(result))
    return 1 if "problem" in result else 0


if __name__ == "__main__":
    sys.exit(main())
