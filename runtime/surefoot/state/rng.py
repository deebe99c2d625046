"""Captures the generators of python, numpy, torch and CUDA as values.

They return to the same rank of a world of the same size; any other world seeds them from (seed, rank, step), so that
no two ranks draw alike and a restart is reproducible. Used by `program`.
"""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from typing import Any

import torch


def captured() -> dict[str, Any]:
    """State of every generator that this process has."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": array("I", words).tobytes(), "gauss": gauss},
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {"name": name, "keys": keys, "at": [int(position), int(has_gauss), float(cached)]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it so
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def returned(state: dict[str, Any]) -> None:
    """Sets the generators; those that this process lacks are skipped."""
    python = state["python"]
    random.setstate((python["version"], tuple(array("I", python["words"])), python["gauss"]))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kept = state["numpy"]
        numpy.random.set_state((kept["name"], kept["keys"], *kept["at"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))


def derived(seed: int, rank: int, step: int) -> None:
    """Seeds every generator from what is known in any world."""
    digest = hashlib.blake2b(f"{seed}:{rank}:{step}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    random.seed(number)
    torch.manual_seed(number)  # CUDA's too, also before CUDA is initialised
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)
