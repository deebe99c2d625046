"""Runs and talks to one Redis of the memory tier.

Its keys, scripts, process, accounts and client. No torch; used by both packages. A holder keeps replicas of rank saves
in memory and decides alone, by script, who may still commit or delete.
"""

from surefoot.memory_server.client import MemoryServerClient as MemoryServerClient
from surefoot.memory_server.client import MemoryServerIndex as MemoryServerIndex
from surefoot.memory_server.connection import Credentials as Credentials
