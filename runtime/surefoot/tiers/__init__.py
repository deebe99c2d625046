"""Stores rank saves: the `Tier` protocol, over Redis, a directory, or S3.

One contract suite holds them all.
"""

from surefoot.tiers.open import open_persistent as open_persistent
from surefoot.tiers.persistent import ObjectStoreTier as ObjectStoreTier
from surefoot.tiers.redis import RedisTier as RedisTier
from surefoot.tiers.redis import open_holder as open_holder
from surefoot.tiers.tier import ByCheckpoint as ByCheckpoint
from surefoot.tiers.tier import LayoutCopies as LayoutCopies
from surefoot.tiers.tier import ManyStreams as ManyStreams
from surefoot.tiers.tier import ReadsAhead as ReadsAhead
from surefoot.tiers.tier import Tier as Tier
from surefoot.tiers.tier import WritesAhead as WritesAhead
