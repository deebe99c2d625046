"""Runs the user's program in a warm-forked process, as the interpreter would.

The program runs once, as `__main__`, with its own argv and sys.path[0]. If it ends with an error, that is first written
to a file, from which the agent distinguishes the first cause from secondary errors of other ranks.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import gc
import importlib.machinery
import importlib.util
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from surefoot.linux_process import die_with_parent, initial_environment

# ---- the job's command -----------------------------------------------------------------------------------------------
# Parses the job's command: a Python program for this interpreter, or anything else. Pure, except that it searches the
# file system for the interpreter. The agent calls it at start.


@dataclass(frozen=True, slots=True)
class LaunchProgram:
    """Names a Python program that can run in a forked process.

    Exactly one of `script` and `module` is set.
    """

    arguments: tuple[str, ...]
    script: str | None = None
    module: str | None = None
    command: tuple[str, ...] = field(default=(), compare=False)
    """The whole command, for `sys.orig_argv`."""


def parse_forkable_program(command: Sequence[str], environment: Mapping[str, str]) -> LaunchProgram | None:
    """Returns the program in `python [-u] script.py …` or `python [-u] -m module …` if it can run in a forked process.

    None (a cold start): `python` is another interpreter, or has other options, which a forked process cannot apply.
    """
    if not command or not _is_this_interpreter(command[0], environment):
        return None
    arguments = list(command[1:])
    while arguments and arguments[0] == "-u":  # a trainer's output is line-buffered anyway
        arguments.pop(0)
    if len(arguments) >= 2 and arguments[0] == "-m":
        return LaunchProgram(arguments=tuple(arguments[2:]), module=arguments[1], command=tuple(command))
    # a folder or an archive of modules, or bytecode, is not a source file
    is_source = (
        bool(arguments) and not arguments[0].endswith((".pyc", ".pyz", ".zip")) and not os.path.isdir(arguments[0])
    )
    if is_source and not arguments[0].startswith("-"):
        return LaunchProgram(arguments=tuple(arguments[1:]), script=arguments[0], command=tuple(command))
    return None


def with_own_interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which `python` is this interpreter, as in an activated virtual environment."""
    bin_folder = os.path.dirname(sys.executable)
    path = environment.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != bin_folder:
        path = bin_folder + os.pathsep + path
    return {**environment, "PATH": path}


def _is_this_interpreter(command: str, environment: Mapping[str, str]) -> bool:
    executable = shutil.which(command, path=environment.get("PATH"))
    if executable is None:
        return False
    # the same binary with another prefix belongs to another environment, with other packages
    same_binary = os.path.realpath(executable) == os.path.realpath(sys.executable)
    return same_binary and _environment_prefix(executable) == _environment_prefix(sys.executable)


def _environment_prefix(executable: str) -> str:
    folder = Path(os.path.abspath(executable)).parent
    for candidate in (folder.parent, folder):
        if (candidate / "pyvenv.cfg").exists():
            return os.path.realpath(candidate)
    return os.path.realpath(Path(os.path.realpath(executable)).parent)


# ---- job program -----------------------------------------------------------------------------------------------------

_TRACE_CHARACTERS = 8000
_FILE_TYPES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_TEARDOWN_SECONDS = 2.0
"""Time after which a failed trainer ends although its exit handlers hang, as in a process group with dead ranks."""


def prepare_program(program: LaunchProgram) -> None:
    """Gives this process the `__main__`, arguments and `sys.path[0]` that the interpreter gives the program."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins)
    if program.script is not None:
        full_path = os.path.abspath(program.script)
        loader = importlib.machinery.SourceFileLoader("__main__", full_path)
        main.__dict__.update(__file__=full_path, __cached__=None, __loader__=loader)
        folder = os.path.dirname(os.path.realpath(full_path))
    else:
        folder = os.getcwd()
    sys.modules["__main__"] = main
    # "-m" until the module is found: its packages are imported before that
    sys.argv = [program.script or "-m", *program.arguments]
    if program.command:
        sys.orig_argv = list(program.command)
    if not sys.flags.safe_path:
        sys.path[0] = folder


def prepare_module(name: str, argv: list[str]) -> None:
    """Gives `__main__` and `argv` what `python -m` gives them before the first statement; imports the module's packages."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"No module named {name}")
    sys.modules["__main__"].__dict__.update(
        __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent, __spec__=spec
    )
    argv[0] = spec.origin or name


