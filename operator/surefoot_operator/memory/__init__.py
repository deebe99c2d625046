"""Makes the operator's calls to holders: provision, seal, read, drop.

I/O only; `policy` decides.
"""

from surefoot_operator.memory.connection_pool import HolderPlace as HolderPlace
from surefoot_operator.memory.connection_pool import HolderPool as HolderPool
from surefoot_operator.memory.connection_pool import TierAccess as TierAccess
from surefoot_operator.memory.job_servers import JobHolders as JobHolders
