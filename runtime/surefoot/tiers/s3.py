"""Stores objects in an S3 bucket, using botocore.

Requires a server that honours `If-None-Match: *` and `If-Match` on writes. Every request has timeouts and at most three
attempts with jittered backoff (botocore's standard mode), and each attempt is counted. If a conditional write succeeded
but its answer was lost, its repetition gets 412 and the caller compares: equal bytes are a success. Each write carries
its CRC-32, which the server checks and stores. Messages contain only the error code of the server's answer, since some
answers quote the account.
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
from surefoot.tiers.object_store import MAX_CONCURRENT_READS, Change
from surefoot.tiers.tier import RequestBody

if TYPE_CHECKING:
    from botocore.loaders import Loader
    from botocore.session import Session
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CopySourceTypeDef

log = logging.getLogger(__name__)


# ---- s3 client -------------------------------------------------------------------------------------------------------
# Creates clients with timeouts and few attempts that count each request. A tier is opened for each upload and listing,
# so botocore's description of S3 is cached: parsing it each time took longer than uploading a tenth of a GB.


def create_session() -> Session:
    """Creates a session that shares botocore's parsed files.

    It is not cached, because credentials from the environment may change between two sessions.
    """
    session = botocore.session.Session()
    session.register_component("data_loader", _cached_loader())
    # Keep timestamps as text: parsing that of each listed object took longer than all other work, and none is used.
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    return session


def create_client(settings: PersistentSettings, session: Session, signs_bodies: bool) -> S3Client:
    """Creates a client with its own connections; with `signs_bodies` it hashes each body for its signature."""
    config = Config(
        connect_timeout=3,
        read_timeout=15,
        retries={"mode": "standard", "total_max_attempts": 3},
        max_pool_connections=MAX_CONCURRENT_READS,
        # botocore sends its checksum in a trailer, which other servers often do not support; ours is a header.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={
            "addressing_style": "path" if settings.endpoint else "auto",
            "payload_signing_enabled": signs_bodies,
        },
    )
    client = session.create_client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region or "us-east-1",
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        verify=settings.ca_bundle or None,
        config=config,
    )
    client.meta.events.register("before-send.s3", _count_attempt)
    return cast("S3Client", client)


def is_unencrypted(settings: PersistentSettings) -> bool:
    """Whether requests are sent without TLS."""
    return settings.endpoint is not None and urlsplit(settings.endpoint).scheme == "http"


def error_code_of(error: ClientError) -> str:
    """Returns the server's error code."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))


@cache
def _cached_loader() -> Loader:
    """Returns a cache of botocore's files, each parsed once per process; they take 12 MB."""
    return cast("Loader", botocore.session.Session().get_component("data_loader"))


def _count_attempt(request: Any, event_name: str, **_: Any) -> None:
    """Counts each attempt of a request when it is sent."""
    header = request.headers.get("amz-sdk-request", b"")
    is_first = "attempt=1" in (header.decode() if isinstance(header, bytes) else header)
    metrics.s3_requests.labels(event_name.rsplit(".", 1)[-1], "first" if is_first else "retry").inc()


# ---- s3 uploads ------------------------------------------------------------------------------------------------------
# Sends bodies to S3, with a hash only if the server needs it. Without TLS, botocore signs the SHA-256 of every body,
# which costs both ends more than sending it. Once an answer of the server includes the CRC-32 (a signed header), the
# server is known to check it, and large bodies are sent without SHA-256. If the answer to such a body lacks the CRC-32,
# or the body is rejected, it is sent again signed, so no body is ever stored unchecked.

_SMALL_BYTES = 64 * 1024
_UNSIGNED_REJECTED_CODES = {
    *("AccessDenied", "403", "InvalidRequest", "InvalidArgument", "InvalidDigest", "400"),
    *("SignatureDoesNotMatch", "XAmzContentSHA256Mismatch", "NotImplemented", "501"),
}
"""Error codes of servers that require signed bodies; some of them may also mean that writing is not allowed."""
_signing_endpoints: set[str] = set()
"""Endpoints that accepted only signed bodies, kept for the whole process, as each upload opens its tier again."""
_lock = threading.Lock()
_NOT_CHECKED = "its answer names no checksum"


