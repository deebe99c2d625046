"""Stores objects in an S3 bucket, through botocore.

Any server that keeps `If-None-Match: *` and `If-Match` for writes will do. Every request has time limits and at most
three tries with jittered waits (botocore's standard mode), and is counted, tries apart. A repeated conditional write
that had succeeded unseen answers 412, and the caller compares: equal is success. What is written goes with its CRC-32,
which the server checks and keeps. Messages carry the server's error code and nothing else of its answer, since some
quote the account.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from surefoot import metrics
from surefoot.errors import ChunkMissing, CopyUnsupported, ObjectRefused, TierFull, TierUnavailable
from surefoot.protocol.timeouts import Backoff
from surefoot.settings import PersistentSettings
from surefoot.tiers.object_store import READERS, Change
from surefoot.tiers.tier import Body

if TYPE_CHECKING:
    from botocore.loaders import Loader
    from botocore.session import Session
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CopySourceTypeDef

log = logging.getLogger(__name__)


# ---- s3 client -------------------------------------------------------------------------------------------------------
# Makes clients of S3 servers. With time limits, few tries, and each request counted. A tier is opened for each
# promotion and each listing. Without a memory of botocore's description of S3 each time parsed it anew, which took
# longer than uploading a tenth of a GB.


def session_of() -> Session:
    """A session of its own, with botocore's files shared.

    Credentials may change between two, where they come from the environment.
    """
    session = botocore.session.Session()
    session.register_component("data_loader", _descriptions())
    # of each object that a listing names; parsing them took longer than all the rest of it, and nobody looks at one
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    return session


def client_of(settings: PersistentSettings, session: Session, signs_bodies: bool) -> S3Client:
    """A client with connections of its own.

    With `signs_bodies` each body is hashed for its signature.
    """
    config = Config(
        connect_timeout=3,
        read_timeout=15,
        retries={"mode": "standard", "total_max_attempts": 3},
        max_pool_connections=READERS,
        # botocore's own are sent in a trailer, which other servers often lack: ours goes in a header
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={
            "addressing_style": "path" if settings.endpoint else "auto",
            "payload_signing_enabled": signs_bodies,
        },
    )
    made = session.create_client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region or "us-east-1",
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        verify=settings.ca_bundle or None,
        config=config,
    )
    made.meta.events.register("before-send.s3", _count)
    return cast("S3Client", made)


def in_clear(settings: PersistentSettings) -> bool:
    """Whether no TLS guards what is sent."""
    return settings.endpoint is not None and urlsplit(settings.endpoint).scheme == "http"


def code_of(error: ClientError) -> str:
    """The server's own word for what went wrong."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))


@cache
def _descriptions() -> Loader:
    """Botocore's files, each read once in a process; 12 MB stay in memory."""
    return cast("Loader", botocore.session.Session().get_component("data_loader"))


def _count(request: Any, event_name: str, **_: Any) -> None:
    """Counts each try of a request, as it leaves."""
    told = request.headers.get("amz-sdk-request", b"")
    first = "attempt=1" in (told.decode() if isinstance(told, bytes) else told)
    metrics.s3_requests.labels(event_name.rsplit(".", 1)[-1], "first" if first else "retry").inc()


# ---- s3 uploads ------------------------------------------------------------------------------------------------------
# Sends bodies to S3, hashed no more often than their server needs. In clear botocore signs the SHA-256 of every body,
# and hashing it cost both ends more than sending it. A large body goes without once the server has shown that it checks
# the CRC-32, which is signed with the other headers: an answer names it. A body whose own answer does not, or that is
# refused, is sent again, signed: no store loses its guard unseen.

_SMALL_BYTES = 64 * 1024
_REJECTED = {
    *("AccessDenied", "403", "InvalidRequest", "InvalidArgument", "InvalidDigest", "400"),
    *("SignatureDoesNotMatch", "XAmzContentSHA256Mismatch", "NotImplemented", "501"),
}
"""What servers answer that want every body signed; some of it also says that nobody may write."""
_signing: set[str] = set()
"""Servers of this process that took a body only signed, by endpoint: the tier is opened anew for each promotion."""
_lock = threading.Lock()
_NOT_CHECKED = "its answer names no checksum"


