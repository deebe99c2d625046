"""Checks that a command's optional dependencies are installed.

`pip install surefoot` alone installs only the dependencies of a memory server's sidecar. Any other command without its
dependencies ends with one line that names the extra to install.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

_MODULES_BY_EXTRA = {
    "cli": ("rich", "yaml", "jinja2", "kubernetes", "shtab"),
    "operator": ("kopf", "kubernetes", "cryptography", "yaml"),
    "runtime": ("torch", "numpy", "boto3", "botocore", "safetensors"),
}
"""Modules that each extra installs."""


@contextmanager
def require_extra(command: str, extra: str) -> Iterator[None]:
    """Ends the process with the name of the extra to install if one of its modules is missing.

    Args:
        command: the command as the user typed it, for the message.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        # any other missing module is a bug, whose traceback must stay visible
        if name not in _MODULES_BY_EXTRA[extra]:
            raise
        raise SystemExit(f"{command}: {hint(name, extra)}") from None


def missing_module(extra: str) -> str | None:
    """Returns a sentence about the first missing module of `extra`, without importing any; None: none."""
    name = next((name for name in _MODULES_BY_EXTRA[extra] if find_spec(name) is None), None)
    return None if name is None else hint(name, extra)


def hint(name: str, extra: str) -> str:
    """Returns the sentence that names a missing module and how to install it."""
    return f"the module {name} is not installed; run pip install 'surefoot[{extra}]'"
