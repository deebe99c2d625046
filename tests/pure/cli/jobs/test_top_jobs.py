"""`surefoot top` looks until the job is over, and outlives a silent API server."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import pytest
from rich.console import Console

from support.builders import running
from support.fakes.fake_api import FakeApi, silent
from support.stored import written
from surefoot_operator.cli.cluster_access import ClusterRefused, OpenCluster
from surefoot_operator.cli.jobs import top
from surefoot_operator.cli.jobs.read_jobs import StoredJob, read_job, stored_job
from surefoot_operator.cli.jobs.top import JobsTop, LineTop, TableTop, TopRow, drawn_top, top_row
from surefoot_operator.cli.main import main
from surefoot_operator.platforms.kubernetes.api_objects import ApiRefused

JOB = "/apis/surefoot.dev/v1alpha1/namespaces/team/trainingjobs/gpt"


@dataclass(slots=True)
class Kept:
    """A view that keeps what it was shown, and lets a test act in between."""

    acts: list[Any]
    shown: list[tuple[list[str], str]] = field(default_factory=list)
    closed: bool = False

    def show(self, rows: Sequence[TopRow], note: str) -> None:
        self.shown.append(([row.state for row in rows], note))
        if self.acts:
            self.acts.pop(0)()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True


def job(phase: str = "Running", message: str = "") -> StoredJob:
    seen = running()
    return stored_job(written(replace(seen.status, phase=phase, message=message), seen))  # type: ignore[arg-type]


@pytest.fixture
def server() -> FakeApi:
    found = FakeApi()
    set_phase(found, "Running")
    return found


def set_phase(server: FakeApi, phase: str) -> None:
    seen = running()
    server.keep(JOB, written(replace(seen.status, phase=phase), seen))  # type: ignore[arg-type]


async def followed(server: FakeApi, view: Kept) -> int:
    cluster = OpenCluster(server.api, "team", "https://cluster:6443")

    async def look() -> Sequence[StoredJob]:
        return [await read_job(cluster, "gpt")]

    async with asyncio.timeout(30):
        return await JobsTop(view, 0.0).run(look, one=True)


@pytest.mark.parametrize(("phase", "code"), [("Complete", 0), ("Failed", 1)])
async def test_one_job_is_shown_until_it_is_over(server: FakeApi, phase: str, code: int) -> None:
    view = Kept([lambda: None, lambda: set_phase(server, phase)])
    assert await followed(server, view) == code
    assert [states for states, _ in view.shown] == [["Running"], ["Running"], [phase]]
    assert view.closed


async def test_a_silent_server_leaves_the_last_look_and_says_so(server: FakeApi) -> None:
    def mute() -> None:
        server.before = silent

    def speak() -> None:
        server.before = lambda verb, path: None
        set_phase(server, "Complete")

    view = Kept([mute, lambda: None, speak])
    assert await followed(server, view) == 0
    assert [(states, bool(note)) for states, note in view.shown] == [
        (["Running"], False), (["Running"], True), (["Running"], True), (["Complete"], False),
    ]  # fmt: skip


async def test_a_refusal_ends_it_and_so_does_silence_from_the_first(server: FakeApi) -> None:
    def refuse() -> None:
        def before(verb: str, path: str) -> None:
            raise ApiRefused(f"{verb} {path}", 403, "Forbidden", "no")

        server.before = before

    view = Kept([refuse])
    with pytest.raises(ClusterRefused, match="you may not get"):
        await followed(server, view)
    assert view.closed
    server.before = silent
    with pytest.raises(ClusterRefused):
        await followed(server, Kept([]))


def test_lines_are_printed_for_changes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    view = LineTop()
    rows = [top_row(job(), 1100.0, None, False)]
    view.show(rows, "")
    view.show([top_row(job(), 1200.0, None, False)], "")  # older, else the same
    view.show(rows, "the API server has not answered for 2 s")
    view.show(rows, "the API server has not answered for 4 s")
    view.show([top_row(job("Failed", "budget spent"), 1100.0, None, False)], "")
    view.show([], "")
    lines = [line[9:] for line in capsys.readouterr().out.splitlines()]
    assert [line.split(",")[0] for line in lines] == [
        "gpt Running", "the API server has not answered for 2 s", "gpt Failed", "the API server answers again", "gpt is gone",
    ]  # fmt: skip
    assert lines[2].endswith(": budget spent")


def test_a_table_has_the_words_of_those_that_do_not_train() -> None:
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=True, color_system=None)
    rows = [top_row(job("Recovering", "worker [bold]1[/bold] is\x1b[2Jlost"), 1100.0, None, False)]
    with TableTop(console) as view:
        view.show(rows, "")
    assert "Recovering" in out.getvalue()
    assert "gpt: worker [bold]1[/bold] is\\x1b[2Jlost" in out.getvalue()
    assert len(drawn_top([], "note").renderables) == 2


def test_the_command_looks_once_at_all(
    server: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_cluster(_given: Any, ask: Any) -> Any:
        return asyncio.run(ask(OpenCluster(server.api, "team", "s")))

    monkeypatch.setattr(top, "on_cluster", on_cluster)
    assert main(["top", "--once"]) == 0
    assert "gpt Running, ready 3/3, step 42" in capsys.readouterr().out

    def interrupted(_given: Any, ask: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "on_cluster", interrupted)
    assert main(["top"]) == 0


@pytest.mark.parametrize(
    "given", [["--interval", "0"], ["--interval", "nan"], ["gpt", "-A"], ["gpt", "--run-folder", "x"]]
)
def test_what_cannot_be_is_refused(given: list[str]) -> None:
    assert main(["top", *given]) == 2
