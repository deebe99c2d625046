"""Jobs that exist no more go from real holders; those that live, and holders that are away, are left as they are."""

from pathlib import Path

from support.servers.redis_server import ADMIN_PASSWORD, running
from surefoot.memory_server import Credentials
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer
from surefoot_operator.memory import MemoryServerAddress
from surefoot_operator.memory.orphaned_jobs import MISSING_SECONDS_UNTIL_REMOVAL, OrphanSweep


def place(server: RunningServer, node: str) -> MemoryServerAddress:
    where = server.settings
    return MemoryServerAddress(
        node, node, where.host, where.port, str(server.process.pid), True, "default", ADMIN_PASSWORD
    )


async def test_what_a_gone_job_left_is_removed_whole_and_nothing_else(tmp_path: Path) -> None:
    with running(tmp_path / "a") as first, running(tmp_path / "b") as second:
        admins = [MemoryServerAdmin("127.0.0.1", s.settings.port, ADMIN_PASSWORD) for s in (first, second)]
        for admin in admins:
            for job in ("gone", "live"):
                admin.provision(job, Credentials(f"job-{job}", "secret"), 1)
        away = MemoryServerAddress("c", "c", "127.0.0.1", 1, "x", True, "default", ADMIN_PASSWORD)
        places = [place(first, "a"), place(second, "b"), away]
        sweep = OrphanSweep(lambda job: f"job-{job}", call_seconds=1.0)
        try:
            now = 0.0
            while now < MISSING_SECONDS_UNTIL_REMOVAL:
                await sweep.remove_orphans({"live"}, places, now)
                assert all(admin.list_jobs() == {"gone", "live"} for admin in admins)
                now += 60.0
            await sweep.remove_orphans({"live"}, places, now)
            assert all(admin.list_jobs() == {"live"} for admin in admins)
            for admin in admins:
                users = admin._connection.call("ACL USERS")
                assert sorted(users) == [b"default", b"job-live"]
        finally:
            await sweep.close()
            for admin in admins:
                admin.close()