class Uploads:
    """Writes objects, hashing large bodies only where it must.

    One client signs bodies, a second one, opened when it is wanted, does not. `put` may be called by several threads at once.
    """

    def __init__(self, client: S3Client, endpoint: str, open_unsigned: Callable[[], S3Client] | None) -> None:
        """`open_unsigned` is None where `client` signs no bodies itself, as over TLS."""
        self._client = client
        self._endpoint = endpoint
        self._open = open_unsigned
        self._unsigned: S3Client | None = None
        self._is_checked = False

    def put(self, body: Body, told: Mapping[str, Any]) -> None:
        """Writes an object.

        Args:
            body: Its bytes.
            told: Further arguments of `PutObject`.
        """
        told = {**told, "ChecksumCRC32": body.checksum()}
        # a small body goes as bytes: for one that is read, botocore first waits for the server's leave
        is_small = len(body) <= _SMALL_BYTES
        refusal = None if is_small or not self._is_checked else self._sent_unsigned(body, told)
        if refusal == "":
            return
        if refusal == _NOT_CHECKED:
            # the unsigned request created the object: "only if it is not there" would refuse the signed bytes
            told.pop("IfNoneMatch", None)
        body.seek(0)
        answer = self._client.put_object(Body=body.whole() if is_small else body, **told)  # type: ignore[arg-type]
        self._is_checked = answer.get("ChecksumCRC32") == told["ChecksumCRC32"]
        if refusal:
            self._note(refusal)

    def close(self) -> None:
        if self._unsigned is not None:
            self._unsigned.close()

    def _sent_unsigned(self, body: Body, told: Mapping[str, Any]) -> str | None:
        """Empty: it is there and was checked. None: not tried. Else why it has to be sent signed."""
        client = self._unsigned_client()
        if client is None:
            return None
        body.seek(0)
        try:
            answer = client.put_object(Body=body, **told)  # type: ignore[arg-type]
        except ClientError as error:
            if code_of(error) not in _REJECTED:
                raise
            return code_of(error)
        return "" if answer.get("ChecksumCRC32") == told["ChecksumCRC32"] else _NOT_CHECKED

    def _unsigned_client(self) -> S3Client | None:
        if self._open is None or self._endpoint in _signing:
            return None
        with _lock:
            if self._unsigned is None:
                self._unsigned = self._open()
            return self._unsigned

    def _note(self, refusal: str) -> None:
        metrics.fallbacks.labels("s3_body_signed").inc()
        with _lock:
            is_new = self._endpoint not in _signing
            _signing.add(self._endpoint)
        if is_new:
            log.warning("%s takes a body only signed (%s): each is hashed for it from now on", self._endpoint, refusal)


# ---- s3 --------------------------------------------------------------------------------------------------------------

_MISSING = {"NoSuchKey", "404", "InvalidRange", "416"}
_FULL = {"QuotaExceeded", "InsufficientStorage", "InsufficientCapacity", "XMinioStorageFull", "507"}
_EXISTS = {"PreconditionFailed", "412"}
_RACING = {"ConditionalRequestConflict", "409"}
_NEVER = {"NotImplemented", "501", "MethodNotAllowed", "405", "AccessDenied", "403", "InvalidRequest", "400"}
"""What a server answers that does not copy objects, or not for this account."""
_BUSY = {"SlowDown", "503", "ServiceUnavailable", "Throttling", "TooManyRequests", "429", "RequestTimeout", "504"}
"""Said of the whole server, whatever object was asked for."""
_BATCH = 1000
_RACE_TRIES = 5
"""Of a conditional write that met another one under way."""
_RACE_WAITS = Backoff(0.05)
_CHANGE_TRIES = 20


