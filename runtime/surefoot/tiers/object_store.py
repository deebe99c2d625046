"""Defines the `ObjectStore` protocol, which a directory and S3 implement.

Paths are relative, with `/`. Every call raises the errors of `Tier`; a path that does not exist raises ChunkMissing.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import IO, Protocol, TypeVar
from zlib import crc32

from surefoot import metrics
from surefoot.errors import ChunkMissing, Corrupt, ObjectRefused, TierFull, TierUnavailable
from surefoot.protocol.timeouts import Backoff

log = logging.getLogger(__name__)


Change = Callable[[bytes | None], bytes | None]
"""Computes an object's new content from the current one (None: it does not exist); returns None to leave it."""


class ObjectStore(Protocol):
    """Stores objects in one folder or below one bucket prefix.

    Several threads may call `put`, `read`, `checksum`, `sizes` and `folders` concurrently.
    """

    @property
    def location(self) -> str:
        """The store's folder or bucket and prefix, for messages."""
        ...

    def put(self, path: str, *pieces: bytes | memoryview) -> None:
        """Writes or replaces an object.

        Args:
            path: Path of the object in the store.
            pieces: Its content in consecutive pieces. A reader sees either all of it or the previous content.
        """
        ...

    def copy(self, source: str, path: str) -> bool:
        """Copies an object within the store; False if `source` does not exist.

        Raises:
            CopyUnsupported: The store never copies for this account.
        """
        ...

    def create(self, path: str, *pieces: bytes | memoryview, durable: bool = True) -> bool:
        """Writes an object if it does not exist; of several concurrent callers exactly one gets True.

        `durable`: return only once the object survives a power failure; otherwise call `make_durable` later.
        """
        ...

    def change(self, path: str, change: Change) -> None:
        """Replaces an object by a function of its content; the function is called again if another writer was faster."""
        ...

    def checksum(self, path: str) -> int | None:
        """Returns the CRC-32 of an object; None if it does not exist or the store has no checksum of it."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Reads an object, or a part of it.

        Args:
            path: Path of the object in the store.
            offset: First byte.
            length: Number of bytes; fewer are returned if the object ends earlier. None: up to the end.
        """
        ...

    def list_sizes(self, folder: str) -> dict[str, int]:
        """Returns names and sizes of the objects directly in a folder; empty if there is no such folder."""
        ...

    def list_folders(self, folder: str) -> list[str]:
        """Returns the names of the folders directly in `folder`."""
        ...

    def check_folder_exists(self, folder: str) -> None:
        """Raises TierUnavailable if a folder that has existed is missing, because its disk or mount disappeared.

        Does nothing for a bucket, which has no folders: missing objects there were deleted.
        """
        ...

    def make_durable(self, folder: str) -> None:
        """Returns once a folder, its content and its parent folders would survive a power failure."""
        ...

    def remove(self, path: str) -> None:
        """Deletes an object; succeeds if it does not exist."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Deletes a folder and all its content; succeeds if it does not exist."""
        ...

    def close(self) -> None: ...


def read_exactly(store: ObjectStore, path: str, offset: int, length: int) -> bytes:
    """Reads exactly this range; raises ChunkMissing if the object is shorter."""
    data = store.read(path, offset, length) if length else b""
    if len(data) != length:
        raise ChunkMissing(f"{path} has {len(data)} of {length} bytes from {offset}")
    return data


# ---- parallel reads --------------------------------------------------------------------------------------------------
# Reads many small records of the persistent tier concurrently, as each is a round trip to a distant server, and reads
# damaged ones again.

A = TypeVar("A")
B = TypeVar("B")

MAX_CONCURRENT_READS = 16
"""Concurrent reads: a thousand of 50 ms take three seconds, and any server accepts that many connections."""
MAX_READ_ATTEMPTS = 3
"""Attempts to read a record before it counts as damaged or missing: a proxy or a cache may damage one answer."""
READ_BACKOFF = Backoff(0.1, 0.3)


