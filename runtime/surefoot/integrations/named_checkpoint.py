"""Finds the checkpoint that an id of DCP names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.errors import Unreadable
from surefoot.integrations.common import KEY, step_of
from surefoot.restore.catalogue import Catalogue
from surefoot.restore.reader import CheckpointReader, ReadOptions
from surefoot.state import read_values

PATIENCE_SECONDS = 60.0
"""How long a load waits for tiers that do not answer."""


def named_checkpoint(checkpoint_id: str, catalogue: Catalogue) -> tuple[CheckpointReader, Mapping[str, Any]]:
    """Opens the newest complete checkpoint that the id names.

    An id without a number is looked for by name: its step was given when it was saved, and is another each time.

    Args:
        checkpoint_id: empty: the newest of all.

    Returns:
        Its reader, which the caller closes, and the values of its rank 0.

    Raises:
        Unreadable: there is none (`absent`), or a tier that may have it gives no answer.
    """
    step = step_of(checkpoint_id)
    candidates = [checkpoint for checkpoint in catalogue.complete() if step in (None, checkpoint.step)]
    for checkpoint in reversed(candidates):
        reader = CheckpointReader(checkpoint, catalogue, ReadOptions(patience_seconds=PATIENCE_SECONDS))
        try:
            values = read_values(reader.values(0))
        except BaseException:
            reader.close()
            raise
        if _is_named(checkpoint_id, values.get(KEY)):
            return reader, values
        reader.close()
    if catalogue.silent:
        raise Unreadable(f"{', '.join(catalogue.silent)} gave no answer: whether the checkpoint is there is unknown")
    which = f"no complete checkpoint {checkpoint_id!r}" if checkpoint_id else "no complete checkpoint"
    raise Unreadable(f"there is {which} in {', '.join(s.name for s in catalogue.sources)}", absent=True)


def _is_named(wanted: str, about: Mapping[str, Any] | None) -> bool:
    """Whether a checkpoint that has the step of `wanted`, if that names one, was saved under such an id."""
    if not wanted:
        return True
    step = step_of(wanted)
    if about is None:  # a Checkpointer's, which has a step and no id
        return step is not None
    return about["id"] == wanted if step is None else step_of(about["id"]) == step
