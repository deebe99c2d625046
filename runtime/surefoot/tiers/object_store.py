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
    """Keeps objects in one folder or below one bucket prefix.

    `put`, `read`, `checksum`, `sizes` and `folders` may be called by several threads at once.
    """

    @property
    def place(self) -> str:
        """The store's location, for people."""
        ...

    def put(self, path: str, *pieces: bytes | memoryview) -> None:
        """Writes an object, or writes it again.

        Args:
            path: Below the store.
            pieces: Its bytes, one piece behind the other; a reader sees all of them or what was there before.
        """
        ...

    def copy(self, source: str, path: str) -> bool:
        """Copies an object within the store.

        False: there is none of that name. Raises CopyRefused where the store never does it for this account.
        """
        ...

    def create(self, path: str, *pieces: bytes | memoryview, durable: bool = True) -> bool:
        """Writes if nothing is there.

        Of many callers exactly one gets True. `durable`: it survives a power cut; else `make_durable` sees to that.
        """
        ...

    def change(self, path: str, change: Change) -> None:
        """Replaces an object by a function of its content.

        Where somebody else wrote meanwhile the function is asked again.
        """
        ...

    def checksum(self, path: str) -> int | None:
        """Returns the CRC-32 that the store keeps of an object.

        None if nothing is there, or the place does not say.
        """
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Reads an object, or a part of it.

        Args:
            path: Below the store.
            offset: First byte.
            length: Bytes; fewer come where it ends before, and all without it.
        """
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Lists names and bytes of what lies directly in a folder.

        Empty where there is no such folder.
        """
        ...

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly in `folder`."""
        ...

    def expect(self, folder: str) -> None:
        """Raises TierUnavailable where a folder that was there is gone: a disk or mount went away.

        A bucket has no folders: what is gone there was deleted.
        """
        ...

    def make_durable(self, folder: str) -> None:
        """Returns when a folder would survive a power cut.

        With everything in it and the way to it.
        """
        ...

    def remove(self, path: str) -> None:
        """Removes one. Absent is success."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Removes all that is in `folder`, and it. Absent is success."""
        ...

    def close(self) -> None: ...


def read_exactly(store: ObjectStore, path: str, offset: int, length: int) -> bytes:
    """Reads exactly that range; ChunkMissing if the object is shorter."""
    data = store.read(path, offset, length) if length else b""
    if len(data) != length:
        raise ChunkMissing(f"{path} has {len(data)} of {length} bytes from {offset}")
    return data
