"""`python -m surefoot.tools.compare --job UID --with UID`: how far apart two runs' parameters are.

Takes the newest step that both have whole in the persistent tier (named by the environment), checks every byte of
both, and compares tensor by tensor. World sizes may differ: tensors are put together first. Prints one line of JSON:
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
    """How far two tensors are apart; `largest` None: not subtractable."""

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
    found: dict[str, tuple[str, Array]] = {}
    for _, manifest in sorted(ranks.items()):
        rank = read_rank(tier, manifest)
        for tensor in rank.stream.layout.tensors:
            if tensor.name not in found:
                found[tensor.name] = (tensor.dtype, _empty(tensor.dtype, tensor.shape))
        for part, index, block in rank.blocks():
            box = part.tiling.block_box(index)
            begin = [o + p for o, p in zip(box.offsets, part.piece.offsets, strict=True)]
            place = tuple(slice(o, o + n) for o, n in zip(begin, box.lengths, strict=True))
            dtype, whole = found[part.tensor.name]
            shape = box.lengths if dtype in _NATIVE else (*box.lengths, part.tiling.itemsize)
            whole[place] = np.frombuffer(block, whole.dtype).reshape(shape)
    return found


def _empty(dtype: str, shape: tuple[int, ...]) -> Array:
    if dtype in _NATIVE:
        return np.zeros(shape, np.dtype(dtype))
    from surefoot.format.layouts import itemsize

    return np.zeros((*shape, itemsize(dtype)), np.uint8)


def difference(name: str, dtype: str, mine: Array, other: Array) -> Difference:
    """Compares two tensors of one shape and type."""
    equal = mine.tobytes() == other.tobytes()
    if equal:
        return Difference(name, True, 0.0)
    if dtype == "bfloat16":  # the upper half of a float32
        mine, other = (_widened(a) for a in (mine, other))
    elif dtype not in _NATIVE:
        return Difference(name, False, None)
    kind = np.complex128 if np.iscomplexobj(mine) else np.float64
    gap = np.abs(mine.astype(kind) - other.astype(kind))
    largest = float(np.max(gap, initial=0.0))
    return Difference(name, False, largest if np.isfinite(largest) else None)


def _widened(pairs: Array) -> Array:
    halves: Array = np.ascontiguousarray(pairs).view("<u2")[..., 0].astype("<u4")
    widened: Array = (halves << 16).view("<f4")
    return widened


def compare(mine: dict[str, tuple[str, Array]], other: dict[str, tuple[str, Array]]) -> dict[str, Any]:
    """Compares parameters, and separately the state beside them.

    Parameters alone decide: optimizer state and each rank's RNG are reported only.
    """
    if mine.keys() != other.keys():
        only = sorted(mine.keys() ^ other.keys())
        shared_names = [name for name in only if not name.startswith("local/")]
        if shared_names:
            raise SurefootError(f"the checkpoints hold different tensors, the first is {shared_names[0]}")
    differences = []
    for name in sorted(mine.keys() & other.keys()):
        (dtype, a), (dtype_b, b) = mine[name], other[name]
        if (dtype, a.shape) != (dtype_b, b.shape):
            raise SurefootError(f"tensor {name} is {dtype}{a.shape} in one run and {dtype_b}{b.shape} in the other")
        differences.append(difference(name, dtype, a, b))
    parameters = [d for d in differences if is_parameter(d.name)]
    if not parameters:
        raise SurefootError("the checkpoints hold no parameters: no tensor has a model's name")
    unlike = [d.name for d in parameters if d.largest is None]
    if unlike:
        raise SurefootError(f"tensor {unlike[0]} differs and holds what cannot be subtracted")
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
    """Whether a tensor is a model's own, not an optimizer's or rank's."""
    first = name.split("/", 1)[0].split(".", 1)[0]
    return first not in ("local", "rng") and not first.startswith(("opt", "sched", "load"))


def newest_shared(mine: dict[Checkpoint, Any], other: dict[Checkpoint, Any]) -> tuple[Checkpoint, Checkpoint]:
    """The newest step complete in both, as each run's newest epoch's."""
    steps = [
        {c.step: c for c in sorted(found, key=lambda c: c.generation) if is_complete(found[c])}
        for found in (mine, other)
    ]
    shared = steps[0].keys() & steps[1].keys()
    if not shared:
        raise SurefootError(
            f"the runs share no step: one has {sorted(steps[0]) or 'none'}, the other {sorted(steps[1]) or 'none'};"
            " let both run longer, or save to the persistent tier more often"
        )
    return steps[0][max(shared)], steps[1][max(shared)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compare two jobs' newest common checkpoint in the persistent tier")
    parser.add_argument("--job", required=True, help="a job's uid")
    parser.add_argument("--with", dest="other", required=True, help="the other job's uid")
    given = parser.parse_args(arguments)
    try:
        mine, other = open_tier(given.job), open_tier(given.other)
        left, right = by_checkpoint(mine), by_checkpoint(other)
        a, b = newest_shared(left, right)
        body = {"step": a.step, **compare(read_tensors(mine, left[a]), read_tensors(other, right[b]))}
        mine.close()
        other.close()
    except SurefootError as error:
        body = {"problem": str(error)}
    print(json.dumps(body))
    return 1 if "problem" in body else 0


if __name__ == "__main__":
    sys.exit(main())
