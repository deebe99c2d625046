"""Encodes a rank's plain values with torch's small types, as bytes.

Called by `program`; nothing that was saved is ever run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from surefoot.format.values import TAG, Inner, decode_values, encode_values
from surefoot.state import rng
from surefoot.state.entries import dtype_name, dtype_named
from surefoot.state.trees import Mark

_ATTRIBUTES = {kind.__name__: kind for kind in (torch.memory_format, torch.layout, torch.qscheme)}
"""Kinds whose few values are attributes of torch, by the name that they print."""


def values_blob(body: Mapping[str, Any]) -> bytes:
    """Encodes a rank's values with the state of the random generators.

    `random` in the body, if it is there, goes before the generators' present state.
    """
    return encoded({**body, "random": body.get("random") or rng.captured()})


def encoded(body: Mapping[str, Any]) -> bytes:
    return encode_values(body, _said)


def read_values(blob: bytes) -> dict[str, Any]:
    """Decodes what `values_blob` encoded."""
    return decode_values(blob, _read)


def _said(value: Any, inner: Inner) -> dict[str, Any] | None:
    kind = type(value)
    if kind is Mark:
        return {TAG: "tensor", "of": value.name} | ({} if value.facts is None else {"facts": inner(dict(value.facts))})
    if kind is torch.Size:
        return {TAG: "torch.Size", "of": list(value)}
    if kind is torch.dtype:
        return {TAG: "torch.dtype", "of": dtype_name(value)}
    if kind is torch.device:
        return {TAG: "torch.device", "of": str(value)}
    if kind.__name__ in _ATTRIBUTES and kind is _ATTRIBUTES[kind.__name__]:
        return {TAG: f"torch.{kind.__name__}", "of": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.dtype) and not value.hasobject and value.names is None:
        return {TAG: "numpy.dtype", "of": value.str}
    return None


def _read(tag: str, body: Mapping[str, Any], inner: Inner) -> Any:
    """Raises KeyError for a kind that is none of these."""
    of = body["of"]
    match tag:
        case "tensor":
            return Mark(str(of), inner(body["facts"]) if "facts" in body else None)
        case "torch.Size":
            return torch.Size(of)
        case "torch.dtype":
            return dtype_named(str(of))
        case "torch.device":
            return torch.device(str(of))
        case "numpy.dtype":
            import numpy  # only where such a value was saved

            return numpy.dtype(str(of))
    kind = _ATTRIBUTES[tag.removeprefix("torch.")]
    found = getattr(torch, str(of), None)
    if not isinstance(found, kind):
        raise ValueError(f"torch has no {tag} {of}")
    return found
