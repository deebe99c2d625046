"""Whatever a server answers, a holder's client raises from our own tree: it names the holder, and ends nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.errors import InvalidServerReply, ProtocolError, SurefootError
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import (
    Credentials,
    Dialogue,
    RespConnection,
    run_dialogue,
    translate_redis_errors,
)
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.protocol.checkpoints.records import Layout, RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave

T = TypeVar("T")
SAVE = RankSave(1, 10, 0)
MANIFEST = RankManifest(SAVE, 2, "me", "layout", 8, 1, "d", 8, "v", 2, 0.0)
ENDPOINT = MemoryServerEndpoint(MemoryServerInstance("node-0", "run"), "127.0.0.1", 1, "node-0")

words = st.sampled_from([b"ok", b"fenced", b"replaced", b"missing", b"conflict", b"damaged", b"7", b"-1", b"1:20", b""])
texts = words | st.binary(max_size=40) | st.just(MANIFEST.to_json().encode()) | st.just(b"1:10:0")
replies = st.recursive(st.none() | st.integers() | texts, lambda inner: st.lists(inner, max_size=5), max_leaves=12)
scripted = st.one_of(
    replies, st.tuples(st.just(b"ok"), texts, texts, st.lists(texts, max_size=4)).map(list), st.lists(texts, max_size=4)
)


class Answering:
    """A wire on which one reply comes to everything."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply

    def call(self, *arguments: Any) -> Any:
        return self._reply

    def run_dialogue(self, dialogue: Dialogue[T]) -> T:
        return run_dialogue(
            dialogue, lambda asked: [self._reply for _ in asked] if isinstance(asked, list) else self._reply
        )

    def close(self) -> None: ...


CALLS: dict[str, Callable[[MemoryServerClient], object]] = {
    "index": lambda client: client.read_index(),
    "seal": lambda client: client.fence(2),
    "commit": lambda client: client.commit(MANIFEST, 1, (8,)),
    "drop": lambda client: client.delete_save(SAVE, 1, 1),
    "mark": lambda client: client.set_watermark(Checkpoint(1, 10), 1),
    "layout": lambda client: client.read_layout("layout"),
    "values": lambda client: client.read_values(SAVE),
    "digests": lambda client: client.read_digests(SAVE, 0, 8),
}
ADMIN: dict[str, Callable[[MemoryServerAdmin], object]] = {
    "instance": lambda admin: admin.read_instance(),
    "process": lambda admin: admin.read_instance_and_pid(),
    "provision": lambda admin: admin.provision("job", Credentials("user", "word"), 1),
    "filling": lambda admin: admin.is_prefaulting(),
    "memory": lambda admin: admin.measure_memory(),
    "leftovers": lambda admin: admin.list_unindexed("job"),
}


@pytest.mark.parametrize("call", CALLS)
@given(reply=scripted)
def test_a_client_raises_from_our_tree_alone(call: str, reply: Any) -> None:
    client = MemoryServerClient(ENDPOINT, "job", Credentials())
    client._connection = Answering(reply)  # type: ignore[assignment]
    with contextlib.suppress(SurefootError):
        CALLS[call](client)


@pytest.mark.parametrize("call", ADMIN)
@given(reply=replies | st.lists(texts, min_size=2, max_size=2).map(lambda t: [b"0", t]))
def test_an_administrator_raises_from_our_tree_alone(call: str, reply: Any) -> None:
    admin = MemoryServerAdmin("127.0.0.1", 1, "")
    admin._connection = Answering(reply)  # type: ignore[assignment]
    with contextlib.suppress(SurefootError):
        ADMIN[call](admin)


def test_a_scan_that_makes_no_progress_ends_with_the_holders_name() -> None:
    admin = MemoryServerAdmin("127.0.0.1", 1, "")
    admin._connection = Answering([b"7", [b"sf:job:index"]])  # type: ignore[assignment]
    with pytest.raises(InvalidServerReply):
        admin.list_jobs()


@given(text=st.binary(max_size=200) | st.text(max_size=200))
def test_a_record_of_any_bytes_is_refused_by_name(text: str | bytes) -> None:
    for read in (RankManifest.from_json, Layout.from_json):
        with contextlib.suppress(ProtocolError):
            read(text)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, list[bytes]]]:
    """Sends what it is told to whoever connects, then closes."""
    listener = socket.create_server(("127.0.0.1", 0))
    sent = [b""]

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listener.accept()
                with line:
                    line.settimeout(5)
                    with contextlib.suppress(OSError):
                        line.recv(4096)
                        line.sendall(sent[0])
                        line.shutdown(socket.SHUT_WR)
                        while line.recv(4096):
                            pass

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1], sent
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


starts = st.sampled_from(
    [b"", b"$", b"*", b":", b"+", b"-", b"$5\r\n", b"*2\r\n", b"$-", b":x", b"*-", b"$99999999999\r\n"]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=starts, rest=st.binary(max_size=30))
def test_any_bytes_on_the_line_end_in_our_tree(server: tuple[int, list[bytes]], start: bytes, rest: bytes) -> None:
    port, sent = server
    sent[0] = start + rest + b"\r\n"
    wire = RespConnection("127.0.0.1", port, Credentials(), 1.0)
    try:
        for use in (
            lambda: wire.call("GET", "a"),
            lambda: (wire.send("GET", "a"), wire.receive_into(memoryview(bytearray(5)))),
        ):
            with contextlib.suppress(SurefootError), translate_redis_errors("the holder", "reading"):
                use()
    finally:
        wire.close()
