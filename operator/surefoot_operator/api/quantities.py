"""Converts Kubernetes byte quantities: `8Gi`, `500M`, `1024`.

Pure; called by `spec_reader`.
"""

from __future__ import annotations

import re

_SUFFIX = {
    "": 1,
    "k": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "P": 1000**5,
    "Ki": 1024,
    "Mi": 1024**2,
    "Gi": 1024**3,
    "Ti": 1024**4,
    "Pi": 1024**5,
}
_QUANTITY = re.compile(r"(\d{1,18})(?:\.(\d{1,9}))?([kMGTP]?|[KMGTP]i)")

ALLOWED = "a positive number of bytes is allowed, such as 8Gi, 500M or 1048576"


def bytes_of(quantity: object) -> int | None:
    """The bytes that `quantity` says, or None where it is none. Fractions of a byte round up, as Kubernetes does."""
    if isinstance(quantity, bool) or not isinstance(quantity, int | str):
        return None
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        return None
    whole, fraction, suffix = match[1], match[2] or "", match[3]
    # in whole numbers: a float would lose bytes above 2**53
    scaled = int(whole + fraction) * _SUFFIX[suffix]
    return -(-scaled // int(10 ** len(fraction)))
