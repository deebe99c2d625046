"""Runs the user's program in a warm-forked process, as the interpreter would.

The program runs once, as `__main__`, with its own argv and sys.path[0]. If it ends with an error, the error is
written down first: it is how the agent tells the first cause from its echoes on other ranks.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import gc
import importlib.machinery
import io
import json
import os
import runpy
import shutil
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from surefoot.linux_process import die_with_parent

# ---- the job's command -----------------------------------------------------------------------------------------------
# Parses the job's command: a Python program, or anything else. PURE but for one look at the file system (which
# interpreter the first word names). Called by the agent at start.


@dataclass(frozen=True, slots=True)
class LaunchProgram:
    """Names a Python program that can run in a forked process.

    Exactly one of `script` and `module` is set.
    """

    arguments: tuple[str, ...]
    script: str | None = None
    module: str | None = None


def forkable(command: Sequence[str], environment: Mapping[str, str]) -> LaunchProgram | None:
    """The program in `python [-u] script.py …` or `python [-u] -m module …`, if `python` is this very interpreter.

    Any other interpreter option changes how the interpreter starts, which a fork cannot: None, a cold start.
    """
    if not command or not _is_this_interpreter(command[0], environment):
        return None
    arguments = list(command[1:])
    while arguments and arguments[0] == "-u":  # a trainer's output is unbuffered by lines anyway
        arguments.pop(0)
    if len(arguments) >= 2 and arguments[0] == "-m":
        return LaunchProgram(arguments=tuple(arguments[2:]), module=arguments[1])
    if arguments and not arguments[0].startswith("-") and not os.path.isdir(arguments[0]):
        return LaunchProgram(arguments=tuple(arguments[1:]), script=arguments[0])
    return None


def with_own_interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which `python` is our own interpreter.

    As an activated virtual environment has it.
    """
    bin_folder = os.path.dirname(sys.executable)
    path = environment.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != bin_folder:
        path = bin_folder + os.pathsep + path
    return {**environment, "PATH": path}


def _is_this_interpreter(command: str, environment: Mapping[str, str]) -> bool:
    executable = shutil.which(command, path=environment.get("PATH"))
    if executable is None:
        return False
    # the same binary under another prefix is another environment, with other packages
    same_binary = os.path.realpath(executable) == os.path.realpath(sys.executable)
    return same_binary and _prefix(executable) == _prefix(sys.executable)


def _prefix(executable: str) -> str:
    folder = Path(os.path.abspath(executable)).parent
    for candidate in (folder.parent, folder):
        if (candidate / "pyvenv.cfg").exists():
            return os.path.realpath(candidate)
    return os.path.realpath(Path(os.path.realpath(executable)).parent)


# ---- job program -----------------------------------------------------------------------------------------------------

_TRACE_CHARACTERS = 8000
_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_TEARDOWN_SECONDS = 2.0
"""A failed trainer whose exit handlers hang (a process group waiting for the dead) ends after this."""


def run_program(program: LaunchProgram) -> NoReturn:
    """Runs it to its end, and the process with it."""
    rank_pid = os.getpid()  # what the program forks comes by here as well, and does not speak for the rank
    try:
        if program.script is not None:
            _run_script(program.script, program.arguments)
        else:
            sys.argv = [program.module or "", *program.arguments]
            sys.path[0] = os.getcwd()
            runpy.run_module(program.module or "", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
        if code is None or isinstance(code, int):
            _end(code or 0)
        if os.getpid() == rank_pid:
            write_report("SystemExit", str(code), "")
        sys.stderr.write(f"{code}\n")
        _end(1)
    except BaseException as error:  # noqa: BLE001  # whatever it is, it ended the program
        _report(error, told=os.getpid() == rank_pid)
        _end(130 if isinstance(error, KeyboardInterrupt) else 1)
    _end(0)


def write_report(kind: str, message: str, trace: str) -> None:
    """Writes the error file that `exit_cause.read_report` reads.

    Nothing if the agent named no file.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    body = {"kind": kind, "message": message, "at": time.time(), "trace": trace[-_TRACE_CHARACTERS:]}
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(body, file)
    os.replace(f"{path}.new", path)


def _run_script(path: str, arguments: tuple[str, ...]) -> None:
    full_path = os.path.abspath(path)
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=full_path,
        __builtins__=builtins,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", full_path),
    )
    sys.modules["__main__"] = module
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(full_path)
    with open(full_path, "rb") as file:
        code = compile(file.read(), full_path, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # this is what running a script is


def _report(error: BaseException, is_rank_process: bool) -> None:
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    error = error.with_traceback(trace)
    try:
        if is_rank_process:
            write_report(name, str(error), "".join(traceback.format_exception(error)))
    except OSError as problem:
        sys.stderr.write(f"surefoot: the error file could not be written: {problem}\n")
    # as the interpreter does before it prints: exit handlers look here for whether the program ended by an exception
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
    sys.excepthook(kind, error, trace)


def _end(code: int) -> NoReturn:
    """Ends as the interpreter would, but leaves taking down a million objects of the frameworks to the kernel.

    That costs it half a second and more, in which the job waits. Threads are joined (after success), exit handlers
    run, files are flushed; destructors do not run.
    """
    if code:
        # peers are waiting, and what this process would still wait for may be a broken collective
        with contextlib.suppress(RuntimeError):  # no thread can be had: the next line ends it
            threading.Thread(target=_cut_off, args=(code,), daemon=True).start()
        # needs no GIL, but ends with 1, or with SIGSEGV where threads run: for who holds the GIL, so that none does
        faulthandler.dump_traceback_later(2 * _TEARDOWN_SECONDS, exit=True, file=sys.__stderr__ or 2)
    else:
        threading._shutdown()  # type: ignore[attr-defined]  # the only way to end executors' threads as at any exit
    atexit._run_exitfuncs()
    for tracked_object in gc.get_objects():  # what was there before the fork is frozen, and not among them
        # by its type: a proxy of something dead raises when it is asked for its class
        if issubclass(type(tracked_object), _FILES):
            with contextlib.suppress(OSError, ValueError):
                if not tracked_object.closed:
                    tracked_object.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _cut_off(code: int) -> None:
    time.sleep(_TEARDOWN_SECONDS)
    try:
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)  # with the GIL held no other thread moves its frames
    finally:
        os._exit(code)


# ---- exec command ----------------------------------------------------------------------------------------------------
# Sets the parent-death signal, then execs a trainer that cannot be forked. `… PARENT_PID COMMAND ARGS…`.


def exec_under_parent() -> None:
    die_with_parent(int(sys.argv[1]))
    command = sys.argv[2:]
    try:
        os.execvp(command[0], command)  # the death signal survives exec
    except OSError as error:
        text = f"the job's command {command[0]!r} cannot be started: {error.strerror}"
        write_report("SystemExit", text, "")
        sys.exit(text)


if __name__ == "__main__":
    exec_under_parent()
