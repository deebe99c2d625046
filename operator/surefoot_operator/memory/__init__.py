"""Makes the operator's calls to memory servers: provision, fence, read, drop.

I/O only; `policy` decides.
"""

from surefoot_operator.memory.connection_pool import MemoryServerAddress as MemoryServerAddress
from surefoot_operator.memory.connection_pool import MemoryServerPool as MemoryServerPool
from surefoot_operator.memory.connection_pool import MemoryTierCredentials as MemoryTierCredentials
from surefoot_operator.memory.job_servers import JobMemoryServers as JobMemoryServers
