"""Whose docker builds: the one that answers, or one of our own that ends with this program.

Our own has its socket, its data and its state in folders of its own, makes no bridge and touches no rule of the machine's
network; what it built stays in the cache, so that the next build is short. One at a time, by a lock. `keep` leaves it running,
for containers that outlive a command, until `end_kept`. It shares a cgroup with its containers, heavier than docker's: there all
nodes of kind together weigh as one process of the host, and starve beside whatever else runs. So did it over 6 GB of an image.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cluster import cgroups
from cluster.errors import ClusterError
from images import debian, plan, runtime
from images.docker import Docker
from images.errors import ImagesError
from support.cache_folder import user_cache

START_SECONDS = 60.0
END_SECONDS = 30.0
POLL_SECONDS = 0.1
CGROUP = "surefoot-docker"


def cache_folder() -> Path:
    """Where our own docker keeps what it needs and what it built."""
    cache: Path = user_cache()
    return cache / "images"


@contextmanager
def docker(chosen: plan.Daemon, folder: Path) -> Iterator[Docker]:
    """The chosen docker, for as long as the block runs."""
    if chosen.kind == "given":
        own = _client(folder)
        yield own if os.environ.get("DOCKER_HOST") == own.host else Docker("docker")
        return
    with _locked(folder) as lock:
        kept = find_kept(folder)
        if kept is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # it stays whatever happens here, and does several things at once
            yield kept
            return
        process, client = _start(folder)
        try:
            _wait_until_it_answers(client, process, folder)
            yield client
        finally:
            _end(process, client)
            _clear(folder)


def keep(folder: Path) -> Docker:
    """Our own, which stays when this program ends; the one that was kept already, if it answers.

    Raises:
        ImagesError: it did not start, in its own words.
    """
    with _locked(folder):
        kept = find_kept(folder)
        if kept is not None:
            return kept
        process, client = _start(folder)
        try:
            _wait_until_it_answers(client, process, folder)
        except BaseException:
            _end(process, client)
            _clear(folder)
            raise
        process.returncode = 0  # nobody here waits for it, and Popen would warn about that
        _mark(folder).touch()
        return client


def find_kept(folder: Path) -> Docker | None:
    """The one that was kept, if it answers."""
    if not _mark(folder).exists():
        return None
    client = _client(folder)
    return client if client.tried("version", seconds=START_SECONDS).returncode == 0 else None


def end_kept(folder: Path) -> None:
    """With its containers and their volumes; images and the build's cache stay. Nothing, if none was kept."""
    with _locked(folder):
        if not _mark(folder).exists():
            return
        kept = find_kept(folder)
        if kept is not None:
            left = kept.tried("ps", "--all", "--quiet").stdout.split()
            if left:
                kept.tried("rm", "--force", "--volumes", *left, seconds=300.0)
            kept.tried("network", "prune", "--force")
        _end_left_over(folder / "run" / "docker.pid")
        _clear(folder)
        _mark(folder).unlink()


def _mark(folder: Path) -> Path:
    return folder / "run" / "kept"


def _client(folder: Path) -> Docker:
    return Docker(str(folder / "packages/usr/bin/docker"), f"unix://{folder}/run/docker.sock", can_bridge=False)


@contextmanager
def _locked(folder: Path) -> Iterator[IO[str]]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], Docker]:
    root = debian.unpack_packages(folder / "packages")
    state = folder / "run"
    state.mkdir(exist_ok=True)
    pid_file, client = state / "docker.pid", _client(folder)
    assert client.host is not None
    _end_left_over(pid_file)
    cgroups.make_heavy(CGROUP)
    # own is the socket, too: tests elsewhere ask the usual one whether docker answers
    command = [str(root / "usr/sbin/dockerd"), "--host", client.host, "--data-root", str(folder / "data")]
    command += ["--exec-root", str(state / "exec"), "--pidfile", str(pid_file), "--oom-score-adjust=0", "--bridge=none"]
    command += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    command += ["--cgroup-parent", f"/{CGROUP}"]
    command += runtime.arguments(root / "usr/sbin/runc", state / "runtime")
    with (state / "docker.log").open("wb") as output:
        process = subprocess.Popen(
            command,
            env=debian.environment(root),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # an interrupt at the keyboard is ours: the daemon ends after its containers
        )
    cgroups.enter(f"{CGROUP}/daemon", process.pid)
    return process, client


def _wait_until_it_answers(client: Docker, process: subprocess.Popen[bytes], folder: Path) -> None:
    log = folder / "run" / "docker.log"
    deadline = time.monotonic() + START_SECONDS
    while client.tried("version", seconds=START_SECONDS).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            words = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise ImagesError(f"a docker daemon of our own did not start; the last of {log}: {' / '.join(words)}")
        time.sleep(POLL_SECONDS)


def _end(process: subprocess.Popen[bytes], client: Docker) -> None:
    """Its containers, then itself, with its containerd."""
    if process.poll() is None:
        try:
            left = client.tried("ps", "--all", "--quiet").stdout.split()
            if left:
                client.tried("rm", "--force", *left)
        except ImagesError:
            pass  # it answers no more: killing it is what is left
        process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_left_over(pid_file: Path) -> None:
    """One that a killed run of this program left behind; by its id, if the process is still that one."""
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text().strip() or 0)
    try:
        is_ours = str(pid_file) in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        is_ours = False
    if is_ours:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while Path(f"/proc/{pid}").exists():
            if time.monotonic() > deadline:
                raise ImagesError(f"a docker daemon of an earlier run, process {pid}, does not end: end it by hand")
            time.sleep(POLL_SECONDS)
    pid_file.unlink(missing_ok=True)


def _clear(folder: Path) -> None:
    """What a daemon that has ended leaves: mounts, and the cgroups of its containers."""
    _unmount(folder / "run" / "exec")
    try:
        cgroups.remove_tree(CGROUP)
    except ClusterError as error:
        raise ImagesError(f"docker has ended, and not all of its containers: {error}") from None


def _unmount(folder: Path) -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in sorted((point for point in mounted if Path(point).is_relative_to(folder)), reverse=True):
        subprocess.run(["umount", point], check=False, timeout=30)
