"""How much is measured: the two sizes of a run. Read by every section; nothing else decides about repetitions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bench.lost import DENSE, PLAIN, SPARSE
from bench.summary import ASYNCHRONOUS, BLOCKING, OURS, PACED


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one stretch."""

    first: int
    """With the first saves of all, one each step."""
    plain: int
    dense: int
    """With a save each step."""
    sparse: int
    """With one save, at the first step; ten of them are charged with it."""

    def as_json(self) -> dict[str, int]:
        return {"first": self.first, str(PLAIN): self.plain, str(DENSE): self.dense, str(SPARSE): self.sparse}


@dataclass(frozen=True, slots=True)
class Saving:
    """Stretches with saves, by their interval, in the order of one turn; between them go plain ones."""

    ours: tuple[int, ...]
    peers: tuple[int, ...]
    """The same for each asynchronous peer."""
    blocking: tuple[int, ...] = ()
    among: tuple[str, ...] = ASYNCHRONOUS
    """The asynchronous peers that have such a turn."""

    def of(self, name: str) -> tuple[int, ...]:
        if name == OURS:
            return self.ours
        if name in ASYNCHRONOUS:
            return self.peers if name in self.among else ()
        return self.blocking if name in (*BLOCKING, PACED) else ()


@dataclass(frozen=True, slots=True)
class Size:
    """`width` and `layers` make the state (float32 parameters and AdamW's two moments)."""

    width: int
    layers: int
    rounds: int
    """How often every system has its turn; a new process each time, so each turn has a first save."""
    idle_saves: int
    """Saves with no training running, in each turn, after the first."""
    steps: Steps
    saving: Saving
    """With a core to spare."""
    saving_without: Saving
    """With none, each in a turn of its own."""
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
    plan_dcp_caches: bool
    """Whether DCP's planning with its own cache stands beside it."""
    small_turns: int
    """Turns of 10,000 small tensors, each with five saves and three restores that count."""
    persistent_layers: int
    """Layers, of width 1,024, of the program that goes to S3."""
    persistent_saves: int
    """Saves of it, after the first."""
    step_lengths: tuple[float, ...]
    """Lengths of a step, in drains, at which a save each step is measured once more."""
    system_seconds: float
    """A system's turn that takes longer is ended and reported as such."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


QUICK = Size(
    width=768,
    layers=2,
    rounds=1,
    idle_saves=10,
    steps=Steps(first=3, plain=3, dense=4, sparse=5),
    saving=Saving((SPARSE, DENSE, SPARSE, DENSE, SPARSE), (SPARSE, DENSE, SPARSE, SPARSE), (DENSE, DENSE)),
    saving_without=Saving(
        (SPARSE, DENSE, SPARSE, SPARSE), (SPARSE, SPARSE, SPARSE), among=("dcp.async_save", "dcp.async_save stager")
    ),
    restore_layers=12,
    restores=3,
    reshard_blocks=1,
    reshards=2,
    plan_tensors=900,
    plan_dcp_ranks=(),
    plan_dcp_caches=False,
    small_turns=1,
    persistent_layers=1,
    persistent_saves=2,
    step_lengths=(),
    system_seconds=90.0,
)
FULL = Size(
    width=1024,
    layers=2,
    rounds=3,
    idle_saves=10,
    steps=Steps(first=3, plain=4, dense=5, sparse=10),
    saving=Saving((SPARSE, DENSE, SPARSE), (SPARSE, DENSE, SPARSE), (DENSE,)),
    saving_without=Saving((SPARSE, DENSE, SPARSE), (SPARSE, DENSE, SPARSE)),
    restore_layers=7,
    restores=7,
    reshard_blocks=3,
    reshards=5,
    plan_tensors=3000,
    plan_dcp_ranks=(8, 64, 256),
    plan_dcp_caches=True,
    small_turns=5,
    persistent_layers=3,
    persistent_saves=5,
    step_lengths=(0.5, 1.0, 2.0, 5.0),
    system_seconds=600.0,
)
PROBE = Steps(first=2, plain=3, dense=2, sparse=4)
PROBE_SAVING = (SPARSE, SPARSE, SPARSE)
"""What finds out how long a drain takes beside training."""