def read_in_threads(read: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Reads several items in threads and returns the results in order; raises the first error in that order."""
    all_items = list(items)
    if len(all_items) < 2:
        return [read(item) for item in all_items]
    with ThreadPoolExecutor(min(MAX_CONCURRENT_READS, len(all_items)), thread_name_prefix="surefoot-reading") as pool:
        return list(pool.map(read, all_items))


def read_with_retries(read: Callable[[], B]) -> B:
    """Retries a read that finds a record damaged or missing; raises the error of the last attempt."""
    for attempt in range(1, MAX_READ_ATTEMPTS):
        try:
            return read()
        except (Corrupt, ChunkMissing):
            metrics.fallbacks.labels("bad_read_repeated").inc()
            time.sleep(READ_BACKOFF.wait_seconds(attempt, random.random()))
    return read()


# ---- directory -------------------------------------------------------------------------------------------------------
# Stores objects in a folder on a disk or a shared file system. Data is on the disk before the manifest that refers to
# it exists; the manifest is created by a hard link, which is atomic and exclusive, also on NFS. File systems have no
# timeouts: a hung mount hangs the caller, which is never a trainer.

_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}
_NO_LOCK_ERRORS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Errors of mounts without locks: Lustre without `flock`, some FUSE file systems."""
_FILE_ERRORS = {errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EBADMSG}
"""Read errors that may concern a single file while its disk is healthy."""
_BLOCK_BYTES = 1 << 20
_OWNER_MODE = 0o700


class DirectoryStore:
    """Stores objects as files below the folder `root`.

    The root is created only with `begin`: if later users created it too, they would start an empty tier when its disk
    disappeared. A root created here is accessible to its owner only. Files and folders below it get the root's
    permission bits, so a tier is shared by setting the mode of its root once. Files whose names start with a dot are
    being written.
    """

    def __init__(self, root: Path, create_root: bool = False) -> None:
        self._root = root
        if create_root:
            with self._translate_errors("opening", "it"):
                root.mkdir(mode=_OWNER_MODE, parents=True, exist_ok=True)

    @property
    def location(self) -> str:
        return str(self._root)

    def put(self, path: str, *pieces: bytes | memoryview) -> None:
        with self._translate_errors("writing", path):
            temporary = self._write(path, *pieces)
            os.replace(temporary, self._root / path)

    def copy(self, source: str, path: str) -> bool:
        with self._translate_errors("copying", source):
            temporary = self._write(path)
            try:
                shutil.copyfile(self._root / source, temporary)  # in the kernel
                os.replace(temporary, self._root / path)
            except FileNotFoundError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            return True

    def create(self, path: str, *pieces: bytes | memoryview, durable: bool = True) -> bool:
        with self._translate_errors("creating", path):
            temporary = self._write(path, *pieces)
            try:
                if durable:
                    _fsync(temporary)
                os.link(temporary, self._root / path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            if durable:
                _fsync((self._root / path).parent)
            return True

    def change(self, path: str, change: Change) -> None:
        with self._translate_errors("changing", path):
            folder = (self._root / path).parent
            self._make_folders(folder)
            with open(folder / f".{Path(path).name}.lock", "wb", opener=self._open_new) as lock:
                _lock(lock)
                try:
                    old_content = (self._root / path).read_bytes()
                except FileNotFoundError:
                    old_content = None
                new_content = change(old_content)
                if new_content is not None:
                    temporary = self._write(path, new_content)
                    _fsync(temporary)
                    os.replace(temporary, self._root / path)
                    _fsync(folder)

    def checksum(self, path: str) -> int | None:
        crc = 0
        with self._translate_errors("reading", path):
            try:
                with (self._root / path).open("rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        crc = crc32(block, crc)
            except FileNotFoundError:
                return None
        return crc

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._translate_errors("reading", path), (self._root / path).open("rb") as file:
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def list_sizes(self, folder: str) -> dict[str, int]:
        with self._translate_errors("listing", folder):
            sizes = {entry.name: _size_of(entry) for entry in self._list_entries(folder)}
        return {name: size for name, size in sizes.items() if size is not None}

    def list_folders(self, folder: str) -> list[str]:
        with self._translate_errors("listing", folder):
            return [entry.name for entry in self._list_entries(folder) if entry.is_dir()]

    def check_folder_exists(self, folder: str) -> None:
        path = self._root / folder
        with self._translate_errors("opening", folder):
            exists = path.is_dir()
        if not exists:
            raise TierUnavailable(
                f"folder {path} is missing although checkpoints were stored in it, and is not created again: check the"
                " disk or mount, or restore the folder from a copy"
            )

    def make_durable(self, folder: str) -> None:
        with self._translate_errors("flushing", folder):
            for entry in self._list_entries(folder):
                if entry.is_file():
                    _fsync(Path(entry.path))
            path = self._root / folder
            while path != self._root.parent:
                if path.exists():
                    _fsync(path)
                path = path.parent

    def remove(self, path: str) -> None:
        with self._translate_errors("removing", path):
            (self._root / path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        path = self._root / folder
        with self._translate_errors("removing", folder):
            if path.exists():
                shutil.rmtree(path)
            if path.parent == self._root:
                return  # the parent is the tier's own folder, often a mount
            try:
                path.parent.rmdir()  # succeeds for the last rank of a checkpoint
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise

    def close(self) -> None:
        """Does nothing: no file stays open."""

    def _write(self, path: str, *pieces: bytes | memoryview) -> Path:
        target = self._root / path
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{token_hex(4)}")
        try:
            try:
                _write_all(temporary, pieces, self._open_new)
            except FileNotFoundError:  # the first object in its folder
                self._make_folders(target.parent)
                _write_all(temporary, pieces, self._open_new)
        except OSError:
            temporary.unlink(missing_ok=True)  # an incomplete file would only take space
            raise
        return temporary

    def _make_folders(self, folder: Path) -> None:
        """Creates a folder and its parents below the root; a missing root means a lost disk and is not created."""
        mode = stat.S_IMODE(self._root.stat().st_mode)
        paths = [path for path in (folder, *folder.parents) if self._root in path.parents]
        for path in reversed(paths):
            path.mkdir(mode=mode & 0o777 | _OWNER_MODE, exist_ok=True)

    def _open_new(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, stat.S_IMODE(self._root.stat().st_mode) & 0o666 | 0o600)

    def _list_entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._root / folder) as entries:
                return [entry for entry in entries if not entry.name.startswith(".")]
        except FileNotFoundError:
            if not self._root.exists():
                raise  # the disk is not mounted: the tier is unavailable, not empty
            return []

    @contextmanager
    def _translate_errors(self, action: str, object_name: str) -> Iterator[None]:
        """Translates the file system's errors into those of `Tier`, with the path and a remedy."""
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._root.exists():
                raise ChunkMissing(f"{self._root} does not have {object_name}") from error
            text = f"folder {self._root}, {action} {object_name}: {error.strerror or error}"
            if error.errno in _FULL_ERRORS:
                raise TierFull(f"{text}: free space or keep fewer checkpoints") from error
            is_read = action == "reading" and error.errno in _FILE_ERRORS
            kind = ObjectRefused if is_read else TierUnavailable
            raise kind(f"{text}: check the disk or mount and its permissions") from error


def _size_of(entry: os.DirEntry[str]) -> int | None:
    """Returns a file's size; None if it is no file, or was deleted after it was listed."""
    try:
        return entry.stat().st_size if entry.is_file() else None
    except FileNotFoundError:
        return None


def _lock(file: IO[bytes]) -> None:
    """Locks a record until the file is closed. Without locks, the older of two concurrent changes may win."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCK_ERRORS:
            raise
        metrics.fallbacks.labels("directory_without_locks").inc()
        log.info("%s is on a file system without locks (%s): changing records unlocked", file.name, error.strerror)


def _write_all(path: Path, pieces: Sequence[bytes | memoryview], create: Callable[[str, int], int]) -> None:
    with open(path, "wb", buffering=0, opener=create) as file:
        for piece in pieces:
            unwritten = memoryview(piece)
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
