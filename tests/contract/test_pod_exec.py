"""What the doctor runs in workers, through a web socket as an API server has it, against real listeners."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.servers.api_stand_in import answered_by
from support.servers.certificates import authority
from surefoot_operator.cli import reach_program
from surefoot_operator.cli.doctor_network import BEGIN
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError, ApiUnreachable

PATH = "/api/v1/namespaces/team/pods/gpt-worker-0-1/exec"
SECONDS = 60.0


class ExecServer:
    """Runs the command here, with `environment`, and answers by channels; `cut` ends the line instead."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.status = 101
        self.cut = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.status != 101:
            return web.json_response({"message": "no pods/exec"}, status=self.status)
        response = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await response.prepare(request)
        if self.cut:
            await response.close()
            return response
        told = await response.receive_bytes()
        assert told[:1] == b"\0"
        pipe = asyncio.subprocess.PIPE
        words = [sys.executable if word == "python3" else word for word in request.query.getall("command")]
        environment = {**os.environ, **self.environment}
        running = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
        output, errors = await running.communicate(told[1:])
        await response.send_bytes(b"\1" + output)
        await response.send_bytes(b"\2" + errors)
        code = running.returncode
        status: dict[str, Any] = {"status": "Success"}
        if code:
            status = {"status": "Failure", "message": f"command terminated with exit code {code}"}
        await response.send_bytes(b"\3" + json.dumps(status).encode())
        await response.close()
        return response


@pytest.fixture
async def served() -> AsyncIterator[tuple[ExecServer, Api]]:
    server = ExecServer()
    async with answered_by(PATH, server.answer) as api:
        yield server, api


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found.getsockname()[1]


@pytest.fixture
def closed() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


async def reached(api: Api, *targets: dict[str, Any]) -> list[dict[str, Any]]:
    told = json.dumps([inspect.getsource(reach_program), targets])
    ran = await api.exec_in_pod(PATH, "trainer", ("python3", "-c", BEGIN), f"{told}\n", SECONDS)
    assert (ran.failure, ran.stderr) == ("", "")
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def target(kind: str, port: int) -> dict[str, Any]:
    return {"kind": kind, "node": "n1", "host": "127.0.0.1", "port": port}


async def test_what_listens_is_reached_and_what_does_not_is_told_with_its_step(
    served: tuple[ExecServer, Api], listener: int, closed: int
) -> None:
    server, api = served
    server.environment = {"SUREFOOT_COORDINATOR_URL": f"ws://127.0.0.1:{listener}/v1/agents"}
    nowhere = {**target("holder", listener), "host": "nowhere.invalid"}
    targets = (target("holder", listener), target("holder", closed), target("worker", closed), nowhere)
    operator, holder, refused, worker, unknown = await reached(api, *targets)
    assert operator["kind"] == "coordinator"
    assert all(one["seconds"] < SECONDS for one in (operator, holder, worker)), "a refusal shows that the way is open"
    assert (refused["step"], unknown["step"]) == ("connect", "resolve")
    assert "refused" in refused["problem"]


async def test_the_operator_is_verified_by_the_authority_that_the_worker_was_given(
    served: tuple[ExecServer, Api], tmp_path: Path
) -> None:
    server, api = served
    ours, others = authority("ours"), authority("others")
    tls = await asyncio.start_server(
        lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=ours.sign("localhost").server(tmp_path)
    )
    url = f"wss://localhost:{tls.sockets[0].getsockname()[1]}/v1/agents"
    try:
        for given, step in ((ours, ""), (others, "verify")):
            server.environment = {"SUREFOOT_COORDINATOR_URL": url, "SUREFOOT_COORDINATOR_CA": given.pem}
            [found] = await reached(api)
            assert found.get("step", "") == step
    finally:
        tls.close()
        await tls.wait_closed()


async def test_a_worker_without_an_operators_address_says_so(served: tuple[ExecServer, Api]) -> None:
    server, api = served
    server.environment = {"SUREFOOT_COORDINATOR_URL": ""}
    [found] = await reached(api)
    assert "is not set here" in found["problem"]


async def test_a_program_that_fails_leaves_its_words(served: tuple[ExecServer, Api]) -> None:
    ran = await served[1].exec_in_pod(PATH, "trainer", ("python3", "-c", "import sys; sys.exit('no')"), "\n", SECONDS)
    assert (ran.stdout, ran.stderr.strip(), ran.failure) == ("", "no", "command terminated with exit code 1")


async def test_a_refusal_and_a_cut_line_are_told_apart(served: tuple[ExecServer, Api]) -> None:
    server, api = served
    server.status = 403
    with pytest.raises(ApiError) as refused:
        await api.exec_in_pod(PATH, "trainer", ("true",), "", SECONDS)
    assert refused.value.code == 403
    server.status, server.cut = 101, True
    with pytest.raises(ApiUnreachable, match="closed before the program ended"):
        await api.exec_in_pod(PATH, "trainer", ("true",), "", SECONDS)


def test_the_program_needs_the_standard_library_alone() -> None:
    imported = {
        line.split()[1].partition(".")[0]
        for line in inspect.getsource(reach_program).splitlines()
        if line.startswith(("import ", "from "))
    }
    assert imported <= sys.stdlib_module_names
    assert ssl.__name__ in imported
