"""Bytes as people read them, in every sentence that holds numbers. PURE."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def amount(size_bytes: int) -> str:
    """Three digits and a decimal unit: `1.20 GB`, `512 bytes`."""
    value, unit = float(size_bytes), 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{size_bytes} bytes"
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"
