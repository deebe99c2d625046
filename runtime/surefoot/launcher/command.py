"""Parses the job's command: a Python program, or anything else.

PURE but for one look at the file system (which interpreter the first word names). Called by the agent at start.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


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
    rest = list(command[1:])
    while rest and rest[0] == "-u":  # a trainer's output is unbuffered by lines anyway
        rest.pop(0)
    if len(rest) >= 2 and rest[0] == "-m":
        return LaunchProgram(arguments=tuple(rest[2:]), module=rest[1])
    if rest and not rest[0].startswith("-") and not os.path.isdir(rest[0]):
        return LaunchProgram(arguments=tuple(rest[1:]), script=rest[0])
    return None


def with_own_interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which `python` is our own interpreter.

    As an activated virtual environment has it.
    """
    own = os.path.dirname(sys.executable)
    path = environment.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != own:
        path = own + os.pathsep + path
    return {**environment, "PATH": path}


def _is_this_interpreter(word: str, environment: Mapping[str, str]) -> bool:
    found = shutil.which(word, path=environment.get("PATH"))
    if found is None:
        return False
    # the same binary under another prefix is another environment, with other packages
    same_binary = os.path.realpath(found) == os.path.realpath(sys.executable)
    return same_binary and _prefix(found) == _prefix(sys.executable)


def _prefix(executable: str) -> str:
    folder = Path(os.path.abspath(executable)).parent
    for candidate in (folder.parent, folder):
        if (candidate / "pyvenv.cfg").exists():
            return os.path.realpath(candidate)
    return os.path.realpath(Path(os.path.realpath(executable)).parent)
