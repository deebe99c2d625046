"""kill -9 at each stage of a save: a complete checkpoint is always found, and its bytes are the saved ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from support.programs.dying_saver import AT_LEAST_SECOND, FIRST, SECOND, STAGES
from support.saves import Saver, arrays
from support.servers import redis_server
from surefoot.flush.engine import FlushOptions
from surefoot.flush.state_machine import RetryLimits
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.protocol.identities import MemoryServerInstance, RankSave

ROUNDS = 20
"""Times each stage is tried: 20 × 11 stages."""


def test_whenever_the_agent_is_killed_a_complete_checkpoint_is_found_with_the_saved_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with redis_server.running(folders[0]) as one, redis_server.running(folders[1]) as two:
        endpoints = [redis_server.endpoint(one, "node-1"), redis_server.endpoint(two, "node-2")]
        arguments = tmp_path / "arguments.json"
        holders = [
            {"node": e.instance.node, "instance": e.instance.run_id, "host": e.host, "port": e.port} for e in endpoints
        ]
        given = {
            "holders": holders,
            "password": redis_server.ADMIN_PASSWORD,
            "folder": str(tmp_path / "persistent"),
            "rounds": ROUNDS,
        }
        arguments.write_text(json.dumps(given))
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        ran = subprocess.run(
            [sys.executable, "-m", "support.programs.dying_saver", str(arguments)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(results) == ROUNDS * len(STAGES) >= 200
    assert all(r["killed"] for r in results), Counter(r["stage"] for r in results if not r["killed"])
    for r in results:
        assert r["step"] == SECOND if r["stage"] in AT_LEAST_SECOND else r["step"] in (FIRST, SECOND), r
    early = [r["step"] for r in results if r["stage"] in ("staged", "one chunk written", "half drained")]
    assert set(early) == {FIRST}, "nothing was committed yet"


def test_a_holder_killed_during_a_drain_costs_a_copy_and_its_successor_takes_the_next_save(tmp_path: Path) -> None:
    account = Credentials("user-job", "a password")
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    with redis_server.running(folders[0]) as one, redis_server.running(folders[1]) as two:
        endpoints = {
            e.instance: e for e in (redis_server.endpoint(one, "node-1"), redis_server.endpoint(two, "node-2"))
        }
        for e in endpoints.values():
            MemoryServerAdmin(e.host, e.port, redis_server.ADMIN_PASSWORD).provision("job", account, 1)
        first, second = endpoints

        def probe(stage: str) -> None:
            if stage == "chunk" and two.process.poll() is None:
                two.kill()

        options = FlushOptions(RetryLimits(attempts=3, retry_seconds=0.01), probe)
        saver = Saver(
            lambda h: MemoryServerClient(endpoints[h], "job", account), (first, second), 2, options, chunk_blocks=1
        )
        tensors = arrays(10, {"weight": (300, 70)})
        saver.save(RankSave(1, 10, 0), tensors)
        assert saver.watched.freed == [(0, 10, True)]
        assert saver.watched.saved == [(RankSave(1, 10, 0), 1)]
        assert saver.watched.notices[0][0] == "SaveUnderReplicated"
        with redis_server.running(folders[2]) as three:
            new = redis_server.endpoint(three, "node-2")
            MemoryServerAdmin(new.host, new.port, redis_server.ADMIN_PASSWORD).provision("job", account, 1)
            endpoints[new.instance] = new
            assert isinstance(new.instance, MemoryServerInstance)
            saver.drain.set_targets((first, new.instance), frozenset({first, new.instance}), 2)
            saver.save(RankSave(1, 20, 0), tensors)
            assert saver.watched.saved[-1] == (RankSave(1, 20, 0), 2)
            saver.close()
