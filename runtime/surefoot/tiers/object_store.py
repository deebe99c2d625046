"""Defines the `ObjectStore` protocol that directory and S3 implement.

Paths are relative, with `/`. Every call raises from `surefoot.errors` as `Tier` says; a missing path is ChunkMissing.
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
"""What an object is to be, given what it is (None: absent); None leaves it."""


class ObjectStore(Protocol):
    """Keeps objects in one folder or below one bucket prefix.

    `put`, `read`, `checksum`, `sizes` and `folders` may be called by several threads at once.
    """

    @property
    def location(self) -> str:
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


# ---- parallel reads --------------------------------------------------------------------------------------------------
# Reads many small records of the persistent tier at once, and a bad one again. Each alone is a round trip to a server
# far away.

A = TypeVar("A")
B = TypeVar("B")

READERS = 16
"""Reads under way at once: a thousand at 50 ms take three seconds, and the connections are few enough for any server."""
LOOKS = 3
"""Reads of one record before it counts as damaged or gone: a proxy, or a cache, may spoil one answer."""
LOOK_WAITS = Backoff(0.1, 0.3)


def read_in_threads(read: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Reads several things in threads; results in their order.

    Raises what the first of them in that order raised.
    """
    wanted = list(items)
    if len(wanted) < 2:
        return [read(item) for item in wanted]
    with ThreadPoolExecutor(min(READERS, len(wanted)), thread_name_prefix="surefoot-reading") as pool:
        return list(pool.map(read, wanted))


def second_look(read: Callable[[], B]) -> B:
    """Reads again what came damaged or was not there; raises what the last read raised."""
    for look in range(1, LOOKS):
        try:
            return read()
        except (Corrupt, ChunkMissing):
            metrics.fallbacks.labels("bad_read_repeated").inc()
            time.sleep(LOOK_WAITS.seconds(look, random.random()))
    return read()


# ---- directory -------------------------------------------------------------------------------------------------------
# Stores objects in a folder: a disk, or a shared file system. Data is on the disk before the manifest that names it
# exists; the manifest appears by a hard link, which is atomic and exclusive, also over NFS. File systems give no time
# limits: a hung mount hangs the caller, which is never a trainer.

