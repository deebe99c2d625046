"""`python -m surefoot.agent -- COMMAND ARGS…` runs one worker's agent.

Its settings come from the environment.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from surefoot.agent.agent_process import AgentProcess
from surefoot.agent.coordinator_client import read_token, tls_context
from surefoot.errors import ConfigurationError, SurefootError
from surefoot.logs import configure_logging
from surefoot.settings import AgentSettings, agent_settings

# ---- folders for scratch data ----------------------------------------------------------------------------------------
# Gives trainers writable home, temporary and cache folders under the scratch folder. A container that is not root on a
# read-only root file system has no home, no /tmp, and often no name; torch wants all three. Whatever the job's template
# set or the image allows stays as it is.

_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def create_scratch_folders(environment: Mapping[str, str], settings: AgentSettings) -> dict[str, str]:
    """Makes missing writable folders and returns the environment that names them."""
    _made("SUREFOOT_RUN_FOLDER", settings.run_folder)
    root = _made("SUREFOOT_SCRATCH_FOLDER", settings.scratch_folder)
    added = missing_folders(environment, root, _writable, _named())
    for name, value in added.items():
        if name not in _NAMES:
            Path(value).mkdir(parents=True, exist_ok=True)
    return {**environment, **added}


def missing_folders(
    environment: Mapping[str, str], root: Path, writable: Callable[[str], bool], named: bool
) -> dict[str, str]:
    """Names what is missing and where it goes.

    PURE; `named`: whether the system knows this user's name.
    """
    added: dict[str, str] = {}
    if not writable(environment.get("HOME", "/")):
        added["HOME"] = str(root / "home")
    if "TMPDIR" not in environment and not writable("/tmp"):
        added["TMPDIR"] = str(root / "tmp")
    if "HOME" in added or "TMPDIR" in added:
        added |= {name: str(root / "cache" / name.split("_")[0].lower()) for name in _CACHES if name not in environment}
    if not named and not any(environment.get(name) for name in _NAMES):
        added["USER"] = "surefoot"  # else whatever asks for it fails: the user has no entry in /etc/passwd
    return added


def _made(name: str, folder: str) -> Path:
    root = Path(folder).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{name} {folder} cannot be made: {error}; mount a volume there") from error
    if not _writable(str(root)):
        raise ConfigurationError(f"{name} {folder} cannot be written to by user {os.getuid()}: mount a volume that can")
    return root


def _writable(path: str) -> bool:
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _named() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True


# ----   main   --------------------------------------------------------------------------------------------------------

_USAGE = "usage: surefoot-agent -- COMMAND [ARGUMENT…]   (its settings come from SUREFOOT_* in the environment)"
_BAD_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry; exits with the agent's code."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        sys.stderr.write(f"{_USAGE}\n")
        sys.exit(_BAD_USAGE)
    try:
        settings = agent_settings()
        tls_context(settings)
        read_token(settings)  # mounted before this process starts, or never
        environment = create_scratch_folders(os.environ, settings)
        _begin_logs(settings)
    except SurefootError as error:
        sys.stderr.write(f"surefoot-agent: {error}\n")
        sys.exit(_BAD_USAGE)
    sys.exit(asyncio.run(_live(settings, command, environment)))


def _begin_logs(settings: AgentSettings) -> None:
    keys = {
        "namespace": settings.job_namespace,
        "job": settings.job_name,
        "worker": settings.index,
        "node": settings.node,
    }
    configure_logging(os.environ, f"%(asctime)s worker {settings.index} %(levelname)s %(name)s: %(message)s", keys=keys)


async def _live(settings: AgentSettings, command: Sequence[str], environment: Mapping[str, str]) -> int:
    return await AgentProcess(settings, command, environment).run()


if __name__ == "__main__":
    main()
