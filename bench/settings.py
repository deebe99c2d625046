"""How much is measured: the two sizes of a run. Read by every section; nothing else decides about repetitions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    """`width` and `layers` make the state (float32 parameters and AdamW's two moments)."""

    width: int
    layers: int
    rounds: int
    """How often every system has its turn; a new process each time, so each turn has a first save."""
    idle_saves: int
    """Saves with no training running, in each turn, after the first."""
    pairs: int
    """Blocks of ten plain steps beside ten with one save, in each turn."""
    steps_every_1: int
    """Steps with a save each, in each turn."""
    restore_layers: int
    """Layers of the program that is restored."""
    restores: int
    reshard_blocks: int
    """Transformer blocks of width 1,024 in the program that is restored at other world sizes."""
    reshards: int
    """Restores of each pair of world sizes, after the first."""
    plan_tensors: int
    """Tensors of the program that is planned for at 256 simulated ranks."""
    plan_dcp_ranks: tuple[int, ...]
    """Worlds that DCP plans for too; it takes minutes at many ranks."""
    system_seconds: float
    """A system's turn that takes longer is ended and reported as such."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


QUICK = Size(
    width=768,
    layers=2,
    rounds=1,
    idle_saves=5,
    pairs=2,
    steps_every_1=5,
    restore_layers=12,
    restores=3,
    reshard_blocks=1,
    reshards=2,
    plan_tensors=900,
    plan_dcp_ranks=(),
    system_seconds=90.0,
)
FULL = Size(
    width=1024,
    layers=7,
    rounds=3,
    idle_saves=10,
    pairs=3,
    steps_every_1=8,
    restore_layers=7,
    restores=7,
    reshard_blocks=3,
    reshards=5,
    plan_tensors=3000,
    plan_dcp_ranks=(8, 64, 256),
    system_seconds=600.0,
)
