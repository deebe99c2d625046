"""A bucket as the store of the persistent tier, through boto3; any server that keeps `If-None-Match: *` will do.

Every request has time limits and at most three tries with jittered waits (botocore's standard mode). A repeated
conditional write that had succeeded unseen answers 412, and the caller compares: equal is success. Messages carry
the server's error code and nothing else of its answer, since some quote the account.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from surefoot.errors import ChunkMissing, TierFull, TierUnavailable
from surefoot.settings import PersistentSettings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_MISSING = {"NoSuchKey", "404", "InvalidRange", "416"}
_FULL = {"QuotaExceeded", "InsufficientStorage", "InsufficientCapacity", "XMinioStorageFull", "507"}
_EXISTS = {"PreconditionFailed", "412"}
_RACING = {"ConditionalRequestConflict", "409"}
_BATCH = 1000
_CREATE_TRIES = 5


class S3Store:
    """Everything below `s3://bucket/prefix`. The bucket must exist."""

    def __init__(self, settings: PersistentSettings, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._extra = _encryption(settings.sse)
        self._client: S3Client = _client(settings)

    def put(self, path: str, data: bytes | memoryview) -> None:
        with self._explained("writing", path):
            self._client.put_object(Bucket=self._bucket, Key=self._key(path), Body=bytes(data), **self._extra)

    def create(self, path: str, data: bytes) -> bool:
        with self._explained("creating", path):
            for attempt in range(_CREATE_TRIES):
                try:
                    self._client.put_object(
                        Bucket=self._bucket, Key=self._key(path), Body=data, IfNoneMatch="*", **self._extra
                    )
                except ClientError as error:
                    if _code(error) in _EXISTS:
                        return False
                    if _code(error) not in _RACING or attempt == _CREATE_TRIES - 1:
                        raise
                else:
                    return True
        raise AssertionError("unreachable: the last try returned or raised")

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
        self._client.close()

    def _pages(self, folder: str, delimiter: str) -> Iterable[Any]:
        with self._explained("listing", folder):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._key(folder) + "/", Delimiter=delimiter
            )
            return list(pages)

    def _key(self, path: str) -> str:
        return f"{self._prefix}{path}"

    @contextmanager
    def _explained(self, doing: str, what: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            code = _code(error)
            text = f"s3://{self._bucket}, {doing} {what}"
            if code in _MISSING:
                raise ChunkMissing(f"{text}: it is not there") from None
            if code in _FULL:
                raise TierFull(f"{text}: {code}: make room or keep fewer checkpoints") from None
            hint = _HINTS.get(code, "the server could not do it now")
            raise TierUnavailable(f"{text}: {code}: {hint}") from None
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


def _client(settings: PersistentSettings) -> S3Client:
    config = Config(
        connect_timeout=3,
        read_timeout=15,
        retries={"mode": "standard", "total_max_attempts": 3},
        max_pool_connections=8,
        # servers other than Amazon's often lack the newer checksums; every block is verified by its own digest anyway
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if settings.endpoint else "auto"},
    )
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region or "us-east-1",
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        verify=settings.ca_bundle or None,
        config=config,
    )


def _encryption(sse: str | None) -> dict[str, Any]:
    """`AES256`, `aws:kms`, or `aws:kms:KEY` for a key of one's own."""
    if not sse:
        return {}
    if sse.startswith("aws:kms:"):
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": sse.removeprefix("aws:kms:")}
    return {"ServerSideEncryption": sse}


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))
