"""Runs and accesses the Redis servers of the memory tier: keys, scripts, processes, accounts and clients.

No torch; used by operator and runtime. A memory server keeps copies of rank saves in memory, and decides by its scripts
which writers may still commit or delete.
"""

from surefoot.memory_server.client import MemoryServerClient as MemoryServerClient
from surefoot.memory_server.client import MemoryServerIndex as MemoryServerIndex
from surefoot.memory_server.connection import Credentials as Credentials
