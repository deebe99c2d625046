"""Exports the names that a training script imports.

Names are imported at first use (PEP 562): `import surefoot` alone loads neither torch nor other heavy packages, so that
agent and operator can import parts of this package without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from surefoot.checkpointer import Checkpointer as Checkpointer
    from surefoot.data import Batch as Batch
    from surefoot.data import DataError as DataError
    from surefoot.data import ElasticLoader as ElasticLoader
    from surefoot.data import ElasticSampler as ElasticSampler
    from surefoot.data import ElasticStream as ElasticStream
    from surefoot.data import sample_generator as sample_generator
    from surefoot.errors import LastStepNotSaved as LastStepNotSaved
    from surefoot.errors import StateMismatch as StateMismatch
    from surefoot.errors import StateNotRestorable as StateNotRestorable
    from surefoot.errors import SurefootError as SurefootError
    from surefoot.state import describe_flat as describe_flat

_ROOM_OF = {
    "Checkpointer": "surefoot.checkpointer",
    "Batch": "surefoot.data",
    "ElasticLoader": "surefoot.data",
    "ElasticSampler": "surefoot.data",
    "DataError": "surefoot.data",
    "ElasticStream": "surefoot.data",
    "describe_flat": "surefoot.state",
    "sample_generator": "surefoot.data",
    "LastStepNotSaved": "surefoot.errors",
    "StateMismatch": "surefoot.errors",
    "StateNotRestorable": "surefoot.errors",
    "SurefootError": "surefoot.errors",
}

__all__ = [
    "Batch",
    "Checkpointer",
    "DataError",
    "ElasticLoader",
    "ElasticSampler",
    "ElasticStream",
    "LastStepNotSaved",
    "StateMismatch",
    "StateNotRestorable",
    "SurefootError",
    "describe_flat",
    "sample_generator",
]


_RUNTIME = ("torch", "numpy", "boto3", "botocore", "safetensors")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    module_name = _ROOM_OF.get(name)
    if module_name is None:
        raise AttributeError(f"surefoot has no {name!r}; it offers {', '.join(__all__)}")
    try:
        value = getattr(import_module(module_name), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _RUNTIME:
            raise
        message = (
            f"surefoot.{name} needs {error.name}, which is not installed: pip install 'surefoot[runtime]' brings it"
        )
        raise ModuleNotFoundError(message, name=error.name) from None
    globals()[name] = value
    return value


def _version() -> str:
    """Reads the version from the installed package's metadata, so that it is recorded in one place only."""
    from importlib import metadata

    try:
        return metadata.version("surefoot")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # a source tree that is not installed


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOM_OF})
