"""Dockerfiles as lists of instructions. Pure; called by `test_images`."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One, its lines joined; `stage` counts from 0, ARGs before the first FROM are of stage −1."""

    word: str
    rest: str
    stage: int


def instructions(text: str) -> list[Instruction]:
    """In order, comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found: list[Instruction] = []
    stage = -1
    for line in joined.splitlines():
        word, _, rest = line.strip().partition(" ")
        stage += word.upper() == "FROM"
        found.append(Instruction(word.upper(), " ".join(rest.split()), stage))
    return found


def bases(found: list[Instruction]) -> list[str]:
    """The images that stages begin from, with ARGs' defaults put in; neither an earlier stage nor nothing is one."""
    defaults = dict(one.rest.split("=", 1) for one in found if one.word == "ARG" and one.stage == -1)
    named = [one.rest.split()[0] for one in found if one.word == "FROM"]
    stages = {"scratch", *(one.rest.split()[-1] for one in found if one.word == "FROM" and " AS " in one.rest)}
    return [re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], image) for image in named if image not in stages]
