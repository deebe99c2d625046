"""Checks that a command's optional dependencies are installed.

`pip install surefoot` alone brings what a holder's companion needs; a command without its part says so in one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

_PARTS = {
    "cli": ("rich", "yaml", "jinja2", "kubernetes", "shtab"),
    "operator": ("kopf", "kubernetes", "cryptography", "yaml"),
    "runtime": ("torch", "numpy", "boto3", "botocore", "safetensors"),
}
"""Extra → modules that come with it."""


@contextmanager
def require_extra(command: str, extra: str) -> Iterator[None]:
    """Ends the process where a module of `extra` cannot be imported.

    With a sentence that says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _PARTS[extra]:
            raise
        raise SystemExit(f"{command}: {hint(name, extra)}") from None


def missing_module(extra: str) -> str | None:
    """Names the first module of `extra` that is not installed.

    A sentence; None where all are there. Imports none of them.
    """
    name = next((name for name in _PARTS[extra] if find_spec(name) is None), None)
    return None if name is None else hint(name, extra)


def hint(name: str, extra: str) -> str:
    return f"the module {name} is not installed; pip install 'surefoot[{extra}]' brings it"
