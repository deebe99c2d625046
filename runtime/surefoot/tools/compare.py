"""`python -m surefoot.tools.compare --job UID --with UID`: measures the difference between two runs' parameters.

Takes the newest step that is complete for both in the persistent tier (named by the environment), verifies every byte
of both, and compares tensor by tensor. World sizes may differ: tensors are assembled first. Prints one line of JSON:
{"step", "tensors", "max_difference", "bit_exact", "worst", "max_state_difference"}, or {"problem"}.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.errors import SurefootError
from surefoot.protocol.identities import Checkpoint
from surefoot.tiers.persistent import ObjectStoreTier
from surefoot.tools.rank_streams import Ranks, by_checkpoint, is_complete, layout_problem, open_tier, read_rank

Array = npt.NDArray[Any]

_NATIVE = {"float64", "float32", "float16", "complex128", "complex64", "bool"}
_NATIVE |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True, slots=True)
class Difference:
    """Describes the difference of two tensors; `largest` None: not finite, or not subtractable."""

    name: str
    equal: bool
    largest: float | None


def read_tensors(tier: ObjectStoreTier, ranks: Ranks) -> dict[str, tuple[str, Array]]:
    """Reads all tensors by name, each with its dtype.

    Types that numpy lacks are kept as rows of bytes along a last dimension.
    """
    problem = layout_problem(tier, ranks)
    if problem is not None:
        raise SurefootError(problem)
    tensors: dict[str, tuple[str, Array]] = {}
    for _, manifest in sorted(ranks.items()):
        rank = read_rank(tier, manifest)
        for tensor in rank.stream.layout.tensors:
            if tensor.name not in tensors:
                tensors[tensor.name] = (tensor.dtype, _empty(tensor.dtype, tensor.shape))
        for part, index, block in rank.blocks():
            box = part.tiling.block_box(index)
            starts = [o + p for o, p in zip(box.offsets, part.piece.offsets, strict=True)]
            region = tuple(slice(o, o + n) for o, n in zip(starts, box.lengths, strict=True))
            dtype, array = tensors[part.tensor.name]
            shape = box.lengths if dtype in _NATIVE else (*box.lengths, part.tiling.itemsize)
            array[region] = np.frombuffer(block, array.dtype).reshape(shape)
    return tensors


def _empty(dtype: str, shape: tuple[int, ...]) -> Array:
    if dtype in _NATIVE:
        return np.zeros(shape, np.dtype(dtype))
    from surefoot.format.layouts import itemsize

    return np.zeros((*shape, itemsize(dtype)), np.uint8)


def difference(name: str, dtype: str, left_array: Array, right_array: Array) -> Difference:
    """Compares two tensors of one shape and type."""
    equal = left_array.tobytes() == right_array.tobytes()
    if equal:
        return Difference(name, True, 0.0)
    if dtype == "bfloat16":  # the upper half of a float32
        left_array, right_array = (_widen(a) for a in (left_array, right_array))
    elif dtype not in _NATIVE:
        return Difference(name, False, None)
    wide_dtype = np.complex128 if np.iscomplexobj(left_array) else np.float64
    gap = np.abs(left_array.astype(wide_dtype) - right_array.astype(wide_dtype))
    largest = float(np.max(gap, initial=0.0))
    return Difference(name, False, largest if np.isfinite(largest) else None)


def _widen(pairs: Array) -> Array:
    halves: Array = np.ascontiguousarray(pairs).view("<u2")[..., 0].astype("<u4")
    floats: Array = (halves << 16).view("<f4")
    return floats


def compare(left_tensors: dict[str, tuple[str, Array]], right_tensors: dict[str, tuple[str, Array]]) -> dict[str, Any]:
    """Compares parameters, and separately all other state.

    The result depends on the parameters only: differences of optimizer state and of generators are just reported.
    """
    # per-rank tensors may differ, because the world sizes may; all others must exist in both runs
    if left_tensors.keys() != right_tensors.keys():
        unshared_names = sorted(left_tensors.keys() ^ right_tensors.keys())
        shared_names = [name for name in unshared_names if not name.startswith("local/")]
        if shared_names:
            raise SurefootError(f"the checkpoints hold different tensors, the first is {shared_names[0]}")
    differences = []
    for name in sorted(left_tensors.keys() & right_tensors.keys()):
        (dtype, a), (dtype_b, b) = left_tensors[name], right_tensors[name]
        if (dtype, a.shape) != (dtype_b, b.shape):
            raise SurefootError(f"tensor {name} is {dtype}{a.shape} in one run and {dtype_b}{b.shape} in the other")
        differences.append(difference(name, dtype, a, b))
    parameters = [d for d in differences if is_parameter(d.name)]
    if not parameters:
        raise SurefootError("the checkpoints hold no parameters: no tensor has a model's name")
    not_subtractable = [d.name for d in parameters if d.largest is None]
    if not_subtractable:
        raise SurefootError(f"tensor {not_subtractable[0]} differs and holds what cannot be subtracted")
    worst = max(parameters, key=lambda d: d.largest or 0.0)
    return {
        "tensors": len(parameters),
        "max_difference": worst.largest,
        "bit_exact": all(d.equal for d in parameters),
        "worst": worst.name,
        "max_state_difference": max((d.largest for d in differences if d.largest is not None), default=0.0),
        "state_bit_exact": all(d.equal for d in differences),
    }


def is_parameter(name: str) -> bool:
    """Returns whether a tensor belongs to a model, not to an optimizer or to one rank."""
    first = name.split("/", 1)[0].split(".", 1)[0]
    return first not in ("local", "rng") and not first.startswith(("opt", "sched", "load"))


def newest_shared(left_run: dict[Checkpoint, Any], right_run: dict[Checkpoint, Any]) -> tuple[Checkpoint, Checkpoint]:
    """Returns the newest step that is complete in both runs, each of its run's newest generation."""
    checkpoints_by_step = [
        {
            c.step: c
            for c in sorted(ranks_by_checkpoint, key=lambda c: c.generation)
            if is_complete(ranks_by_checkpoint[c])
        }
        for ranks_by_checkpoint in (left_run, right_run)
    ]
    shared_steps = checkpoints_by_step[0].keys() & checkpoints_by_step[1].keys()
    if not shared_steps:
        raise SurefootError(
            f"the runs share no step: one has {sorted(checkpoints_by_step[0]) or 'none'}, the other"
            f" {sorted(checkpoints_by_step[1]) or 'none'}; let both run longer, or save to the persistent tier more often"
        )
    return checkpoints_by_step[0][max(shared_steps)], checkpoints_by_step[1][max(shared_steps)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compare two jobs' newest common checkpoint in the persistent tier")
    parser.add_argument("--job", required=True, help="a job's uid")
    parser.add_argument("--with", dest="other", required=True, help="the other job's uid")
    args = parser.parse_args(arguments)
    try:
        left_tier, right_tier = open_tier(args.job), open_tier(args.other)
        left_ranks, right_ranks = by_checkpoint(left_tier), by_checkpoint(right_tier)
        left_checkpoint, right_checkpoint = newest_shared(left_ranks, right_ranks)
        result = {
            "step": left_checkpoint.step,
            **compare(
                read_tensors(left_tier, left_ranks[left_checkpoint]),
                read_tensors(right_tier, right_ranks[right_checkpoint]),
            ),
        }
        left_tier.close()
        right_tier.close()
    except SurefootError as error:
        result = {"problem": str(error)}
    print(json.dumps(result))
    return 1 if "problem" in result else 0


if __name__ == "__main__":
    sys.exit(main())
