"""torch.distributed.checkpoint on this engine: `dcp.save(..., storage_writer=Writer())`, `dcp.load(..., storage_reader=Reader())`.

    writer = Writer(folder="/checkpoints")
    dcp.save(state_dict, storage_writer=writer, checkpoint_id="step-100")
    dcp.load(state_dict, storage_reader=Reader(folder="/checkpoints"), checkpoint_id="step-100")

DCP plans; the engine stages, hashes, replicates and commits what its plan gives each rank, and reads any box back
verified. The number at the end of a checkpoint id is the step; an id without one ("latest") is saved as the step after all
others and may be saved again: the newest of its name is read. A Reader also reads what a Checkpointer saved. Under an
agent both use its tiers, without one the folder (or SUREFOOT_PERSISTENT_URI).
"""

from surefoot.integrations.dcp.common import step_of as step_of
from surefoot.integrations.dcp.storage_reader import Reader as Reader
from surefoot.integrations.dcp.storage_writer import Writer as Writer
