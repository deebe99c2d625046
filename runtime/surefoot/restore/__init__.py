"""Restores tensors from tiers and verifies every byte.

`catalogue` lists the copies, `read_plan` (pure) decides what to read, and `reader` reads it, using another copy wherever
one is damaged.

    catalogue = read_catalogue(sources)
    with CheckpointReader(checkpoint, catalogue, ReadOptions(...)) as reader:
        values = reader.values(rank)
        restored = reader.read(destinations)
        healed = reader.heal()
"""

from surefoot.restore.catalogue import SaveSource as SaveSource
from surefoot.restore.catalogue import persistent_source as persistent_source
from surefoot.restore.catalogue import read_catalogue as read_catalogue
from surefoot.restore.catalogue import server_sources as server_sources
from surefoot.restore.fetch import Destination as Destination
from surefoot.restore.reader import CheckpointReader as CheckpointReader
from surefoot.restore.reader import ReadOptions as ReadOptions
from surefoot.restore.reader import ReadSummary as ReadSummary