_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Of a mount that offers none: Lustre without `flock`, some of FUSE."""
_OF_ONE_FILE = {errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EBADMSG}
"""What a file alone may answer to a read, while its disk is well."""
_BLOCK_BYTES = 1 << 20
_OWNERS = 0o700


class DirectoryStore:
    """Keeps objects as files below a folder.

    `root` is made by who begins the tier, and by nobody else: who opens or writes later would begin an empty tier
    where a disk went away. Names that begin with a dot are being written. A root that is made here is its owner's
    alone; what lies below bears the root's own bits, so that whoever shares a tier says so once: by the mode of its
    folder.
    """

    def __init__(self, root: Path, begin: bool = False) -> None:
        self._root = root
        if begin:
            with self._explained("opening", "it"):
                root.mkdir(mode=_OWNERS, parents=True, exist_ok=True)

    @property
    def location(self) -> str:
        return str(self._root)

    def put(self, path: str, *pieces: bytes | memoryview) -> None:
        with self._explained("writing", path):
            temporary = self._write(path, *pieces)
            os.replace(temporary, self._root / path)

    def copy(self, source: str, path: str) -> bool:
        with self._explained("copying", source):
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
        with self._explained("creating", path):
            temporary = self._write(path, *pieces)
            try:
                if durable:
                    _sync(temporary)
                os.link(temporary, self._root / path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            if durable:
                _sync((self._root / path).parent)
            return True

    def change(self, path: str, change: Change) -> None:
        with self._explained("changing", path):
            folder = (self._root / path).parent
            self._make(folder)
            with open(folder / f".{Path(path).name}.lock", "wb", opener=self._create) as lock:
                _lock(lock)
                try:
                    before = (self._root / path).read_bytes()
                except FileNotFoundError:
                    before = None
                after = change(before)
                if after is not None:
                    temporary = self._write(path, after)
                    _sync(temporary)
                    os.replace(temporary, self._root / path)
                    _sync(folder)

    def checksum(self, path: str) -> int | None:
        found = 0
        with self._explained("reading", path):
            try:
                with (self._root / path).open("rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        found = crc32(block, found)
            except FileNotFoundError:
                return None
        return found

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._explained("reading", path), (self._root / path).open("rb") as file:
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def sizes(self, folder: str) -> dict[str, int]:
        with self._explained("listing", folder):
            found = {entry.name: _size(entry) for entry in self._entries(folder)}
        return {name: size for name, size in found.items() if size is not None}

    def folders(self, folder: str) -> list[str]:
        with self._explained("listing", folder):
            return [entry.name for entry in self._entries(folder) if entry.is_dir()]

    def expect(self, folder: str) -> None:
        path = self._root / folder
        with self._explained("opening", folder):
            is_there = path.is_dir()
        if not is_there:
            raise TierUnavailable(
                f"folder {path} is not there, though checkpoints were stored in it, and is not created again: check the"
                " disk or mount, or restore the folder from a copy"
            )

    def make_durable(self, folder: str) -> None:
        with self._explained("flushing", folder):
            for entry in self._entries(folder):
                if entry.is_file():
                    _sync(Path(entry.path))
            place = self._root / folder
            while place != self._root.parent:
                if place.exists():
                    _sync(place)
                place = place.parent

    def remove(self, path: str) -> None:
        with self._explained("removing", path):
            (self._root / path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        place = self._root / folder
        with self._explained("removing", folder):
            if place.exists():
                shutil.rmtree(place)
            if place.parent == self._root:
                return  # that is the tier's own folder, often a mount
            try:
                place.parent.rmdir()  # the last rank of a checkpoint takes its folder along
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise

    def close(self) -> None:
        """Nothing is kept open."""

    def _write(self, path: str, *pieces: bytes | memoryview) -> Path:
        target = self._root / path
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{token_hex(4)}")
        try:
            try:
                _write_all(temporary, pieces, self._create)
            except FileNotFoundError:  # the first of its folder
                self._make(target.parent)
                _write_all(temporary, pieces, self._create)
        except OSError:
            temporary.unlink(missing_ok=True)  # half of it would only take room
            raise
        return temporary

    def _make(self, folder: Path) -> None:
        """The folder and those above it, but not the root: one that went away is silent, not empty."""
        mode = stat.S_IMODE(self._root.stat().st_mode)
        above = [place for place in (folder, *folder.parents) if self._root in place.parents]
        for place in reversed(above):
            place.mkdir(mode=mode & 0o777 | _OWNERS, exist_ok=True)

    def _create(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, stat.S_IMODE(self._root.stat().st_mode) & 0o666 | 0o600)

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._root / folder) as entries:
                return [entry for entry in entries if not entry.name.startswith(".")]
        except FileNotFoundError:
            if not self._root.exists():
                raise  # an unmounted disk is silent, not empty
            return []

    @contextmanager
    def _explained(self, doing: str, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._root.exists():
                raise ChunkMissing(f"{self._root} does not have {what}") from error
            text = f"folder {self._root}, {doing} {what}: {error.strerror or error}"
            if error.errno in _FULL:
                raise TierFull(f"{text}: make room or keep fewer checkpoints") from error
            is_read = doing == "reading" and error.errno in _OF_ONE_FILE
            kind = ObjectRefused if is_read else TierUnavailable
            raise kind(f"{text}: check the disk or mount and its permissions") from error


def _size(entry: os.DirEntry[str]) -> int | None:
    """A file's size; None for what is no file, or was removed since it was listed."""
    try:
        return entry.stat().st_size if entry.is_file() else None
    except FileNotFoundError:
        return None


def _lock(file: IO[bytes]) -> None:
    """Locks a record until closed. Without locks two writers at once may leave the older one's."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        metrics.fallbacks.labels("directory_without_locks").inc()
        log.info("%s is on a file system without locks (%s): records are changed without", file.name, error.strerror)


def _write_all(path: Path, pieces: Sequence[bytes | memoryview], create: Callable[[str, int], int]) -> None:
    with open(path, "wb", buffering=0, opener=create) as file:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
