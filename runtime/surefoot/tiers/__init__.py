"""Stores rank saves: the `Tier` protocol, over a directory or S3.

`memory_server` has the one in memory. One contract suite holds them all.
"""

from surefoot.tiers.persistent import ObjectStoreTier as ObjectStoreTier
from surefoot.tiers.persistent import open_persistent as open_persistent
from surefoot.tiers.tier import ByCheckpoint as ByCheckpoint
from surefoot.tiers.tier import CommitsOnce as CommitsOnce
from surefoot.tiers.tier import CopiesChunks as CopiesChunks
from surefoot.tiers.tier import CopiesParts as CopiesParts
from surefoot.tiers.tier import LayoutCopies as LayoutCopies
from surefoot.tiers.tier import ManyStreams as ManyStreams
from surefoot.tiers.tier import ReadsAhead as ReadsAhead
from surefoot.tiers.tier import Tier as Tier
from surefoot.tiers.tier import WritesAhead as WritesAhead
