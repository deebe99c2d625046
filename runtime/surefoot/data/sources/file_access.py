"""`find_files` and `read_range` find a source's files and read them by ranges.

Local paths; `s3://` through boto3; and whatever fsspec has a file system for (`http://`, `gs://`, `hf://`, …). A file
that changes in the middle of a run would mix two data sets unseen: local and S3 reads each compare modification time or
ETag, and so do reads of web servers that keep `If-Match`; others are compared when a file is opened. A store that fails
or is slow is asked again, `TRIES` times.
"""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from glob import glob, has_magic
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import xxhash

from surefoot import metrics
from surefoot.data.data_source import DataError
from surefoot.errors import ConfigurationError
from surefoot.protocol.timeouts import Backoff

T = TypeVar("T")

TRIES = 5
WAITS = Backoff(0.2)
CALL_SECONDS = 60.0
SAMPLED_BYTES = 4096
CHUNK_BYTES = 1 << 20
PIECE_BYTES = 16 << 10
"""Of an answer's body: its time is looked at between two, as a read's own limit begins anew with each byte."""


class FileVersion(NamedTuple):
    """`FileAt` is one file as it was found.

    `tag` changes when it is written again (modification time or ETag; empty where the store tells neither). `identity`
    follows from size and content (an ETag, or a digest of begin, middle and end), so a copy elsewhere has the same;
    where the store gives no ETag, from size alone.
    """

    url: str
    size: int
    tag: str
    identity: str