class S3Store:
    """Everything below `s3://bucket/prefix`. The bucket must exist."""

    def __init__(self, settings: PersistentSettings, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._extra = _encryption(settings.sse)
        session, signs = session_of(), in_clear(settings)
        self._client: S3Client = client_of(settings, session, signs)
        open_unsigned = (lambda: client_of(settings, session, False)) if signs else None
        self._uploads = Uploads(self._client, str(settings.endpoint), open_unsigned)

    @property
    def location(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def put(self, path: str, *pieces: bytes | memoryview) -> None:
        self._put(path, pieces, "writing")

    def copy(self, source: str, path: str) -> bool:
        origin: CopySourceTypeDef = {"Bucket": self._bucket, "Key": self._key(source)}
        try:
            with self._explained("copying", source):
                try:
                    self._client.copy_object(
                        Bucket=self._bucket,
                        Key=self._key(path),
                        CopySource=origin,
                        ChecksumAlgorithm="CRC32",
                        **self._extra,
                    )
                except ClientError as error:
                    if code_of(error) in _NEVER:
                        raise CopyUnsupported(f"s3://{self._bucket} does not copy {source}: {code_of(error)}") from None
                    raise
        except ChunkMissing:
            return False
        return True

    def create(self, path: str, *pieces: bytes | memoryview, durable: bool = True) -> bool:
        return self._put(path, pieces, "creating", {"IfNoneMatch": "*"})

    def change(self, path: str, change: Change) -> None:
        for _ in range(_CHANGE_TRIES):
            before, condition = self._versioned(path)
            after = change(before)
            if after is None or self._put(path, (after,), "changing", condition):
                return
            metrics.fallbacks.labels("s3_changed_meanwhile").inc()
        raise TierUnavailable(
            f"s3://{self._bucket}, changing {path}: others changed it {_CHANGE_TRIES} times meanwhile"
        )

    def checksum(self, path: str) -> int | None:
        try:
            with self._explained("asking for", path):
                answer = self._client.head_object(Bucket=self._bucket, Key=self._key(path), ChecksumMode="ENABLED")
        except ChunkMissing:
            return None
        told = answer.get("ChecksumCRC32", "")
        return int.from_bytes(b64decode(told), "big") if told else None

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        last = "" if length is None else str(offset + length - 1)
        asked: dict[str, Any] = {"Range": f"bytes={offset}-{last}"} if offset or length is not None else {}
        with self._explained("reading", path):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(path), **asked)
            return answer["Body"].read()

    def sizes(self, folder: str) -> dict[str, int]:
        start = self._key(folder) + "/"
        return {
            entry["Key"].removeprefix(start): entry["Size"]
            for page in self._pages(folder, "/")
            for entry in page.get("Contents", [])
        }

    def folders(self, folder: str) -> list[str]:
        start = self._key(folder) + "/"
        return [
            entry["Prefix"].removeprefix(start).rstrip("/")
            for page in self._pages(folder, "/")
            for entry in page.get("CommonPrefixes", [])
        ]

    def expect(self, folder: str) -> None:
        """What is gone from a bucket was deleted."""

    def make_durable(self, folder: str) -> None:
        """An object that was acknowledged is durable."""

    def remove(self, path: str) -> None:
        with self._explained("removing", path):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(path))

    def remove_folder(self, folder: str) -> None:
        names = [entry["Key"] for page in self._pages(folder, "") for entry in page.get("Contents", [])]
        with self._explained("removing", folder):
            for batch in (names[start : start + _BATCH] for start in range(0, len(names), _BATCH)):
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": name} for name in batch], "Quiet": True}
                )
                if answer.get("Errors"):
                    codes = ", ".join(sorted({e.get("Code", "unknown") for e in answer["Errors"]}))
                    raise TierUnavailable(f"s3://{self._bucket} did not remove all of {folder}: {codes}")

    def close(self) -> None:
        self._uploads.close()
        self._client.close()

    def _put(
        self, path: str, pieces: Sequence[bytes | memoryview], doing: str, condition: Mapping[str, str] | None = None
    ) -> bool:
        """False if the condition does not hold."""
        body = Body(pieces)
        told = {"Bucket": self._bucket, "Key": self._key(path), **self._extra, **(condition or {})}
        with self._explained(doing, path):
            for attempt in range(_RACE_TRIES):
                try:
                    self._uploads.put(body, told)
                except ClientError as error:
                    if condition and code_of(error) in _EXISTS:
                        return False
                    if code_of(error) not in _RACING or attempt == _RACE_TRIES - 1:
                        raise
                    time.sleep(_RACE_WAITS.seconds(attempt + 1, random.random()))
                else:
                    return True
        raise AssertionError("unreachable: the last try returned or raised")

    def _versioned(self, path: str) -> tuple[bytes | None, dict[str, str]]:
        """Reads an object with the condition that it is unchanged."""
        try:
            with self._explained("reading", path):
                answer = self._client.get_object(Bucket=self._bucket, Key=self._key(path))
                return answer["Body"].read(), {"IfMatch": answer["ETag"]}
        except ChunkMissing:
            return None, {"IfNoneMatch": "*"}

    def _pages(self, folder: str, delimiter: str) -> Iterable[Any]:
        with self._explained("listing", folder):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._key(folder) + "/", Delimiter=delimiter
            )
            found = list(pages)
        if any("IsTruncated" not in page for page in found):
            # a portal's page is well-formed too, and would make the bucket look empty
            raise TierUnavailable(
                f"s3://{self._bucket}, listing {folder}: the answer is no listing; check that the endpoint is an S3 server"
            )
        return found

    def _key(self, path: str) -> str:
        return f"{self._prefix}{path}"

    @contextmanager
    def _explained(self, doing: str, what: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            code = code_of(error)
            text = f"s3://{self._bucket}, {doing} {what}"
            if code in _MISSING:
                raise ChunkMissing(f"{text}: it is not there") from None
            if code in _FULL:
                raise TierFull(f"{text}: {code}: make room or keep fewer checkpoints") from None
            hint = _HINTS.get(code, "the server could not do it now")
            is_read = doing == "reading" and code not in _BUSY
            kind = ObjectRefused if is_read else TierUnavailable
            raise kind(f"{text}: {code}: {hint}") from None
        except (BotoCoreError, OSError) as error:
            # botocore's texts name endpoints and time limits, never keys
            raise TierUnavailable(f"s3://{self._bucket}, {doing} {what}: {type(error).__name__}: {error}") from None


_HINTS = {
    "AccessDenied": "allow the job's account to list, get, put and delete here",
    "403": "allow the job's account to list, get, put and delete here",
    "InvalidAccessKeyId": "the secret's access key is not known there",
    "XAdminUserNotFound": "the secret's access key is not known there",
    "SignatureDoesNotMatch": "the secret's secret key is not the right one",
    "ExpiredToken": "the credentials have expired",
    "NoSuchBucket": "create the bucket, or correct checkpoint.persistent.uri",
}


def _encryption(sse: str | None) -> dict[str, Any]:
    """`AES256`, `aws:kms`, or `aws:kms:KEY` for a key of one's own."""
    if not sse:
        return {}
    if sse.startswith("aws:kms:"):
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": sse.removeprefix("aws:kms:")}
    return {"ServerSideEncryption": sse}
