"""Which docker builds, and on which base; each choice with its reason. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from images.errors import ImagesError

NAMED_BASE = "python:3.12.13-slim-bookworm"
MADE_BASE = "surefoot/base:bookworm"


@dataclass(frozen=True)
class Machine:
    """What this machine is able to.

    Attributes:
        docker_answers: a daemon answers the docker client; a client alone proves nothing.
        is_root: a daemon and a chroot can be begun.
        is_debian: apt-get and dpkg-deb are there, and the packages they bring fit.
    """

    docker_answers: bool
    is_root: bool
    is_debian: bool


@dataclass(frozen=True)
class Daemon:
    """Whose docker builds, and why."""

    kind: Literal["given", "own"]
    reason: str


@dataclass(frozen=True)
class Base:
    """What images stand on: pulled under its name, or made of Debian's packages; and why."""

    image: str
    is_made: bool
    reason: str


def daemon(machine: Machine) -> Daemon:
    """The docker that is there, else one of our own.

    Raises:
        ImagesError: there is none and none can be begun; why.
    """
    if machine.docker_answers:
        return Daemon("given", "docker answers")
    lacking = _lacking(machine)
    if lacking:
        raise ImagesError(
            f"no docker daemon answers, and one of our own cannot be begun: {lacking}. "
            "Start docker, or run this as root on Debian"
        )
    return Daemon(
        "own", "no docker daemon answers; as root on Debian one is begun from Debian's packages, beside everything"
    )


def base(wanted: str, refusal: str | None, machine: Machine) -> Base:
    """The wanted base if it could be pulled, else one made of Debian's packages.

    Args:
        wanted: name of the image.
        refusal: what docker said when it was asked to pull it; None when it is there.

    Raises:
        ImagesError: it is not to be had and none can be made; why.
    """
    if refusal is None:
        return Base(wanted, is_made=False, reason=f"{wanted} is there")
    if wanted != NAMED_BASE:
        raise ImagesError(f"the base {wanted} cannot be pulled: {refusal}")
    lacking = _lacking(machine)
    if lacking:
        raise ImagesError(f"{wanted} cannot be pulled ({refusal}), and no base can be made: {lacking}")
    return Base(MADE_BASE, is_made=True, reason=f"{wanted} cannot be pulled; Debian's own Python stands in")


def _lacking(machine: Machine) -> str:
    wants = [] if machine.is_root else ["this user is not root"]
    return " and ".join(wants if machine.is_debian else [*wants, "this is not Debian"])