class BodyUploader:
    """Writes objects, hashing large bodies only if the server requires it.

    One client signs bodies; a second one, opened when first needed, does not. Several threads may call `put` concurrently.
    """

    def __init__(self, client: S3Client, endpoint: str, open_unsigned: Callable[[], S3Client] | None) -> None:
        """`open_unsigned` opens the second client; None: `client` does not sign bodies itself, as with TLS."""
        self._client = client
        self._endpoint = endpoint
        self._open = open_unsigned
        self._unsigned: S3Client | None = None
        self._server_checks_crc = False

    def put(self, body: RequestBody, arguments: Mapping[str, Any]) -> None:
        """Writes an object.

        Args:
            body: Its bytes.
            told: Other arguments of `PutObject`.
        """
        arguments = {**arguments, "ChecksumCRC32": body.checksum()}
        # A small body is passed as bytes: for a file, botocore first waits for "100 Continue".
        is_small = len(body) <= _SMALL_BYTES
        refusal = None if is_small or not self._server_checks_crc else self._send_unsigned(body, arguments)
        if refusal == "":
            return
        if refusal == _NOT_CHECKED:
            # The unsigned request has created the object, so "only if it does not exist" would reject the signed one.
            arguments.pop("IfNoneMatch", None)
        body.seek(0)
        answer = self._client.put_object(Body=body.to_bytes() if is_small else body, **arguments)  # type: ignore[arg-type]
        self._server_checks_crc = answer.get("ChecksumCRC32") == arguments["ChecksumCRC32"]
        if refusal:
            self._record_signing_required(refusal)

    def close(self) -> None:
        if self._unsigned is not None:
            self._unsigned.close()

    def _send_unsigned(self, body: RequestBody, arguments: Mapping[str, Any]) -> str | None:
        """Sends a body unsigned.

        Returns:
            Empty if it was stored and checked, None if it was not sent, otherwise why it must be sent signed.
        """
        client = self._unsigned_client()
        if client is None:
            return None
        body.seek(0)
        try:
            answer = client.put_object(Body=body, **arguments)  # type: ignore[arg-type]
        except ClientError as error:
            if error_code_of(error) not in _UNSIGNED_REJECTED_CODES:
                raise
            return error_code_of(error)
        return "" if answer.get("ChecksumCRC32") == arguments["ChecksumCRC32"] else _NOT_CHECKED

    def _unsigned_client(self) -> S3Client | None:
        if self._open is None or self._endpoint in _signing_endpoints:
            return None
        with _lock:
            if self._unsigned is None:
                self._unsigned = self._open()
            return self._unsigned

    def _record_signing_required(self, refusal: str) -> None:
        """Remembers that a server requires signed bodies, and logs it once."""
        metrics.fallbacks.labels("s3_body_signed").inc()
        with _lock:
            is_new = self._endpoint not in _signing_endpoints
            _signing_endpoints.add(self._endpoint)
        if is_new:
            log.warning(
                "%s requires signed bodies (%s): every body is hashed from now on",
                self._endpoint,
                refusal,
            )


# ---- s3 --------------------------------------------------------------------------------------------------------------

_MISSING_CODES = {"NoSuchKey", "404", "InvalidRange", "416"}
_FULL_CODES = {"QuotaExceeded", "InsufficientStorage", "InsufficientCapacity", "XMinioStorageFull", "507"}
_EXISTS_CODES = {"PreconditionFailed", "412"}
_CONFLICT_CODES = {"ConditionalRequestConflict", "409"}
_COPY_UNSUPPORTED_CODES = {
    "NotImplemented",
    "501",
    "MethodNotAllowed",
    "405",
    "AccessDenied",
    "403",
    "InvalidRequest",
    "400",
}
"""Error codes of servers that never copy objects, or not for this account."""
_BUSY_CODES = {"SlowDown", "503", "ServiceUnavailable", "Throttling", "TooManyRequests", "429", "RequestTimeout", "504"}
"""Error codes that concern the whole server, not the requested object."""
_DELETE_BATCH = 1000
_MAX_CONFLICT_ATTEMPTS = 5
"""Attempts of a conditional write that conflicts with a concurrent one."""
_CONFLICT_BACKOFF = Backoff(0.05)
_MAX_CHANGE_ATTEMPTS = 20


