"""`python -m surefoot.tools.exporting --job UID [--step N] --to FOLDER --as dcp|safetensors [--name model]`

Writes a checkpoint of the persistent tier (named by the environment) as a plain folder of torch.distributed.checkpoint,
everything that all ranks share; or the weights of one model as Hugging Face safetensors. Every byte is verified as it is
read, and no more than a few bands of tensors are in memory. Prints one line of JSON: {"step", "tensors", "bytes"}, or
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
from surefoot.state.statedicts import state_dict_of
from surefoot.tools import dcp_folders, safetensors_files
from surefoot.tools.stream_copy import BandReader, bands_of, open_checkpoint, saved_tensors


def export(reader: CheckpointReader, to: Path, kind: str, name: str) -> dict[str, Any]:
    """Writes the checkpoint; what it wrote."""
    tensors = saved_tensors(reader)
    values = read_values(reader.values(0))
    if kind == "safetensors":
        prefix = f"{name}/"
        tensors = {n: what for n, what in tensors.items() if n.startswith(prefix)}
        if not tensors:
            raise ConfigurationError(f"the checkpoint has no tensors of {name!r}: --name says which model's weights")
        safetensors_files.write(to, tensors, BandReader(reader, tensors, list(bands_of(tensors))), prefix)
    else:
        whole = state_dict_of(tensors, values)
        dcp_folders.write(to, whole, tensors, BandReader(reader, tensors, list(bands_of(tensors))))
    total = sum(band.size_bytes for band in bands_of(tensors))
    return {"step": values["step"], "tensors": len(tensors), "bytes": total}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="export a checkpoint of the persistent tier")
    parser.add_argument("--job", required=True, help="the job's uid")
    parser.add_argument("--step", type=int, help="default: the newest complete checkpoint")
    parser.add_argument("--to", type=Path, required=True, help="a folder")
    parser.add_argument("--as", dest="kind", choices=("dcp", "safetensors"), default="dcp")
    parser.add_argument("--name", default="model", help="whose weights go into safetensors (default: model)")
    given = parser.parse_args(arguments)
    try:
        settings = job_settings({**os.environ, "SUREFOOT_JOB_UID": given.job}).persistent
        if settings is None:
            raise ConfigurationError("SUREFOOT_PERSISTENT_URI is not set: it names the tier to read")
        with open_checkpoint(persistent_source(settings, given.job), given.step) as reader:
            body = export(reader, given.to, given.kind, given.name)
    except (SurefootError, OSError) as error:
        body = {"problem": str(error)}
    print(json.dumps(body))
    return 1 if "problem" in body else 0


if __name__ == "__main__":
    sys.exit(main())
