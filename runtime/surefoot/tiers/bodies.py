"""Presents several pieces of memory as one request body, without copies.

Made by `s3` for each write.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Sequence
from zlib import crc32


class Body:
    """Gives an HTTP client pieces of memory as a file.

    Enough of a binary file for it, which may begin again for another try. Nothing is copied.
    """

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]
        self._size = sum(len(piece) for piece in self._pieces)
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def checksum(self) -> str:
        """Base64 of the CRC-32, as the protocol wants it."""
        found = 0
        for piece in self._pieces:
            found = crc32(piece, found)
        return b64encode(found.to_bytes(4, "big")).decode()

    def whole(self) -> bytes:
        return b"".join(self._pieces)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> memoryview | bytes:
        """Reads the rest of the piece it stands in.

        However little was asked for: clients ask for 16 KiB, and send what comes.
        """
        if size == 0:
            return b""
        skipped = 0
        for piece in self._pieces:
            if self._at < skipped + len(piece):
                found = piece[self._at - skipped :]
                self._at = skipped + len(piece)
                return found
            skipped += len(piece)
        return b""
