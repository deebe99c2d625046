"""Maps names of element types to their sizes, without importing torch."""

from __future__ import annotations

from surefoot.errors import StateMismatch

ITEMSIZE = {
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


def itemsize(dtype: str) -> int:
    """Bytes of one element; StateMismatch for a type that is not saved."""
    size = ITEMSIZE.get(dtype)
    if size is None:
        raise StateMismatch(
            f"element type {dtype!r} cannot be saved: convert the tensor, or keep it out of the checkpoint"
        )
    return size