class S3Store:
    """Stores objects below `s3://bucket/prefix`. The bucket must exist."""

    def __init__(self, settings: PersistentSettings, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._encryption = _encryption_arguments(settings.sse)
        session, signs = create_session(), is_unencrypted(settings)
        self._client: S3Client = create_client(settings, session, signs)
        open_unsigned = (lambda: create_client(settings, session, False)) if signs else None
        self._uploads = BodyUploader(self._client, str(settings.endpoint), open_unsigned)

    @property
    def location(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def put(self, path: str, *pieces: bytes | memoryview) -> None:
        self._put(path, pieces, "writing")

    def copy(self, source: str, path: str) -> bool:
        origin: CopySourceTypeDef = {"Bucket": self._bucket, "Key": self._key(source)}
        try:
            with self._translate_errors("copying", source):
                try:
                    self._client.copy_object(
                        Bucket=self._bucket,
                        Key=self._key(path),
                        CopySource=origin,
                        ChecksumAlgorithm="CRC32",
                        **self._encryption,
                    )
                except ClientError as error:
                    if error_code_of(error) in _COPY_UNSUPPORTED_CODES:
                        raise CopyUnsupported(
                            f"s3://{self._bucket} does not copy {source}: {error_code_of(error)}"
                        ) from None
                    raise
        except ChunkMissing:
            return False
        return True

    def create(self, path: str, *pieces: bytes | memoryview, durable: bool = True) -> bool:
        return self._put(path, pieces, "creating", {"IfNoneMatch": "*"})

    def change(self, path: str, change: Change) -> None:
        for _ in range(_MAX_CHANGE_ATTEMPTS):
            old_content, condition = self._read_with_condition(path)
            new_content = change(old_content)
            if new_content is None or self._put(path, (new_content,), "changing", condition):
                return
            metrics.fallbacks.labels("s3_changed_meanwhile").inc()
        raise TierUnavailable(
            f"s3://{self._bucket}, changing {path}: other writers were faster in {_MAX_CHANGE_ATTEMPTS} attempts"
        )

    def checksum(self, path: str) -> int | None:
        try:
            with self._translate_errors("asking for", path):
                answer = self._client.head_object(Bucket=self._bucket, Key=self._key(path), ChecksumMode="ENABLED")
        except ChunkMissing:
            return None
        crc_text = answer.get("ChecksumCRC32", "")
        return int.from_bytes(b64decode(crc_text), "big") if crc_text else None

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        last_byte = "" if length is None else str(offset + length - 1)
        byte_range: dict[str, Any] = {"Range": f"bytes={offset}-{last_byte}"} if offset or length is not None else {}
        with self._translate_errors("reading", path):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(path), **byte_range)
            return answer["Body"].read()

    def list_sizes(self, folder: str) -> dict[str, int]:
        start = self._key(folder) + "/"
        return {
            entry["Key"].removeprefix(start): entry["Size"]
            for page in self._list_pages(folder, "/")
            for entry in page.get("Contents", [])
        }

    def list_folders(self, folder: str) -> list[str]:
        start = self._key(folder) + "/"
        return [
            entry["Prefix"].removeprefix(start).rstrip("/")
            for page in self._list_pages(folder, "/")
            for entry in page.get("CommonPrefixes", [])
        ]

    def check_folder_exists(self, folder: str) -> None:
        """Does nothing: a missing object of a bucket was deleted."""

    def make_durable(self, folder: str) -> None:
        """Does nothing: an acknowledged object is durable."""

    def remove(self, path: str) -> None:
        with self._translate_errors("removing", path):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(path))

    def remove_folder(self, folder: str) -> None:
        names = [entry["Key"] for page in self._list_pages(folder, "") for entry in page.get("Contents", [])]
        with self._translate_errors("removing", folder):
            for batch in (names[start : start + _DELETE_BATCH] for start in range(0, len(names), _DELETE_BATCH)):
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
        self, path: str, pieces: Sequence[bytes | memoryview], action: str, condition: Mapping[str, str] | None = None
    ) -> bool:
        """Writes an object; False if the condition is not met."""
        body = RequestBody(pieces)
        arguments = {"Bucket": self._bucket, "Key": self._key(path), **self._encryption, **(condition or {})}
        with self._translate_errors(action, path):
            for attempt in range(_MAX_CONFLICT_ATTEMPTS):
                try:
                    self._uploads.put(body, arguments)
                except ClientError as error:
                    if condition and error_code_of(error) in _EXISTS_CODES:
                        return False
                    if error_code_of(error) not in _CONFLICT_CODES or attempt == _MAX_CONFLICT_ATTEMPTS - 1:
                        raise
                    time.sleep(_CONFLICT_BACKOFF.wait_seconds(attempt + 1, random.random()))
                else:
                    return True
        raise AssertionError("unreachable: the last attempt returned or raised")

    def _read_with_condition(self, path: str) -> tuple[bytes | None, dict[str, str]]:
        """Reads an object; returns its content and the condition under which it is unchanged."""
        try:
            with self._translate_errors("reading", path):
                answer = self._client.get_object(Bucket=self._bucket, Key=self._key(path))
                return answer["Body"].read(), {"IfMatch": answer["ETag"]}
        except ChunkMissing:
            return None, {"IfNoneMatch": "*"}

    def _list_pages(self, folder: str, delimiter: str) -> Iterable[Any]:
        with self._translate_errors("listing", folder):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._key(folder) + "/", Delimiter=delimiter
            )
            all_pages = list(pages)
        if any("IsTruncated" not in page for page in all_pages):
            # The page of a web portal can be well-formed too, and the bucket would appear empty.
            raise TierUnavailable(
                f"s3://{self._bucket}, listing {folder}: the answer is no listing; check that the endpoint is an S3"
                " server"
            )
        return all_pages

    def _key(self, path: str) -> str:
        return f"{self._prefix}{path}"

    @contextmanager
    def _translate_errors(self, action: str, object_name: str) -> Iterator[None]:
        """Translates errors of the server and the network into those of `Tier`, with the path and a remedy."""
        try:
            yield
        except ClientError as error:
            code = error_code_of(error)
            text = f"s3://{self._bucket}, {action} {object_name}"
            if code in _MISSING_CODES:
                raise ChunkMissing(f"{text}: it does not exist") from None
            if code in _FULL_CODES:
                raise TierFull(f"{text}: {code}: free space or keep fewer checkpoints") from None
            hint = _HINTS_BY_CODE.get(code, "the server cannot execute it now")
            is_read = action == "reading" and code not in _BUSY_CODES
            kind = ObjectRefused if is_read else TierUnavailable
            raise kind(f"{text}: {code}: {hint}") from None
        except (BotoCoreError, OSError) as error:
            # Texts of botocore contain endpoints and timeouts, but no keys.
            raise TierUnavailable(
                f"s3://{self._bucket}, {action} {object_name}: {type(error).__name__}: {error}"
            ) from None


_HINTS_BY_CODE = {
    "AccessDenied": "allow the job's account to list, get, put and delete here",
    "403": "allow the job's account to list, get, put and delete here",
    "InvalidAccessKeyId": "the secret's access key is not known there",
    "XAdminUserNotFound": "the secret's access key is not known there",
    "SignatureDoesNotMatch": "the secret's secret key is not the right one",
    "ExpiredToken": "the credentials have expired",
    "NoSuchBucket": "create the bucket, or correct checkpoint.persistent.uri",
}


def _encryption_arguments(sse: str | None) -> dict[str, Any]:
    """Returns the request arguments for `AES256`, `aws:kms`, or `aws:kms:KEY` with a key of your own."""
    if not sse:
        return {}
    if sse.startswith("aws:kms:"):
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": sse.removeprefix("aws:kms:")}
    return {"ServerSideEncryption": sse}
