"""Whose docker builds: the one that answers, or one of our own that ends with this program.

Our own has its socket, its data and its state in folders of its own, makes no bridge and touches no rule of the machine's
network; what it built stays in the cache, so that the next build is short. One at a time, by a lock.
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

from images import debian, plan
from images.docker import Docker
from images.errors import ImagesError

START_SECONDS = 60.0
END_SECONDS = 30.0
POLL_SECONDS = 0.1


def cache_folder() -> Path:
    """Where our own docker keeps what it needs and what it built."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surefoot" / "images"


@contextmanager
def docker(chosen: plan.Daemon, folder: Path) -> Iterator[Docker]:
    """The chosen docker, for as long as the block runs."""
    if chosen.kind == "given":
        yield Docker("docker")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        root = debian.unpack_packages(folder / "packages")
        with _own(root, folder) as own:
            yield own


@contextmanager
def _own(root: Path, folder: Path) -> Iterator[Docker]:
    state = folder / "run"
    state.mkdir(exist_ok=True)
    pid_file, log, host = state / "docker.pid", state / "docker.log", f"unix://{state}/docker.sock"
    _end_left_over(pid_file)
    # own is the socket, too: tests elsewhere ask the usual one whether docker answers
    command = [str(root / "usr/sbin/dockerd"), "--host", host, "--data-root", str(folder / "data")]
    command += ["--exec-root", str(state / "exec"), "--pidfile", str(pid_file), "--oom-score-adjust=0", "--bridge=none"]
    command += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    client = Docker(str(root / "usr/bin/docker"), host, can_bridge=False)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=debian.environment(root),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # an interrupt at the keyboard is ours: the daemon ends after its containers
        )
    try:
        _wait_until_it_answers(client, process, log)
        yield client
    finally:
        _end(process, client)
        _unmount(state / "exec")


def _wait_until_it_answers(client: Docker, process: subprocess.Popen[bytes], log: Path) -> None:
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


def _unmount(folder: Path) -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in sorted((point for point in mounted if Path(point).is_relative_to(folder)), reverse=True):
        subprocess.run(["umount", point], check=False, timeout=30)
