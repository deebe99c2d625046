"""A real S3 server for tests: versitygw over a folder, built once from the Go module proxy; else moto, which says so.

`running()` yields the settings to reach a fresh bucket. The server ends with the block, and may be away for a while
within it: `stop` and `start`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from support.machine_speed import scaled
from support.servers.certificates import authority
from surefoot.settings import PersistentSettings

VERSION = "v1.8.0"
MODULE = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
BUCKET = "checkpoints"
ACCESS_KEY, SECRET_KEY = "an-access-key", "a-secret-key-nobody-prints"
START_SECONDS = scaled(60.0)


@dataclass(frozen=True)
class S3Server:
    """`engine` is `versitygw` or `moto`; `folder` is where versitygw keeps objects as files."""

    engine: str
    endpoint: str
    folder: Path | None
    stop: Callable[[], None]
    """Ends it at once, as a crash does."""
    start: Callable[[], None]
    """Again at the same address, with what it had."""
    ca_bundle: str | None = None
    """Of the authority that signed its certificate, where it speaks TLS."""

    def settings(self, prefix: str = "") -> PersistentSettings:
        """How a job reaches it."""
        return PersistentSettings(
            uri=f"s3://{BUCKET}/{prefix}",
            endpoint=self.endpoint,
            region="us-east-1",
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            ca_bundle=self.ca_bundle,
        )


@contextmanager
def running(folder: Path, over_tls: bool = False) -> Iterator[S3Server]:
    """A server with an empty bucket; moto speaks no TLS."""
    program = versitygw()
    if program is None:
        _say("versitygw is not here and cannot be built without Go, so S3 tests run against moto")
        with _moto() as server:
            yield server
        return
    with _versitygw(program, folder, over_tls) as server:
        yield server


def versitygw() -> Path | None:
    """The program, built on first use into the user's cache; None without Go."""
    program = Path.home() / ".cache" / "surefoot" / "bin" / f"versitygw-{VERSION}"
    if program.exists():
        return program
    if shutil.which("go") is None:
        return None
    program.parent.mkdir(parents=True, exist_ok=True)
    with program.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side, and `make test` builds it ahead: once is enough
        return program if program.exists() else _built(program)


def _built(program: Path) -> Path | None:
    build = program.with_name(f"build-{os.getpid()}")
    try:
        subprocess.run(
            ["go", "install", MODULE],
            env={**os.environ, "GOBIN": str(build)},
            check=True,
            capture_output=True,
            timeout=600,
        )
        os.replace(build / "versitygw", program)  # whoever else builds it now ends with the same file
    except subprocess.CalledProcessError as error:
        _say(f"versitygw could not be built: {error.stderr.decode()[-500:]}")
        return None
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return program


def command(program: Path, folder: Path, address: str) -> list[str]:
    """versitygw over `folder/objects`, listening on `address`."""
    objects = folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    sidecar = folder / "sidecar"  # metadata beside the objects: not every file system has extended attributes
    sidecar.mkdir(exist_ok=True)
    return [str(program), "--port", address, "--quiet", "posix", "--sidecar", str(sidecar), str(objects)]


def environment(folder: Path) -> dict[str, str]:
    """What versitygw wants to know besides its command line."""
    return {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY, "HOME": str(folder)}


def _say(text: str) -> None:
    """Into the summary of the test run; not an error there, as other warnings are."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(text, stacklevel=3)


@contextmanager
def _versitygw(program: Path, folder: Path, over_tls: bool) -> Iterator[S3Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = command(program, folder, f"127.0.0.1:{port}")
    endpoint, ca_bundle = f"http://127.0.0.1:{port}", None
    if over_tls:
        signer = authority("an authority for S3")
        certificate, key = signer.sign("127.0.0.1").files(folder)
        arguments[1:1] = ["--cert", str(certificate), "--key", str(key)]
        ca_bundle = str(folder / "ca.crt")
        Path(ca_bundle).write_text(signer.pem)
        endpoint = endpoint.replace("http:", "https:")
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        with (folder / "versitygw.log").open("ab") as log:
            process = subprocess.Popen(arguments, env=environment(folder), stdout=log, stderr=log)
        processes.append(process)
        make_bucket(endpoint, START_SECONDS, lambda: process.poll() is None, ca_bundle)

    def stop() -> None:
        while processes:
            process = processes.pop()
            process.kill()
            process.wait()

    try:
        start()
        yield S3Server("versitygw", endpoint, folder / "objects", stop, start, ca_bundle)
    finally:
        stop()


@contextmanager
def _moto() -> Iterator[S3Server]:
    from moto.server import ThreadedMotoServer

    servers = [ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)]
    servers[0].start()

    def stop() -> None:
        while servers:
            servers.pop().stop()

    try:
        host, port = servers[0].get_host_and_port()

        def start() -> None:  # its objects belong to the process, not to the server
            servers.append(ThreadedMotoServer(ip_address=host, port=port, verbose=False))
            servers[-1].start()

        started = S3Server("moto", f"http://{host}:{port}", None, stop, start)
        # all servers of one process share their objects: begin with none
        urlopen(Request(f"{started.endpoint}/moto-api/reset", method="POST"), timeout=5).close()
        make_bucket(started.endpoint, START_SECONDS)
        yield started
    finally:
        stop()


def make_bucket(
    endpoint: str, seconds: float, is_alive: Callable[[], bool] = lambda: True, ca_bundle: str | None = None
) -> None:
    """Waits for the server at `endpoint` and sees to it that the bucket is there; gives up when the server ends."""
    config = Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=5)
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        verify=ca_bundle,
        config=config,
    )
    deadline = time.monotonic() + seconds
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            break
        except client.exceptions.BucketAlreadyOwnedByYou:
            break
        except (BotoCoreError, ClientError):
            if time.monotonic() > deadline or not is_alive():
                raise
            time.sleep(0.02)  # between two tries; the condition is its answer
    client.close()


if __name__ == "__main__":
    print(versitygw() or "versitygw is not built: no Go toolchain, or it failed")
