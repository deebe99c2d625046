"""Restores tensors from tiers, every byte verified.

Which copies there are (`catalogue`), what to read (`read_plan`, pure), and the reading itself (`reader`), with another
copy for whatever is damaged.

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
