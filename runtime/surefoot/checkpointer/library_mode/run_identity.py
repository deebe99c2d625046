"""Identifies the run that began a generation, and says at a start which run's checkpoints it continues from.

Without an agent only a folder connects one start with the next. A start with other arguments, or of another script, may be
another training that would silently continue from the first one's weights. So each start records its script, arguments and
environment, and the next one compares them and logs one line. Called by `library` and `backends`.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

MAX_ARGUMENT_CHARACTERS = 2000
MAX_VARIABLES = 256
"""An environment with more variables is not recorded."""
_MAX_NAMED_VARIABLES = 6

_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_UNRELATED = re.compile(
    r"_|PWD|OLDPWD|SHLVL|PATH|MANPATH|INFOPATH|HOME|USER|LOGNAME|MAIL|SHELL|HOSTNAME|EDITOR|PAGER|LESS\w*|LS_COLORS|PS1|"
    r"TERM\w*|COLORTERM|COLUMNS|LINES|DISPLAY|WINDOWID|INVOCATION_ID|JOURNAL_STREAM|TMP|TEMP|TMPDIR|TMUX\w*|STY|"
    r"(?:SSH|XDG|DBUS|VSCODE|GNOME|SYSTEMD|KUBERNETES|POD|SLURM\w*|PBS|LSB|LSF|SGE|OMPI|PMIX?|TORCHELASTIC|PYTEST|SUREFOOT|"
    r"AWS|JPY|GROUP|ROLE|LOCAL)_.*|\w+_SERVICE_\w+|\w+_PORT(?:_\w+)?|SLURMD?_\w+|RANK|WORLD_SIZE|MASTER_ADDR|"
    r"CUDA_VISIBLE_DEVICES"
)
"""Variables of sessions, launchers and batch systems, which differ from start to start of one training."""


@dataclass(frozen=True, slots=True)
class GenerationOwner:
    """Identifies the run that began a generation."""

    program: str = ""
    """Path of the script."""
    host: str = ""
    began_at: float = 0.0
    """Unix seconds, for users."""
    arguments: tuple[str, ...] = ()
    """Command line after the script; values of arguments that are named like secrets are digests."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Digests of variables that may change a training, by name."""

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> GenerationOwner:
        """Describes this process."""
        script = str(Path(sys.argv[0]).resolve()) if sys.argv and sys.argv[0] else ""
        return cls(script, socket.gethostname(), time.time(), _own_arguments(), _environment_digests(environment))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> GenerationOwner:
        """Parses a record. Raises KeyError, TypeError or ValueError for a damaged one."""
        arguments = tuple(str(argument) for argument in record.get("arguments", ()))
        environment = {str(name): str(digest) for name, digest in dict(record.get("environment", {})).items()}
        return cls(str(record["program"]), str(record["host"]), float(record["began_at"]), arguments, environment)

    @property
    def name(self) -> str:
        """The script's file name, or the package's folder for `__main__.py`.

        It stays the same when the program is started from another path.
        """
        path = Path(self.program)
        return path.parent.name if path.name == "__main__.py" else path.name

    @property
    def command(self) -> str:
        return shlex.join([self.name or "a program without a name", *self.arguments])

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.began_at)) if self.began_at else "at some time"
        return f"{self.program or 'a program without a name'} on {self.host or 'some host'}, {when}"

    def differences(self, earlier: GenerationOwner) -> list[str]:
        """Describes how this run differs from an earlier one, in clauses."""
        clauses = []
        if self.name and earlier.name and self.name != earlier.name:
            clauses.append(f"this is another program, {self.program}")
        elif self.arguments != earlier.arguments:
            clauses.append(f"this run's arguments differ: {self.command}")
        if self.environment and earlier.environment:
            names = {name for name, _ in self.environment.items() ^ earlier.environment.items()}
            if names:
                shown = ", ".join(sorted(names)[:_MAX_NAMED_VARIABLES])
                others = f" and {len(names) - _MAX_NAMED_VARIABLES} more" if len(names) > _MAX_NAMED_VARIABLES else ""
                clauses.append(f"these environment variables differ: {shown}{others}")
        return clauses


