"""The warm process itself: what a program sees that was forked from it, and that nothing outlives anything."""

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from support import busy_threads
from support.fakes.fake_coordinator import all_gone, descendants, lives
from surefoot.launcher import child_process as child_module
from surefoot.launcher.job_program import LaunchProgram
from surefoot.launcher.starter import CannotFork, ForkRequest, ForkServerClient, Starter

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


@dataclass
class Warm:
    """One zygote for the whole module: every test forks its own programs from it."""

    client: ForkServerClient
    changed: asyncio.Event
    folder: Path
    runs: int = field(default=0)

    async def run(self, source: str, *arguments: str, **environment: str) -> tuple[int, str, Path]:
        """The exit code, the output and the error file of a program."""
        self.runs += 1
        script = self.folder / f"program{self.runs}.py"
        script.write_text(source)
        log, error_file = script.with_suffix(".log"), script.with_suffix(".error")
        values = {**ENVIRONMENT, "TORCHELASTIC_ERROR_FILE": str(error_file), **environment}
        with log.open("ab") as output:
            program = LaunchProgram(arguments, script=str(script))
            child = await self.client.fork_trainer(ForkRequest(program, values, str(self.folder), output.fileno()))
        code = await asyncio.wait_for(child.exited, 60)
        return code, log.read_text(), error_file


async def become_warm(program: LaunchProgram | None, folder: Path) -> tuple[ForkServerClient, asyncio.Event]:
    changed = asyncio.Event()
    client = ForkServerClient(changed.set)
    with (folder / "zygote.log").open("ab") as output:
        client.start(program, ENVIRONMENT, output.fileno())
    await asyncio.wait_for(changed.wait(), 60)
    return client, changed


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def warm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Warm]:
    folder = tmp_path_factory.mktemp("zygote")
    client, changed = await become_warm(None, folder)
    yield Warm(client, changed, folder)
    await client.close()


async def test_a_program_finds_itself_alone_and_as_main(warm: Warm) -> None:
    source = """
import atexit, gc, json, os, sys, pickle
class Mine: pass
atexit.register(print, "atexit ran")
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(),
    "mine": os.environ.get("MINE"), "main": sys.modules["__main__"].Mine is Mine,
    "pickled": isinstance(pickle.loads(pickle.dumps(Mine())), Mine),
    "stdin": sys.stdin.read(), "torch": "torch" in sys.modules, "group": os.getpgid(0),
    "threads": len(os.listdir("/proc/self/task")), "agent": "surefoot.agent.agent_process" in sys.modules,
    "collector": [gc.isenabled(), *gc.get_threshold()],
}))
"""
    code, log, error_file = await warm.run(source, "--lr", "1e-3", MINE="yes")
    assert code == 0, log
    found = json.loads(log.splitlines()[0])
    script = warm.folder / f"program{warm.runs}.py"
    assert found == {
        "name": "__main__",
        "file": str(script),
        "argv": [str(script), "--lr", "1e-3"],
        "path": str(warm.folder),
        "folder": str(warm.folder),
        "mine": "yes",
        "main": True,
        "pickled": True,
        "stdin": "",
        "torch": True,
        "group": os.getpgid(0),
        "threads": 1,
        "agent": False,
        "collector": [True, *gc.get_threshold()],
    }
    assert log.splitlines()[1:] == ["atexit ran"], "and no word of the interpreter's own"
    assert not error_file.exists()


async def test_no_two_programs_share_their_randomness(warm: Warm) -> None:
    source = "import random, numpy\nprint(random.random(), numpy.random.random())\n"
    first, second = [(await warm.run(source))[1].split() for _ in range(2)]
    assert first[0] != second[0]
    assert first[1] != second[1]


async def test_threads_are_set_by_the_environment(warm: Warm) -> None:
    source = "import torch\nprint(torch.get_num_threads())\n"
    assert (await warm.run(source, OMP_NUM_THREADS="3"))[1] == "3\n"


async def test_an_error_is_written_down_with_its_trace_and_without_ours(warm: Warm) -> None:
    code, log, error_file = await warm.run("def f():\n    raise KeyError('x')\nf()\n")
    report = json.loads(error_file.read_text())
    assert (code, report["kind"], report["message"]) == (1, "KeyError", "'x'")
    assert log.startswith("Traceback (most recent call last):\n")
    assert "raise KeyError('x')" in log
    assert "surefoot/agent" not in log + report["trace"]


@pytest.mark.parametrize(("end", "seen"), [("raise KeyError('x')", "KeyError"), ("sys.exit(3)", "NoneType")])
async def test_exit_handlers_see_what_error_ended_the_program(warm: Warm, end: str, seen: str) -> None:
    said = "print(type(getattr(sys, 'last_value', None)).__name__, flush=True)"
    _, log, _ = await warm.run(f"import atexit, sys\natexit.register(lambda: {said})\n{end}\n")
    assert log.splitlines()[-1] == seen


@pytest.mark.parametrize(
    ("source", "code", "told"),
    [
        ("import sys; sys.exit(4)", 4, None),
        ("import sys; sys.exit('no data here')", 1, "no data here"),
        ("import sys; sys.exit()", 0, None),
        ("import os; os._exit(9)", 9, None),
        ("import os; os.kill(os.getpid(), 15)", -15, None),
        ("this is no python", 1, "invalid syntax"),
    ],
)
async def test_a_program_ends_as_it_would_by_itself(warm: Warm, source: str, code: int, told: str | None) -> None:
    found, _, error_file = await warm.run(source)
    assert found == code
    if told is None:
        assert not error_file.exists()
    else:
        assert told in json.loads(error_file.read_text())["message"]


