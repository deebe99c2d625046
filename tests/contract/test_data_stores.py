"""Where data lies: local, S3 and HTTP. What fails is asked again and named; what was changed is never read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

from support.servers import s3_server
from surefoot.data.data_source import DataError
from surefoot.data.sources import TextLines, TokenFile, file_access
from surefoot.protocol.timeouts import Backoff

WORDS = b"".join(b"line %d\n" % number for number in range(500))


class Web:
    """One file by HTTP, in ranges, with an ETag; the next `failing` requests are answered by 503."""

    def __init__(self) -> None:
        self.body, self.tag, self.failing, self.asked = WORDS, '"one"', 0, 0
        self.gone, self.keeps_tags = False, True
        self.answers = threading.Event()
        self.answers.set()
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(False)

            def do_GET(self) -> None:
                self._answer(True)

            def _answer(self, whole: bool) -> None:
                web.asked += 1
                web.answers.wait(60)
                if web.gone:
                    self.send_error(404)
                    return
                if web.failing > 0:
                    web.failing -= 1
                    self.send_error(503)
                    return
                if web.keeps_tags and self.headers.get("If-Match", web.tag) != web.tag:
                    self.send_error(412)
                    return
                start, stop = 0, len(web.body)
                if wanted := self.headers.get("Range"):
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    start, stop = int(first), min(stop, int(last) + 1)
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(stop - start))
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("ETag", web.tag)
                if wanted:
                    self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(web.body)}")
                self.end_headers()
                if whole:
                    self.wfile.write(web.body[start:stop])

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/words.txt"

    def change(self) -> None:
        self.body, self.tag = WORDS.replace(b"line 7\n", b"LINE 7\n"), '"two"'


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(file_access, "WAITS", Backoff(0.001))
    made = Web()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.answers.set()
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def lines(source: TextLines) -> list[str]:
    return [line for shard in range(len(source.shards())) for line in source.open(shard, 0)]


def test_text_by_http_is_read_in_ranges_and_again_where_the_server_failed(web: Web) -> None:
    web.failing = 2
    source = TextLines(web.url, shard_bytes=1000)
    web.failing = 3
    assert lines(source) == WORDS.decode().splitlines()
    assert web.failing == 0


def test_a_server_that_keeps_failing_is_given_up_and_named(web: Web) -> None:
    source = TextLines(web.url, shard_bytes=1000)
    web.failing, web.asked = 1000, 0
    with pytest.raises(DataError, match=r"words\.txt could not be read, in 5 tries.*503"):
        lines(source)
    assert web.asked == 10, "by HEAD and by GET"


def test_a_page_that_is_gone_is_named_at_once(web: Web) -> None:
    source = TextLines(web.url, shard_bytes=1000)
    web.gone, web.asked = True, 0
    with pytest.raises(DataError, match=r"words\.txt is not there \(any more\)"):
        lines(source)
    assert web.asked <= 2, "what is certain is not asked again"


def test_a_server_that_does_not_answer_is_given_up_and_named(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TextLines(web.url, shard_bytes=1000)
    monkeypatch.setattr(file_access, "CALL_SECONDS", 0.05)
    file_access._system.cache_clear()
    web.answers.clear()
    try:
        with pytest.raises(DataError, match=r"words\.txt could not be read, in 5 tries \(\w*(Timeout|OS)\w*"):
            lines(source)
    finally:
        file_access._system.cache_clear()


def test_a_page_that_was_changed_is_named(web: Web) -> None:
    source = TextLines(web.url, shard_bytes=1000)
    web.change()
    with pytest.raises(DataError, match=r"words\.txt was changed"):
        lines(source)


def test_a_page_that_is_replaced_between_two_reads_is_named(web: Web) -> None:
    file = file_access.find_files(web.url)[0]
    assert file_access.read_range(file, 0, 7) == b"line 0\n"
    web.change()
    with pytest.raises(DataError, match=r"words\.txt was changed: .*its ETag is another"):
        file_access.read_range(file, 0, 7)
    web.keeps_tags = False  # of such a server it is noticed when the file is opened
    with pytest.raises(DataError, match=r"words\.txt was changed"):
        file_access.check(file)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, bytes | None], str]]:
    monkeypatch.setattr(file_access, "WAITS", Backoff(0.001))
    with s3_server.running(tmp_path) as server:
        told = server.settings("data")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", told.access_key or "")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", told.secret_key or "")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", told.endpoint or "")
        monkeypatch.setenv("AWS_DEFAULT_REGION", told.region or "us-east-1")
        file_access._s3.cache_clear()
        client, name = boto3.client("s3"), told.uri.split("/")[2]

        def put(key: str, body: bytes | None) -> str:
            if body is None:
                client.delete_object(Bucket=name, Key=key)
            else:
                client.put_object(Bucket=name, Key=key, Body=body)
            return f"s3://{name}/{key}"

        yield put
        file_access._s3.cache_clear()


def test_objects_in_s3_are_found_by_pattern_and_never_read_changed(
    bucket: Callable[[str, bytes | None], str],
) -> None:
    for part in range(3):
        url = bucket(f"data/{part}.txt", WORDS)
    folder = url.rpartition("/")[0]
    source = TextLines(f"{folder}/*.txt", shard_bytes=1000)
    assert lines(source) == 3 * WORDS.decode().splitlines()
    last = len(source.shards()) - 1
    reading = file_access.find_files(url)[0]
    bucket("data/2.txt", WORDS.replace(b"line 7\n", b"LINE 7\n"))
    with pytest.raises(DataError, match=r"2\.txt was changed"):
        list(source.open(last, 0))
    with pytest.raises(DataError, match=r"2\.txt was changed: its ETag"):
        file_access.read_range(reading, 0, 100)
    bucket("data/2.txt", None)
    with pytest.raises(DataError, match=r"2\.txt is not there"):
        list(source.open(last, 0))


def test_tokens_in_s3_are_those_on_disk(bucket: Callable[[str, bytes | None], str], tmp_path: Path) -> None:
    tokens = np.arange(4001, dtype=np.uint16)
    tokens.tofile(tmp_path / "t.bin")
    here, there = TokenFile(tmp_path / "t.bin", 40), TokenFile(bucket("data/t.bin", tokens.tobytes()), 40)
    assert np.array_equal(list(here.open(0, 3)), list(there.open(0, 3)))