def start_line(place: str, step: int, earlier: GenerationOwner | None, present: GenerationOwner, hint: str = "") -> str:
    """Describes where a start's checkpoints go and which run it continues.

    Args:
        place: Absolute path or URI of the job's folder.
        step: Step of the restore point; 0: the beginning.
        earlier: The run that saved the restore point; None: there is none, or its record is lost.
        present: This run.
        hint: Appended where a start begins at step 0.
    """
    if step == 0:
        return f"checkpoints go to {place}; this run begins at step 0{hint}"
    line = f"checkpoints go to {place}; this run continues from step {step}"
    if earlier is None:
        return line
    line += f" of the run begun with `{earlier.command}` ({earlier})"
    clauses = present.differences(earlier)
    if clauses:
        line += f"; {' and '.join(clauses)}"
    if present.name == earlier.name and present.arguments == earlier.arguments:
        return line
    return (
        f"{line}. It replaces the older checkpoints: if it is another training, end it now and give it a job_uid= or a"
        " folder= of its own"
    )


def default_folder(name: str) -> Path:
    """Returns the folder for a script that names none: below the folder that it was started in.

    Hydra gives each run a working folder of its own, so that a restart would never find its checkpoints: there the folder
    is below the one that Hydra was started in, for each job of a multirun another one.
    """
    script = Path(sys.argv[0]).stem if sys.argv else ""
    script = script if script and not script.startswith("-") else "python"
    hydra = _hydra_config()
    if hydra is None:
        return Path.cwd() / name / script
    overrides = str(hydra.job.override_dirname) if getattr(hydra.mode, "name", hydra.mode) == "MULTIRUN" else ""
    return Path(hydra.runtime.cwd, name, script, re.sub(r"[^\w.,=+-]", "_", overrides))


START_FOLDER = Path.cwd()
"""The working folder at the import of this module, which most scripts import before they change it."""


def changed_folder_hint() -> str:
    """Says that the script changed its working folder, where the default folder depends on it; else empty."""
    present = Path.cwd()
    script_folder = Path(sys.argv[0]).resolve().parent if sys.argv and sys.argv[0] else present
    if present in (START_FOLDER, script_folder) or _hydra_config() is not None:
        return ""
    return (
        f". The program changed its working folder from {START_FOLDER} to {present}: if each start has another one, every"
        " start begins at step 0. Give folder= or SUREFOOT_PERSISTENT_URI"
    )


def _hydra_config() -> Any:
    """Returns Hydra's configuration of the present run; None without Hydra."""
    module = sys.modules.get("hydra.core.hydra_config")
    config = getattr(module, "HydraConfig", None)
    return config.get() if config is not None and config.initialized() else None


def _own_arguments() -> tuple[str, ...]:
    hydra = _hydra_config()
    # of a multirun the command line names all jobs, and Hydra the overrides of this one
    arguments: Sequence[str] = sys.argv[1:] if hydra is None else list(hydra.overrides.task)
    masked, after_secret = [], False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and _SECRET.search(name):
            masked.append(f"{name}={_digest(value)}")
        else:
            masked.append(_digest(argument) if after_secret else argument)
        after_secret = not equals and argument.startswith("-") and _SECRET.search(argument) is not None
    if sum(map(len, masked)) > MAX_ARGUMENT_CHARACTERS or len(masked) > MAX_VARIABLES:
        return (f"{len(masked)} arguments with digest {_digest(' '.join(masked))}",)
    return tuple(masked)


def _environment_digests(environment: Mapping[str, str]) -> dict[str, str]:
    names = [n for n in environment if not _UNRELATED.fullmatch(n) and not _SECRET.search(n) and len(n) < MAX_VARIABLES]
    return {name: _digest(environment[name]) for name in sorted(names)} if len(names) <= MAX_VARIABLES else {}


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogateescape"), digest_size=4).hexdigest()
