"""Stores rank saves: the `Tier` protocol, and its implementation over a directory or S3.

`memory_server` implements the memory tier. One contract suite tests all of them.
"""

from surefoot.tiers.persistent import ObjectStoreTier as ObjectStoreTier
from surefoot.tiers.persistent import open_persistent as open_persistent
from surefoot.tiers.tier import CommitsOnce as CommitsOnce
from surefoot.tiers.tier import SupportsChunkCopy as SupportsChunkCopy
from surefoot.tiers.tier import SupportsLayoutCopies as SupportsLayoutCopies
from surefoot.tiers.tier import SupportsListingByCheckpoint as SupportsListingByCheckpoint
from surefoot.tiers.tier import SupportsPartCopy as SupportsPartCopy
from surefoot.tiers.tier import SupportsParts as SupportsParts
from surefoot.tiers.tier import SupportsPipelinedReads as SupportsPipelinedReads
from surefoot.tiers.tier import SupportsPipelinedWrites as SupportsPipelinedWrites
from surefoot.tiers.tier import Tier as Tier