def find_files(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[FileVersion]:
    """Returns the files that paths, URLs and patterns name.

    Sorted by name within each pattern.

    Raises:
        ConfigurationError: a pattern matches nothing, or a folder is among them.
        DataError: a file is not there, or its store does not answer.
    """
    wanted = [given] if isinstance(given, str | os.PathLike) else list(given)
    found: list[FileVersion] = []
    for one in wanted:
        url = os.fspath(one)
        names = sorted(names_of(url)) if has_magic(url) else [url]
        if not names:
            raise ConfigurationError(f"{url} names no file")
        for name in names:
            _reject_folder(name)
        found += [measured(name) for name in names]
    return found


def _reject_folder(url: str) -> None:
    path = _local(url)
    if path is not None and os.path.isdir(path):
        raise ConfigurationError(f"{url} is a folder: give a pattern of the files in it, as {url.rstrip('/')}/*.jsonl")


def measured(url: str) -> FileVersion:
    """Returns the file as it is now; one not there raises DataError."""
    return _patiently(url, lambda: _measured(url))


def read_range(file: FileVersion, start: int, stop: int) -> bytes:
    """Returns bytes `[start, stop)` of the file, cut at its end.

    Raises:
        DataError: it is gone, was changed, or its store does not answer.
    """
    stop = min(stop, file.size)
    if stop <= start:
        return b""
    body = _patiently(file.url, lambda: _read(file, start, stop))
    if len(body) != stop - start:
        raise _changed(file, f"gave {len(body)} bytes of {stop - start}")
    return body


def check(file: FileVersion) -> None:
    """Raises DataError where the file was changed since it was found.

    File sources do so whenever they open a shard.
    """
    size, tag = _patiently(file.url, lambda: _size_and_tag(file.url))
    if size != file.size or tag != file.tag:
        raise _changed(file, f"has {size} bytes and tag {tag or 'none'}")


def is_local(file: FileVersion) -> bool:
    """Tells whether its bytes lie on this machine.

    There a call costs little and a byte counts; of a store it is the other way round.
    """
    return _local(file.url) is not None


def opened(file: FileVersion) -> io.BufferedReader:
    """Returns the file as a buffered stream that can seek.

    Raises:
        DataError: it was changed since it was found.
    """
    check(file)
    return io.BufferedReader(_Ranges(file), CHUNK_BYTES)


class _Ranges(io.RawIOBase):
    """A file as ranges that are read when they are wanted."""

    def __init__(self, file: FileVersion) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = read_range(self._file, self._at, self._at + len(buffer))
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def _patiently(url: str, call: Callable[[], T]) -> T:
    """Returns the call's answer after up to `TRIES` tries with waits that double; a certain failure is final."""
    for number in range(TRIES):
        try:
            return call()
        except DataError:
            raise
        except FileNotFoundError as error:
            raise DataError(f"{url} is not there (any more): bring it back, or begin another job without it") from error
        except _failures() as error:
            if number == TRIES - 1:
                raise DataError(
                    f"{url} could not be read, in {TRIES} tries ({type(error).__name__}: {error}): see to its store; the"
                    " job goes on from its last checkpoint"
                ) from error
            metrics.fallbacks.labels(kind="data_read_again").inc()
            time.sleep(WAITS.wait_seconds(number + 1, random.random()))
    raise AssertionError("the last try returns or raises")


@lru_cache(maxsize=1)
def _failures() -> tuple[type[Exception], ...]:
    from botocore.exceptions import BotoCoreError, ClientError

    found: list[type[Exception]] = [OSError, TimeoutError, BotoCoreError, ClientError]
    try:
        from aiohttp import ClientError as HttpError
    except ImportError:
        return tuple(found)
    return (*found, HttpError)


def _changed(file: FileVersion, now: str) -> DataError:
    return DataError(
        f"{file.url} was changed: it had {file.size} bytes and tag {file.tag or 'none'} when it was found, and now {now}."
        " Bring the old file back, or begin another job with what is there now"
    )


def _scheme(url: str) -> str:
    return urlsplit(url).scheme if "://" in url else ""


def _local(url: str) -> str | None:
    if _scheme(url) == "file":
        return urlsplit(url).path
    return None if _scheme(url) else url


def names_of(pattern: str) -> list[str]:
    """Returns paths or URLs that match.

    Raises:
        DataError: the store does not answer, or cannot list.
    """
    if (path := _local(pattern)) is not None:
        return glob(path, recursive=True)
    if _scheme(pattern) == "s3":
        return _patiently(pattern, lambda: _s3_named(pattern))
    system = _system(_scheme(pattern), os.getpid())
    return _patiently(pattern, lambda: [system.unstrip_protocol(name) for name in system.glob(pattern)])


def _measured(url: str) -> FileVersion:
    if (path := _local(url)) is not None:
        about = os.stat(path)
        return FileVersion(url, about.st_size, str(about.st_mtime_ns), _sampled(path, about.st_size))
    if _scheme(url) == "s3":
        bucket, key = _s3_place(url)
        told = _s3_call(lambda: _s3(os.getpid()).head_object(Bucket=bucket, Key=key), url)
        return FileVersion(url, told["ContentLength"], told["ETag"], f"{told['ContentLength']} {told['ETag']}")
    try:
        told = _system(_scheme(url), os.getpid()).info(url)
    except FileNotFoundError as error:
        cause = error.__cause__  # fsspec says so of a web server whatever it answered, or did not
        if cause is None or getattr(cause, "status", None) in (404, 410):
            raise
        raise OSError(f"{type(cause).__name__}: {cause}") from error
    if told.get("size") is None:
        raise DataError(f"{url}: its store does not tell its size, so a change of it could not be noticed")
    tag = str(
        next((told[name] for name in ("ETag", "etag", "md5Hash", "Last-Modified", "mtime") if told.get(name)), "")
    )
    lasting = tag if told.get("ETag") or told.get("etag") or told.get("md5Hash") else ""
    return FileVersion(url, told["size"], tag, f"{told['size']} {lasting}")


def _size_and_tag(url: str) -> tuple[int, str]:
    """Returns size and tag as they are now; of a local file without a look at its content."""
    if (path := _local(url)) is not None:
        about = os.stat(path)
        return about.st_size, str(about.st_mtime_ns)
    now = _measured(url)
    return now.size, now.tag


def _sampled(path: str, size: int) -> str:
    """Returns size and a digest of begin, middle and end: a copy elsewhere, with another time, is the same file."""
    seen = xxhash.xxh3_64()
    with open(path, "rb") as file:
        for start in {0, max(0, size // 2 - SAMPLED_BYTES), max(0, size - SAMPLED_BYTES)}:
            seen.update(os.pread(file.fileno(), SAMPLED_BYTES, start))
    return f"{size} {seen.hexdigest()}"


def _read(file: FileVersion, start: int, stop: int) -> bytes:
    if (path := _local(file.url)) is not None:
        with open(path, "rb") as stream:
            about = os.fstat(stream.fileno())
            if (about.st_size, str(about.st_mtime_ns)) != (file.size, file.tag):
                raise _changed(file, f"has {about.st_size} bytes and tag {about.st_mtime_ns}")
            return os.pread(stream.fileno(), stop - start, start)
    if _scheme(file.url) == "s3":
        bucket, key = _s3_place(file.url)
        asked = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{stop - 1}", "IfMatch": file.tag}
        return _in_time(_s3_call(lambda: _s3(os.getpid()).get_object(**asked)["Body"], file.url))
    web = _scheme(file.url) in ("http", "https") and file.tag.startswith('"')  # a weak ETag matches nothing
    try:
        more = {"headers": {"If-Match": file.tag}} if web else {}
        return bytes(_system(_scheme(file.url), os.getpid()).cat_file(file.url, start=start, end=stop, **more))
    except Exception as error:
        if web and getattr(error, "status", None) == 412:
            raise _changed(file, "its ETag is another") from error
        raise


def _in_time(body: Any) -> bytes:
    """Returns all of an answer's body; raises TimeoutError where that takes longer than a call may."""
    end = time.monotonic() + CALL_SECONDS
    pieces = []
    while piece := body.read(PIECE_BYTES):
        pieces.append(piece)
        if time.monotonic() > end:
            raise TimeoutError(f"only {sum(map(len, pieces))} bytes came in {CALL_SECONDS:g} s")
    return b"".join(pieces)


@lru_cache(maxsize=8)
def _system(scheme: str, process: int) -> Any:
    """Returns fsspec's file system; one for each process, as connections do not survive a fork."""
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("http", "https"):
        from aiohttp import ClientTimeout

        options["client_kwargs"] = {"timeout": ClientTimeout(total=CALL_SECONDS)}
    try:
        return fsspec.filesystem(scheme, **options)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"{scheme}:// needs a file system that fsspec does not have here: {error}") from error


@lru_cache(maxsize=2)
def _s3(process: int) -> Any:
    """Returns a client for each process; endpoint and account are the environment's, as for checkpoints."""
    import boto3
    from botocore.config import Config

    limits = Config(connect_timeout=10, read_timeout=CALL_SECONDS, retries={"total_max_attempts": 1})
    return boto3.session.Session().client("s3", config=limits)


def _s3_place(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc, parts.path.lstrip("/")


def _s3_call(call: Callable[[], T], url: str) -> T:
    from botocore.exceptions import ClientError

    try:
        return call()
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in ("404", "NoSuchKey", "NoSuchBucket"):
            raise FileNotFoundError(url) from error
        if code in ("412", "PreconditionFailed"):
            raise DataError(
                f"{url} was changed: its ETag is another than when it was found. Bring the old object back, or begin"
                " another job with what is there now"
            ) from error
        if code in ("403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
            raise DataError(f"{url} may not be read ({code}): give the pods an account that may") from error
        raise


def _s3_named(pattern: str) -> list[str]:
    bucket, key = _s3_place(pattern)
    prefix = key[: next(at for at, letter in enumerate(key) if letter in "*?[")]
    pages = _s3(os.getpid()).get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    names = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
    return [f"s3://{bucket}/{name}" for name in names if fnmatchcase(name, key)]
