"""Surefoot's runtime: what a training script imports. `import surefoot` alone loads neither torch nor anything heavy.

Names are looked up when first used (PEP 562), so that the agent and the operator, which never need torch, can import
rooms of this package without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.checkpointer import Checkpointer as Checkpointer
    from surefoot.data import Batch as Batch
    from surefoot.data import ElasticLoader as ElasticLoader
    from surefoot.data import ElasticSampler as ElasticSampler
    from surefoot.data import sample_generator as sample_generator
    from surefoot.errors import StateMismatch as StateMismatch
    from surefoot.errors import SurefootError as SurefootError
    from surefoot.state import describe_flat as describe_flat

_ROOM_OF = {
    "Checkpointer": "surefoot.checkpointer",
    "Batch": "surefoot.data",
    "ElasticLoader": "surefoot.data",
    "ElasticSampler": "surefoot.data",
    "describe_flat": "surefoot.state",
    "sample_generator": "surefoot.data",
    "StateMismatch": "surefoot.errors",
    "SurefootError": "surefoot.errors",
}

__all__ = [
    "Batch",
    "Checkpointer",
    "ElasticLoader",
    "ElasticSampler",
    "StateMismatch",
    "SurefootError",
    "describe_flat",
    "sample_generator",
]


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"surefoot has no {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(room), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOM_OF})
