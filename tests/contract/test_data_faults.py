"""Sources on a real S3 server behind a line that fails: read whole, or given up within limits and named."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from support.servers import s3_server
from support.servers.faulty_store import Fault, FaultyLine, faulty
from surefoot.data.data_source import DataError
from surefoot.data.sources import TextLines, file_access
from surefoot.data.stream import ElasticStream
from surefoot.errors import StateMismatch
from surefoot.protocol.timeouts import Backoff

LINES = [f"line {number}" for number in range(400)]
BODY = "\n".join(LINES).encode()
ALL: tuple[Fault, ...] = ("busy", "reset", "cut", "silent", "trickle")


class Bucket:
    """Two objects of lines, written past the line and read through it."""

    def __init__(self, line: FaultyLine, client: Any, name: str) -> None:
        self.line, self._client, self._name = line, client, name
        for part in ("a", "b"):
            self.put(part, BODY)
        self.url = f"s3://{name}/*.txt"

    def put(self, part: str, body: bytes | None) -> None:
        if body is None:
            self._client.delete_object(Bucket=self._name, Key=f"{part}.txt")
        else:
            self._client.put_object(Bucket=self._name, Key=f"{part}.txt", Body=body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3_server.S3Server]:
    with s3_server.running(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def bucket(server: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    told = server.settings()
    monkeypatch.setattr(file_access, "WAITS", Backoff(0.001))
    monkeypatch.setattr(file_access, "CALL_SECONDS", 1.0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", told.access_key or "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", told.secret_key or "")
    monkeypatch.setenv("AWS_DEFAULT_REGION", told.region or "")
    with faulty(server.endpoint) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", line.url)
        file_access._s3.cache_clear()
        yield Bucket(line, boto3.client("s3", endpoint_url=server.endpoint), told.uri.split("/")[2])
        file_access._s3.cache_clear()


def lines(source: TextLines) -> list[str]:
    return [line for shard in range(len(source.shards())) for line in source.open(shard, 0)]


@pytest.mark.parametrize("fault", ALL)
def test_a_fault_less_than_the_tries_allow_changes_nothing_of_what_is_read(bucket: Bucket, fault: Fault) -> None:
    bucket.line.fail([fault] * (1 if fault in ("silent", "trickle") else file_access.TRIES - 1))
    source = TextLines(bucket.url, shard_bytes=2000)
    bucket.line.fail([fault])
    assert lines(source) == LINES * 2
    assert not bucket.line.script, "each fault was met"


def test_faults_of_every_kind_at_random_change_nothing_of_what_is_read(bucket: Bucket) -> None:
    chance = random.Random(5)
    source = TextLines(bucket.url, shard_bytes=2000)
    quick: tuple[Fault, ...] = ("busy", "reset", "cut")
    for _ in range(40):
        bucket.line.fail(chance.choices(quick, k=chance.randint(1, file_access.TRIES - 1)))
        bucket.line.fail(["none"] * chance.randint(1, 3))
    options: dict[str, Any] = {
        "global_batch_size": 4,
        "lanes": 2,
        "shuffle_window": 5,
        "rank": 0,
        "num_replicas": 1,
        "collate_fn": list,
    }
    seen: list[str] = []
    for batch in ElasticStream(source, **options):
        seen += batch.data
        if len(seen) == 2 * len(LINES):
            break
    assert sorted(seen) == sorted(2 * LINES)


@pytest.mark.parametrize("fault", ALL)
def test_a_store_that_fails_on_is_given_up_within_limits_and_named(bucket: Bucket, fault: Fault) -> None:
    source = TextLines(bucket.url, shard_bytes=2000)
    file_access._s3.cache_clear()
    patch = pytest.MonkeyPatch()
    patch.setattr(file_access, "CALL_SECONDS", 0.2)
    bucket.line.always, bucket.line.asked = fault, 0
    begun = time.monotonic()
    try:
        with pytest.raises(
            DataError, match=rf"s3://.*/a\.txt could not be read, in {file_access.TRIES} tries \(\w+: .+\)"
        ):
            list(source.open(0, 0))
    finally:
        patch.undo()
    # by HEAD, which has no body to cut, and where that came through by GET
    assert bucket.line.asked in (file_access.TRIES, file_access.TRIES + 1, 2 * file_access.TRIES)
    assert time.monotonic() - begun < 60, "no call is waited for without end"


def test_an_object_that_is_replaced_or_deleted_between_two_reads_is_named(bucket: Bucket) -> None:
    source = TextLines(bucket.url, shard_bytes=1 << 20)
    for what, said in ((BODY.replace(b"line 7\n", b"LINE 7\n"), r"a\.txt was changed"), (None, r"a\.txt is not there")):
        fresh = TextLines(bucket.url, shard_bytes=1 << 20)
        begun = []

        def change(path: str, body: bytes | None = what, begun: list[str] = begun) -> None:
            begun.append(path)
            if len(begun) == 2:  # behind the question whether it is as it was, before its bytes
                bucket.put("a", body)

        bucket.line.before_answer = change
        with pytest.raises(DataError, match=said):
            list(fresh.open(0, 0))
        bucket.line.before_answer = lambda path: None
    bucket.put("a", BODY.replace(b"line 7\n", b"LINE 7\n"))
    state = ElasticStream(source, 2, rank=0, num_replicas=1).state_dict()
    with pytest.raises(StateMismatch, match=r"shard s3://.*/a\.txt\[0:\d+\] of it is another"):
        ElasticStream(TextLines(bucket.url, shard_bytes=1 << 20), 2, rank=0, num_replicas=1).load_state_dict(state)
