"""From what each life of a program wrote down to one row. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compatibility.rows import Row

TOLERANCE = 1e-12
"""Over ranks, and at another size: sums in another order."""


@dataclass(slots=True)
class Life:
    """What one rank wrote down. `failure`: (kind, sentence), kind being ours, other, crashed (by a signal: no peer's doing), or silence."""

    restored: int | None = None
    losses: dict[int, float] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)
    picture: Mapping[str, Any] | None = None
    failure: tuple[str, str] | None = None

    @property
    def reached(self) -> int:
        return max(self.losses, default=self.restored or 0)


Lives = Sequence[Life]
"""One of each rank."""


def judged(about: tuple[str, str, str], whole: Lives, killed: Lives, resumed: Lives, steps: int) -> Row:
    """The row; about: area, name, world."""
    resized = about[2] != "same"
    for number, lives in enumerate((whole, killed, resumed)):
        failed = [life for life in lives if life.failure is not None]
        if failed:
            return Row(*about, *_of_failure(min(failed, key=_guilt), number, resized))
    start = resumed[0].restored or 0
    if start < 1:
        return Row(*about, "wrong", "nothing was restored after the kill")
    tolerance = 0.0 if len(whole) == len(resumed) == 1 else TOLERANCE
    differing = _differing(whole, resumed, start, steps, tolerance)
    if differing is not None:
        return Row(*about, "wrong", f"went on from step {start}, then {differing}")
    exactly = "to the last bit" if not tolerance else f"to {tolerance:g}"
    chain = about[2] if "→" in about[2] else f"{len(killed)}→{len(resumed)}"
    ranks = f"; {chain} ranks" if max(len(killed), len(resumed)) > 1 else ""
    return Row(*about, "exact", f"equal {exactly}{ranks}")


def _guilt(life: Life) -> int:
    """First the rank that says something of its own or was killed by a signal, last those that missed their peer."""
    kind, text = life.failure or ("silence", "")
    if any(sign in text for sign in ("gloo/transport", "Connection reset", "Connection closed by peer")):
        return 3
    return {"ours": 0, "crashed": 1, "other": 1, "silence": 2}[kind]


def _of_failure(life: Life, number: int, resized: bool) -> tuple[str, str]:
    kind, text = life.failure or ("silence", "")
    in_time = life.reached <= 1 if number < 2 else (resized and not life.losses)
    if kind == "ours" and in_time:
        return "rejected", text
    when = ("undisturbed", "until it was killed", "after the kill")[number]
    return "wrong", f"{when}, after step {life.reached}: {text}"


def _differing(whole: Lives, resumed: Lives, start: int, steps: int, tolerance: float) -> str | None:
    for step in range(start + 1, steps + 1):
        was, now = whole[0].losses.get(step), resumed[0].losses.get(step)
        if was is None or now is None or not close(was, now, tolerance):
            return f"step {step} has loss {now}, undisturbed {was}"
        if whole[0].samples:
            drawn = [[life.samples.get(step, []) for life in lives] for lives in (whole, resumed)]
            if len(whole) != len(resumed):
                drawn = [[sorted(number for part in parts for number in part)] for parts in drawn]
            if drawn[0] != drawn[1]:
                return f"step {step} has samples {drawn[1]}, undisturbed {drawn[0]}"
    for rank, (a, b) in enumerate(zip(whole, resumed, strict=False)):
        name = unlike(a.picture or {}, b.picture or {}, tolerance)
        if name is not None:
            return f"at the end {name} of rank {rank} differs"
    return None


def unlike(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> str | None:
    """The first name at which two pictures differ."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other or not _alike(one[name], other[name], tolerance):
            return name
    return None


def close(one: float, other: float, tolerance: float) -> bool:
    return one == other or abs(one - other) <= tolerance * max(1.0, abs(one), abs(other))


def _alike(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if not tolerance or not one.is_floating_point():
            return torch.equal(one, other)
        return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        return close(one, other, tolerance)
    return bool(type(one) is type(other) and one == other)
