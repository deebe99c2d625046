"""A docker client bound to one daemon, and what is asked of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from images.errors import ImagesError
from images.plan import Machine

ANSWER_SECONDS = 10


@dataclass(frozen=True)
class Docker:
    """One daemon.

    Attributes:
        program: path of the client.
        host: the daemon's address; None: as the client finds it.
        can_bridge: containers of it have a network of their own that leads outside.
    """

    program: str
    host: str | None = None
    can_bridge: bool = True

    @property
    def environment(self) -> dict[str, str]:
        """For programs that talk to this daemon; `docker` is the client that fits it."""
        told = {"DOCKER_BUILDKIT": "1", **({"DOCKER_HOST": self.host} if self.host else {})}
        folder = os.path.dirname(self.program)
        if folder:
            told["PATH"] = f"{folder}:{os.environ.get('PATH', os.defpath)}"
        return {**os.environ, **told}

    def run(self, *arguments: str, seconds: float = 60.0) -> str:
        """What a command printed.

        Raises:
            ImagesError: it failed or did not end in time, with its own last words.
        """
        said = self.tried(*arguments, seconds=seconds)
        if said.returncode != 0:
            words = (said.stderr or said.stdout).strip()[-1500:]
            raise ImagesError(f"`docker {' '.join(arguments)}` failed with {said.returncode}: {words}")
        return said.stdout

    def tried(self, *arguments: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """The same, whatever its exit code.

        Raises:
            ImagesError: it did not end in time.
        """
        try:
            return subprocess.run(
                [self.program, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ImagesError(f"`docker {' '.join(arguments)}` did not end within {seconds:.0f} s") from None

    def inspected(self, image: str) -> dict[str, Any] | None:
        """An image as the daemon has it; None when it has none of that name."""
        said = self.tried("image", "inspect", image)
        if said.returncode == 0:
            return dict(json.loads(said.stdout)[0])
        if "No such image" in said.stderr:
            return None
        raise ImagesError(f"docker does not say whether it has {image}: {said.stderr.strip()}")

    @contextmanager
    def saved(self, image: str) -> Iterator[IO[bytes]]:
        """The image as a tar with a tar for each layer, as it comes.

        Raises:
            ImagesError: docker could not write it to the end.
        """
        command = [self.program, "image", "save", image]
        with subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                yield process.stdout
                while process.stdout.read(1 << 20):
                    pass  # to its end: docker fails where nobody reads on
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise ImagesError(f"`{' '.join(command)}` failed with {process.returncode}")


def observe() -> Machine:
    """What this machine is able to."""
    return Machine(
        docker_answers=_answers(),
        is_root=os.geteuid() == 0,
        is_debian=all(shutil.which(program) for program in ("apt-get", "dpkg-deb")),
    )


def _answers() -> bool:
    if shutil.which("docker") is None:
        return False
    try:
        return (
            Docker("docker").tried("info", "--format", "{{.ServerVersion}}", seconds=ANSWER_SECONDS).stdout.strip()
            != ""
        )
    except ImagesError:
        return False  # no answer in time
