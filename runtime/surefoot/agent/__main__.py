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
# Gives trainers writable home, temporary and cache folders under the scratch folder. A non-root container with a
# read-only root file system has no home, no /tmp, and often no user name; torch needs all three. Settings of the job's
# template and folders of the image that are writable stay as they are.

_USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")
_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def create_scratch_folders(environment: Mapping[str, str], settings: AgentSettings) -> dict[str, str]:
    """Creates the writable folders that are missing; returns the environment with their variables."""
    _create_folder("SUREFOOT_RUN_FOLDER", settings.run_folder)
    root = _create_folder("SUREFOOT_SCRATCH_FOLDER", settings.scratch_folder)
    missing = missing_folders(environment, root, _is_writable, _has_user_name())
    for name, value in missing.items():
        if name not in _USER_VARIABLES:
            Path(value).mkdir(parents=True, exist_ok=True)
    return {**environment, **missing}


def missing_folders(
    environment: Mapping[str, str], root: Path, is_writable: Callable[[str], bool], has_user_name: bool
) -> dict[str, str]:
    """Returns the environment variables to add for missing folders and a missing user name. Pure.

    `has_user_name`: whether the system knows this user's name.
    """
    missing: dict[str, str] = {}
    if not is_writable(environment.get("HOME", "/")):
        missing["HOME"] = str(root / "home")
    if "TMPDIR" not in environment and not is_writable("/tmp"):
        missing["TMPDIR"] = str(root / "tmp")
    if "HOME" in missing or "TMPDIR" in missing:
        missing |= {
            name: str(root / "cache" / name.split("_")[0].lower())
            for name in _CACHE_VARIABLES
            if name not in environment
        }
    if not has_user_name and not any(environment.get(name) for name in _USER_VARIABLES):
        missing["USER"] = "surefoot"  # without an entry in /etc/passwd, getpass.getuser would fail
    return missing


def _create_folder(name: str, folder: str) -> Path:
    root = Path(folder).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{name} {folder} cannot be created: {error}; mount a writable volume there"
        ) from error
    if not _is_writable(str(root)):
        raise ConfigurationError(f"{name} {folder} cannot be written to by user {os.getuid()}: mount a volume that can")
    return root


def _is_writable(path: str) -> bool:
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _has_user_name() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True


# ----   main   --------------------------------------------------------------------------------------------------------

_USAGE = "usage: surefoot-agent -- COMMAND [ARGUMENT…]   (its settings come from SUREFOOT_* in the environment)"
_BAD_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry; exits with the agent's exit code."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        sys.stderr.write(f"{_USAGE}\n")
        sys.exit(_BAD_USAGE)
    try:
        settings = agent_settings()
        tls_context(settings)
        read_token(settings)  # fail now: it is mounted before this process starts, or never
        environment = create_scratch_folders(os.environ, settings)
        _configure_logs(settings)
    except SurefootError as error:
        sys.stderr.write(f"surefoot-agent: {error}\n")
        sys.exit(_BAD_USAGE)
    sys.exit(asyncio.run(_run_agent(settings, command, environment)))


def _configure_logs(settings: AgentSettings) -> None:
    keys = {
        "namespace": settings.job_namespace,
        "job": settings.job_name,
        "worker": settings.index,
        "node": settings.node,
    }
    configure_logging(os.environ, f"%(asctime)s worker {settings.index} %(levelname)s %(name)s: %(message)s", keys=keys)


async def _run_agent(settings: AgentSettings, command: Sequence[str], environment: Mapping[str, str]) -> int:
    return await AgentProcess(settings, command, environment).run()


if __name__ == "__main__":
    main()
