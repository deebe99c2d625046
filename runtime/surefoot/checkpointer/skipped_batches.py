"""Leaves out the batches that spoiled a world before, behind a rollback.

Called by `checkpointer` once the state is restored. Fed the same batches again, a run would turn NaN at the same step again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from surefoot.ipc.save_backend import SaveBackend

_log = logging.getLogger(__name__)


def skip_batches(objects: Mapping[str, Any], link: SaveBackend) -> None:
    """Has every loader that can leave out what the assignment says.

    Where none can, training goes on with the same batches, and that is said once.
    """
    steps = link.attached.skip_steps
    if not steps:
        return
    able = {name: o for name, o in objects.items() if callable(getattr(o, "skip_steps", None))}
    for loader in able.values():
        loader.skip_steps(steps)
    if link.attached.rank:
        return
    if able:
        text = (
            f"the batches of {steps} steps are left out by {', '.join(able)}: they led to a loss that was rolled back"
        )
        _log.warning("%s", text)
        link.say("DataSkipped", text)
        return
    text = (
        f"the batches of {steps} steps led to a loss that was rolled back, and no object given to Checkpointer can leave"
        " them out: they are trained on again. Give it a loader with skip_steps(steps), as surefoot.ElasticLoader"
    )
    _log.warning("%s", text)
    link.say("DataNotSkipped", text)
