"""Defines the `ObjectStore` protocol that directory and S3 implement.

Paths are relative, with `/`. Every call raises from `surefoot.errors` as `Tier` says; a missing path is ChunkMissing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from surefoot.errors import ChunkMissing

Change = Callable[[bytes | None], bytes | None]
"""What an object is to be, given what it is (None: absent); None leaves it."""


class ObjectStore(Protocol):
    """One folder or one bucket prefix. `put`, `read`, `checksum`, `sizes` and `folders` may be called by several threads at once."""

    @property
    def place(self) -> str:
        """Where it is, for people."""
        ...

    def put(self, path: str, *pieces: bytes | memoryview) -> None:
        """Writes the pieces, one behind the other, or writes again; a reader sees all of it or what was there before."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Writes durably if nothing is there; False if something is. Of many callers exactly one gets True."""
        ...

    def change(self, path: str, change: Change) -> None:
        """Writes what `change` makes of what is there, unless somebody else wrote meanwhile: then it is asked again."""
        ...

    def checksum(self, path: str) -> int | None:
        """CRC-32 of what is kept there; None if nothing is, or the place does not say."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `offset`, or fewer where it ends before; all of it without `length`."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Name → bytes of what lies directly in `folder`; empty where there is no such folder."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly in `folder`."""
        ...

    def make_durable(self, folder: str) -> None:
        """Returns when everything in `folder`, and the way to it, would survive a power cut."""
        ...

    def remove(self, path: str) -> None:
        """Removes one. Absent is success."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Removes all that is in `folder`, and it. Absent is success."""
        ...

    def close(self) -> None: ...


def read_exactly(store: ObjectStore, path: str, offset: int, length: int) -> bytes:
    """All of that range; ChunkMissing if the object is shorter."""
    data = store.read(path, offset, length) if length else b""
    if len(data) != length:
        raise ChunkMissing(f"{path} has {len(data)} of {length} bytes from {offset}")
    return data