async def test_ends_are_orderly_but_quick(warm: Warm) -> None:
    source = """
import concurrent.futures, tempfile, threading, time
left = open("left-open.txt", "w"); left.write("all of it")
folder = tempfile.TemporaryDirectory(dir=".")
pool = concurrent.futures.ThreadPoolExecutor(1); pool.submit(time.sleep, 0.1)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread done"))).start()
print(folder.name)
"""
    code, log, _ = await warm.run(source)
    assert code == 0
    folder, done = log.splitlines()
    assert done == "thread done"
    assert (warm.folder / "left-open.txt").read_text() == "all of it"
    assert not (warm.folder / folder).exists()


async def test_exit_handlers_that_hang_after_an_error_are_cut_off(warm: Warm) -> None:
    source = "import atexit, time\natexit.register(time.sleep, 1000)\nraise ValueError('first')\n"
    code, _, error_file = await warm.run(source)
    assert code == 1
    assert json.loads(error_file.read_text())["message"] == "first"


async def test_a_program_that_is_cut_off_keeps_its_code_whatever_its_threads_run(warm: Warm) -> None:
    hang = "import atexit\n@atexit.register\ndef hang(): threading.Event().wait()\nraise SystemExit(7)\n"
    code, log, _ = await warm.run(busy_threads.SOURCE + hang)
    assert code == 7, log
    assert "in hang" in log


async def test_an_exit_handler_that_hangs_in_c_with_the_gil_is_cut_off_too(warm: Warm) -> None:
    source = "import atexit, ctypes\natexit.register(ctypes.PyDLL(None).sleep, 1000)\nraise SystemExit(7)\n"
    code, _, _ = await warm.run(source)
    assert code == 1


async def test_a_module_next_to_the_script_starts_its_thread_in_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    script = tmp_path / "program.py"
    script.write_text("import threaded, os\nprint('ran', os.environ['RANK'])\n")
    warmth: asyncio.Queue[bool] = asyncio.Queue()
    starter = Starter([sys.executable, str(script)], ENVIRONMENT, tmp_path / "zygote.log", warmth.put_nowait)
    starter.start()
    try:
        assert await asyncio.wait_for(warmth.get(), 60)
        with (tmp_path / "log").open("ab") as output:
            child = await starter.start_trainer({**ENVIRONMENT, "RANK": "3"}, str(tmp_path), output.fileno())
        assert await asyncio.wait_for(child.exited, 60) == 0
        assert (tmp_path / "log").read_text() == "ran 3\n"
    finally:
        await starter.close()


async def test_the_thread_of_an_allocator_that_survives_forks_keeps_nothing_from_being_forked(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    # pandas, datasets and transformers' Trainer import it, and are slow to import
    script.write_text("import pyarrow\nprint(pyarrow.array(range(100_000)).nbytes)\n")
    client, _ = await become_warm(LaunchProgram((), script=str(script)), tmp_path)
    try:
        with (tmp_path / "log").open("ab") as output:
            request = ForkRequest(LaunchProgram((), script=str(script)), ENVIRONMENT, os.getcwd(), output.fileno())
            child = await client.fork_trainer(request)
        assert await asyncio.wait_for(child.exited, 60) == 0
        assert (tmp_path / "log").read_text() == "800000\n"
    finally:
        await client.close()


async def test_a_dead_proxy_does_not_turn_success_into_failure(warm: Warm) -> None:
    source = """
import weakref
class Thing: pass
thing = Thing()
keep = [weakref.proxy(thing)]
del thing
file = open('flushed.txt', 'w')
file.write('written')
"""
    code, output, _ = await warm.run(source)
    assert (code, output) == (0, "")
    assert (warm.folder / "flushed.txt").read_text() == "written"


async def test_children_die_with_the_zygote_and_their_end_is_heard(tmp_path: Path) -> None:
    client, _ = await become_warm(None, tmp_path)
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    with (tmp_path / "log").open("ab") as output:
        request = ForkRequest(LaunchProgram((), script=str(script)), ENVIRONMENT, str(tmp_path), output.fileno())
        child = await client.fork_trainer(request)
    os.kill(client.pid, signal.SIGKILL)
    assert await asyncio.wait_for(child.exited, 60) == -9
    assert not lives(child.pid)
    with pytest.raises(CannotFork):
        await client.fork_trainer(request)
    await client.close()


async def test_a_code_that_comes_late_is_the_programs_own(tmp_path: Path) -> None:
    """On a busy machine three programs that had just finished were taken for killed, and their world was begun again."""
    client, _ = await become_warm(None, tmp_path)
    script, may_end = tmp_path / "waits.py", tmp_path / "may-end"
    script.write_text(f"import os, time\nwhile not os.path.exists({str(may_end)!r}):\n    time.sleep(0.01)\n")
    with (tmp_path / "log").open("ab") as output:
        request = ForkRequest(LaunchProgram((), script=str(script)), ENVIRONMENT, str(tmp_path), output.fileno())
        child = await client.fork_trainer(request)
    os.kill(client.pid, signal.SIGSTOP)
    try:
        may_end.touch()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(child.exited), 2 * child_module._CODE_SECONDS)
    finally:
        os.kill(client.pid, signal.SIGCONT)
    assert await asyncio.wait_for(child.exited, 60) == 0
    await client.close()


async def test_closing_ends_the_zygote_and_everything_below_it(warm: Warm, tmp_path: Path) -> None:
    client, _ = await become_warm(None, tmp_path)
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    with (tmp_path / "log").open("ab") as output:
        child = await client.fork_trainer(
            ForkRequest(LaunchProgram((), script=str(script)), ENVIRONMENT, str(tmp_path), output.fileno())
        )
    below = descendants(client.pid) | {client.pid, child.pid}
    await client.close()
    assert await all_gone(below)
