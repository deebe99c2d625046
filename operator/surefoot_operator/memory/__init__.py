"""The operator's own calls to holders: find, provision, seal, read, drop, clean. I/O only; `policy` decides."""

from surefoot_operator.memory.place import HolderPlace as HolderPlace
from surefoot_operator.memory.place import TierAccess as TierAccess
from surefoot_operator.memory.tier import MemoryTier as MemoryTier
