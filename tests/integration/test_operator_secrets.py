"""Secrets that several replicas make at one moment, and what agents see of the certificate among them."""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from typing import Any

import aiohttp
import pytest

from support.fakes.fake_api import FakeApi, silent
from surefoot.protocol.messages import Hello, HelloRejected
from surefoot_operator.controller.credentials import certificates
from surefoot_operator.controller.credentials.certificates import CA, CERTIFICATE, KEY, CoordinatorTls
from surefoot_operator.controller.credentials.secrets import (
    SecretRef,
    load_admin_password,
    load_or_create_secret,
    load_root_key,
    replace_secret,
)
from surefoot_operator.coordinator.agent_server import AgentServer
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.settings import CoordinatorSettings

WHERE = SecretRef("system", "kept")
TLS = SecretRef("system", "surefoot-coordinator-tls")
NAMES = ("localhost", "127.0.0.1")


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()


def stored(server: FakeApi, where: SecretRef, content: dict[str, bytes]) -> None:
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    server.keep(where.path, {"metadata": {"name": where.name, "namespace": where.namespace}, "data": data})


async def test_replicas_that_begin_together_end_with_one_secret(server: FakeApi) -> None:
    made = iter(range(10))
    calls = [load_or_create_secret(server.api, WHERE, lambda: {"a": str(next(made)).encode()}) for _ in range(5)]
    found = await asyncio.gather(*calls)
    assert len({content["a"] for content in found}) == 1
    assert [verb for verb, _ in server.asked].count("POST") == 5


async def test_what_is_there_is_used_as_it_is(server: FakeApi) -> None:
    stored(server, WHERE, {"a": b"theirs"})
    assert await load_or_create_secret(server.api, WHERE, lambda: {"a": b"ours"}) == {"a": b"theirs"}
    assert [verb for verb, _ in server.asked] == ["GET"]


async def test_a_change_in_between_is_not_lost(server: FakeApi) -> None:
    stored(server, WHERE, {"a": b"1"})
    between = iter([True])

    def meddle(verb: str, path: str) -> None:
        if verb == "PUT" and next(between, False):
            stored(server, WHERE, {"a": b"2"})

    server.before = meddle
    changed = await replace_secret(server.api, WHERE, lambda old: {**old, "b": b"new"})
    assert changed == {"a": b"2", "b": b"new"}
    assert await replace_secret(server.api, WHERE, lambda old: None) == changed


async def test_problems_are_sentences(server: FakeApi) -> None:
    server.keep(WHERE.path, {"metadata": {"name": "kept"}, "data": {"a": "%"}})
    with pytest.raises(PlatformError, match="secret system/kept is corrupt: delete it"):
        await load_or_create_secret(server.api, WHERE, dict)
    server.objects.clear()

    def nowhere(verb: str, path: str) -> None:
        if verb == "POST":
            raise ApiError("POST", 404, "NotFound", 'namespaces "system" not found')

    server.before = nowhere
    with pytest.raises(
        PlatformError, match="namespace system does not exist: create it with kubectl create namespace system"
    ):
        await load_or_create_secret(server.api, WHERE, lambda: {"a": b"1"})
    server.before = lambda verb, path: None
    stored(server, WHERE, {"root": b"short"})
    with pytest.raises(PlatformError, match="needs at least 32 bytes"):
        await load_root_key(server.api, WHERE)
    with pytest.raises(PlatformError, match="has no `password`"):
        await load_admin_password(server.api, WHERE)
    stored(server, WHERE, {"password": b"\xff"})
    with pytest.raises(PlatformError, match="not ASCII"):
        await load_admin_password(server.api, WHERE)


async def test_root_and_password_are_made_once_and_are_not_guessable(server: FakeApi) -> None:
    root = await load_root_key(server.api, SecretRef("system", "keys"))
    assert root == await load_root_key(server.api, SecretRef("system", "keys"))
    assert len(root) == 32
    password = await load_admin_password(server.api, SecretRef("system", "admin"))
    assert password == await load_admin_password(server.api, SecretRef("system", "admin"))
    assert len(password) == 64
    assert password.isalnum()


# ---- the certificate ------------------------------------------------------------------------------------------------


async def _refuse(hello: Hello) -> HelloRejected | None:
    return HelloRejected("no", retry=False)


async def seen_by_an_agent(url: str, authority: str) -> Any:
    """Connects as an agent does; the certificate that it was shown."""
    context = ssl.create_default_context(cadata=authority)
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, ssl=context) as socket,
    ):
        shown = socket.get_extra_info("ssl_object")
        return shown.getpeercert(binary_form=True)


async def test_agents_believe_the_certificate_and_the_one_that_follows_it(server: FakeApi) -> None:
    tls = CoordinatorTls(server.api, TLS, NAMES)
    await tls.start()
    stored_type = server.objects[TLS.path]["type"]
    assert stored_type == "kubernetes.io/tls"
    agents = AgentServer(CoordinatorSettings(), _refuse, tls.context)
    await agents.start()
    try:
        assert agents.url.startswith("wss://127.0.0.1:")
        first = await seen_by_an_agent(agents.url, tls.authority)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await seen_by_an_agent(agents.url, certificates.issue_certificate({}, NAMES, time.time())[CA].decode())
        # a second replica reads what the first made
        other = CoordinatorTls(server.api, TLS, NAMES)
        await other.start()
        assert other.authority == tls.authority
        # in the last third of its life
        old = certificates.issue_certificate({}, NAMES, time.time() - 300 * 86400)
        stored(server, TLS, old)
        await tls.start()
        assert tls.authority.encode() == old[CA]
        second = await seen_by_an_agent(agents.url, old[CA].decode())
        assert second != first
        assert certificates.renewal_reason(_content(server), NAMES, time.time()) == ""
    finally:
        await agents.close()


def _content(server: FakeApi) -> dict[str, bytes]:
    return {key: base64.b64decode(text) for key, text in server.objects[TLS.path]["data"].items()}


async def test_a_certificate_of_somebody_else_is_used_and_never_replaced(server: FakeApi) -> None:
    theirs = certificates.issue_certificate({}, NAMES, time.time() - 300 * 86400)
    del theirs[certificates.CA_KEY]
    stored(server, TLS, theirs)
    tls = CoordinatorTls(server.api, TLS, NAMES)
    await tls.start()
    assert _content(server) == theirs
    assert {verb for verb, _ in server.asked} == {"GET"}


async def test_a_secret_without_a_usable_key_says_so(server: FakeApi) -> None:
    other = certificates.issue_certificate({}, NAMES, time.time())
    mine = certificates.issue_certificate({}, NAMES, time.time())
    del mine[certificates.CA_KEY]
    stored(server, TLS, {**mine, KEY: other[KEY]})
    with pytest.raises(PlatformError, match=r"has no usable tls\.crt and tls\.key"):
        await CoordinatorTls(server.api, TLS, NAMES).start()
    stored(server, TLS, {CERTIFICATE: mine[CERTIFICATE]})
    with pytest.raises(PlatformError, match="has no usable"):
        await CoordinatorTls(server.api, TLS, NAMES).start()


async def test_a_look_that_fails_leaves_what_is_shown(server: FakeApi) -> None:
    tls = CoordinatorTls(server.api, TLS, NAMES)
    await tls.start()
    known = tls.authority
    server.before = silent
    with pytest.raises(PlatformError):
        await tls.start()
    assert tls.authority == known
