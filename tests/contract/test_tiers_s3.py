"""How the tier sends its requests to a real S3 server: what it hashes, signs, and keeps between two openings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any
from uuid import uuid4

import pytest
from botocore.awsrequest import AWSResponse
from botocore.loaders import JSONFileLoader

from support.servers import s3_server
from support.servers.s3_server import S3Server
from surefoot import metrics
from surefoot.errors import TierUnavailable
from surefoot.protocol.identities import RankSave
from surefoot.settings import PersistentSettings
from surefoot.tiers import ObjectStoreTier, open_persistent, s3
from surefoot.tiers.tier import RequestBody

SAVE = RankSave(1, 20, 0)
UNSIGNED = "UNSIGNED-PAYLOAD"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server.running(tmp_path_factory.mktemp("s3")) as started:
        if started.engine == "moto":
            pytest.skip("moto keeps no checksums")
        yield started


class Spied:
    """Sees each write of parts as it leaves, and stands in for servers of other habits."""

    def __init__(self) -> None:
        self.signatures: list[str] = []
        self.refuses, self.names_checksums = "", True

    def client_of(self, *arguments: Any) -> Any:
        client = MAKE(*arguments)
        client.meta.events.register("before-send.s3.PutObject", self._leaving)
        client.meta.events.register("after-call.s3.PutObject", self._answered)
        return client

    def _leaving(self, request: Any, **_: Any) -> AWSResponse | None:
        told = request.headers["X-Amz-Content-SHA256"]
        signature = told.decode() if isinstance(told, bytes) else told
        if "/p0" in request.url:
            self.signatures.append(signature)
        if signature != UNSIGNED or not self.refuses:
            return None
        said = f"<Error><Code>{self.refuses}</Code></Error>".encode()
        answer = AWSResponse(request.url, 400, {}, BytesIO(said))
        answer._content = said
        return answer

    def _answered(self, parsed: dict[str, Any], **_: Any) -> None:
        if not self.names_checksums:
            parsed.pop("ChecksumCRC32", None)


MAKE = s3.create_client


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Spied:
    one = Spied()
    monkeypatch.setattr(s3, "create_client", one.client_of)
    monkeypatch.setattr(s3, "_signing_endpoints", set())
    return one


@pytest.fixture
def opened(server: S3Server, spied: Spied) -> Iterator[Callable[[], ObjectStoreTier]]:
    """Opens the same fresh job as often as asked."""
    made: list[ObjectStoreTier] = []
    job = str(uuid4())

    def another() -> ObjectStoreTier:
        made.append(open_persistent(server.settings(), job))
        return made[-1]

    yield another
    for tier in made:
        tier.close()


def chunks(seed: int = 0) -> list[memoryview]:
    return [memoryview(os.urandom(3_000_000)), memoryview(bytes([seed]) * 1_000_000)]


def test_in_clear_a_part_is_hashed_for_its_signature_until_the_server_has_shown_that_it_checks(
    opened: Callable[[], ObjectStoreTier], spied: Spied
) -> None:
    tier, written = opened(), [chunks(part) for part in range(3)]
    tier.put_part(SAVE, 0, written[0])
    tier.put_part(SAVE, 1, written[1])
    assert spied.signatures[0] != UNSIGNED, "nothing was known of the server yet"
    assert spied.signatures[1:] == [UNSIGNED]
    another = opened()
    another.put_layout("digest", "text")
    another.put_part(SAVE, 2, written[2])
    assert spied.signatures[2:] == [UNSIGNED], "a layout's answer tells it, too"
    for part, pieces in enumerate(written):
        assert another.has_part(SAVE, part, pieces)
        assert another._store.read(another._names.part(SAVE, part)) == b"".join(pieces)


def test_a_byte_that_changes_on_the_way_is_found_by_the_server_of_an_unsigned_part(
    opened: Callable[[], ObjectStoreTier], spied: Spied, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened()
    tier.put_layout("digest", "text")
    read = RequestBody.read

    def damaged(body: RequestBody, size: int | None = -1) -> memoryview | bytes:
        found = bytearray(read(body, size))
        found[1000:1001] = bytes([found[1000] ^ 1]) if len(found) > 1000 else b""
        return bytes(found)

    monkeypatch.setattr(RequestBody, "read", damaged)
    with pytest.raises(TierUnavailable):
        tier.put_part(SAVE, 0, chunks())
    assert set(spied.signatures) == {UNSIGNED}
    assert tier.list_parts(SAVE) == {}


def test_a_server_that_names_no_checksum_gets_every_part_signed(
    opened: Callable[[], ObjectStoreTier], spied: Spied
) -> None:
    tier, spied.names_checksums = opened(), False
    tier.put_layout("digest", "text")
    for part in range(2):
        tier.put_part(SAVE, part, chunks())
    assert len(spied.signatures) == 2
    assert UNSIGNED not in spied.signatures


@pytest.mark.parametrize("refuses", ["InvalidDigest", ""], ids=["refused", "not checked"])
def test_a_part_that_is_refused_or_not_checked_unsigned_is_sent_again_signed_and_that_is_said_once(
    opened: Callable[[], ObjectStoreTier], spied: Spied, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    tier, written, fallbacks = opened(), chunks(), metrics.fallbacks.labels("s3_body_signed")
    before = fallbacks._value.get()
    tier.put_layout("digest", "text")
    spied.refuses, spied.names_checksums = refuses, bool(refuses)
    with caplog.at_level(logging.WARNING):
        tier.put_part(SAVE, 0, written)
        tier.put_part(SAVE, 1, written)
        spied.names_checksums = True
        another = opened()
        another.put_layout("digest", "text")
        another.put_part(SAVE, 2, written)
    assert [told == UNSIGNED for told in spied.signatures] == [True, False, False, False]
    assert fallbacks._value.get() == before + 1
    assert caplog.text.count("requires signed bodies") == 1
    assert all(tier.has_part(SAVE, part, written) for part in range(3))


def test_a_tier_that_is_opened_again_does_not_parse_the_description_of_s3_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = PersistentSettings(uri="s3://bucket/", endpoint="http://127.0.0.1:1", access_key="a", secret_key="b")
    open_persistent(settings, "job-1").close()
    read: list[str] = []
    load = JSONFileLoader.load_file
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda me, path: read.append(path) or load(me, path))
    open_persistent(settings, "job-1").close()
    assert read == []