def run_program(program: LaunchProgram, remaining: Callable[[], types.CodeType] | None = None) -> NoReturn:
    """Runs the program after `prepare_program` and ends the process with its exit code.

    Args:
        program: The program to run.
        remaining: Compiles the rest of a program whose first statements were executed in advance.
    """
    rank_pid = os.getpid()  # children that the program forks return here as well, and must not report for the rank
    try:
        if program.script is not None:
            source_code = remaining() if remaining is not None else _script_code(program.script)
            exec(source_code, sys.modules["__main__"].__dict__)  # as the interpreter runs a script
        else:
            if remaining is not None:
                _replace_module_code(remaining())
            # the function that `python -m` calls: the program runs in the existing `__main__`
            runpy._run_module_as_main(program.module or "")  # type: ignore[attr-defined]
    except SystemExit as end:
        code = end.code
        if code is None or isinstance(code, int):
            _end_process(code or 0)
        if os.getpid() == rank_pid:
            write_report("SystemExit", str(code), "")
        sys.stderr.write(f"{code}\n")
        _end_process(1)
    except BaseException as error:  # noqa: BLE001  # any exception ends the program
        _report_error(error, is_rank_process=os.getpid() == rank_pid)
        _end_process(130 if isinstance(error, KeyboardInterrupt) else 1)
    _end_process(0)


def write_report(kind: str, message: str, trace: str) -> None:
    """Writes the error file for `exit_cause.read_report`; does nothing if TORCHELASTIC_ERROR_FILE is not set."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    body = {"kind": kind, "message": message, "at": time.time(), "trace": trace[-_TRACE_CHARACTERS:]}
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(body, file)
    os.replace(f"{path}.new", path)


def _script_code(path: str) -> types.CodeType:
    full_path = os.path.abspath(path)
    with open(full_path, "rb") as file:
        return compile(file.read(), full_path, "exec", dont_inherit=True)


def _replace_module_code(code: types.CodeType) -> None:
    """Has runpy run this code as the prepared module, so that its tracebacks are those of any `python -m`."""
    find_module = runpy._get_module_details  # type: ignore[attr-defined]
    spec = sys.modules["__main__"].__spec__

    def module_details(*_: object) -> tuple[str, object, types.CodeType]:
        runpy._get_module_details = find_module  # type: ignore[attr-defined]
        return spec.name if spec else "", spec, code

    runpy._get_module_details = module_details  # type: ignore[attr-defined]


def _report_error(error: BaseException, is_rank_process: bool) -> None:
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    try:
        if is_rank_process:
            write_report(name, str(error), "".join(traceback.format_exception(error)))
    except OSError as problem:
        sys.stderr.write(f"surefoot: the error file could not be written: {problem}\n")
    # as the interpreter does before it prints: exit handlers read these to see whether an exception ended the program
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
    sys.excepthook(kind, error, trace)


def _end_process(code: int) -> NoReturn:
    """Ends the process as the interpreter would, but without destroying the frameworks' million objects.

    That would take half a second or more, during which the job waits. Threads are joined (after success), exit handlers
    run and files are flushed; destructors do not run.
    """
    if code:
        # peers are waiting for this exit, and the exit handlers may hang in a broken collective
        with contextlib.suppress(RuntimeError):  # no thread can be created: the next line ends the process
            threading.Thread(target=_end_after_timeout, args=(code,), daemon=True).start()
        # the second safeguard works even if C code never releases the GIL, but ends with 1, or SIGSEGV if threads run
        faulthandler.dump_traceback_later(2 * _TEARDOWN_SECONDS, exit=True, file=sys.__stderr__ or 2)
    else:
        threading._shutdown()  # type: ignore[attr-defined]  # the only way to end executors' threads as at any exit
    atexit._run_exitfuncs()
    for tracked_object in gc.get_objects():  # objects from before the fork are frozen and not listed
        # by its type: a proxy of a dead object raises when its class is read
        if issubclass(type(tracked_object), _FILE_TYPES):
            with contextlib.suppress(OSError, ValueError):
                if not tracked_object.closed:
                    tracked_object.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_after_timeout(code: int) -> None:
    time.sleep(_TEARDOWN_SECONDS)
    try:
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)  # under the GIL no other thread changes its frames
    finally:
        os._exit(code)


# ---- exec command ----------------------------------------------------------------------------------------------------
# Sets the parent-death signal, then execs a trainer that cannot be forked. `… PARENT_PID COMMAND ARGS…`.


def exec_under_parent() -> None:
    die_with_parent(int(sys.argv[1]))
    command = sys.argv[2:]
    try:
        # with the environment as it was: this interpreter may have added the locale's variables to its own
        os.execvpe(command[0], command, initial_environment())  # the death signal survives exec
    except OSError as error:
        text = f"the job's command {command[0]!r} cannot be started: {error.strerror}"
        write_report("SystemExit", text, "")
        sys.exit(text)


if __name__ == "__main__":
    exec_under_parent()
