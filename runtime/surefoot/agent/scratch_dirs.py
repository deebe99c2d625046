"""Gives trainers writable home, temporary and cache folders under the scratch folder.

A container that is not root on a read-only root file system has no home, no /tmp, and often no name; torch wants all
three. Whatever the job's template set or the image allows stays as it is. Called once, by `__main__`.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Mapping
from pathlib import Path

from surefoot.errors import ConfigurationError
from surefoot.settings import AgentSettings

_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def own_scratch(environment: Mapping[str, str], settings: AgentSettings) -> dict[str, str]:
    """Makes missing writable folders and returns the environment that names them."""
    _made("SUREFOOT_RUN_FOLDER", settings.run_folder)
    root = _made("SUREFOOT_SCRATCH_FOLDER", settings.scratch_folder)
    added = placed(environment, root, _writable, _named())
    for name, value in added.items():
        if name not in _NAMES:
            Path(value).mkdir(parents=True, exist_ok=True)
    return {**environment, **added}


def placed(environment: Mapping[str, str], root: Path, writable: Callable[[str], bool], named: bool) -> dict[str, str]:
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
