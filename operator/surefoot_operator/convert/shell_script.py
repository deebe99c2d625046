"""Finds and replaces a launcher's command in a shell script.

Pure. Scripts keep everything else: what they install, export and print stands before the program as it did.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from surefoot_operator.convert.conversion_errors import NotConvertible
from surefoot_operator.convert.launcher import Launch, read_launch

SHELLS = ("sh", "bash", "dash", "zsh", "ash")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_BEFORE = ("exec", "time", "nohup", "export", "sudo", "numactl")
_WORD = re.compile(
    r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|[<>]&|[^\s;&|\\'"`])+""",
    re.DOTALL,
)
_BETWEEN = re.compile(r"(?:[ \t]|\\\r?\n)*")
_ENDS = re.compile(r"\r?\n|;|&&|\|\||&|\|")
_COMMENT = re.compile(r"#[^\n]*")


@dataclass(frozen=True, slots=True)
class _Command:
    """Words of one command, as they stand in the script, and where it begins and ends."""

    words: tuple[str, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RewrittenScript:
    """A script whose launcher is replaced by each rank's own command."""

    text: str
    launch: Launch | None
    variables: dict[str, str]
    """What it sets to plain values."""


def shell_of(words: Sequence[str]) -> int | None:
    """Where the script stands in `["bash", "-c", script]`; None: it is no shell's command."""
    if not words or PurePosixPath(words[0]).name not in SHELLS:
        return None
    for at, word in enumerate(words[1:-1], 1):
        if re.fullmatch(r"-\w*c\w*", word):
            return at + 1
    return None


def without_launcher(text: str) -> RewrittenScript:
    """Replaces the one command that starts a launcher.

    Raises:
        NotConvertible: there are two of them, or one whose options are not known.
    """
    variables: dict[str, str] = {}
    found: list[tuple[_Command, int, Launch]] = []
    commands = _commands(text)
    for command in commands:
        matches = [_ASSIGNMENT.fullmatch(word) for word in command.words if word != "export"]
        if all(matches):
            variables |= {m[1]: unquoted(m[2]) for m in matches if m is not None}
            continue
        plain = (i for i, word in enumerate(command.words) if word not in _BEFORE and not _ASSIGNMENT.fullmatch(word))
        first = next(plain, len(command.words))
        launch = read_launch(command.words[first:])
        if launch is not None:
            found.append((command, first, launch))
    if not found:
        return RewrittenScript(text, None, variables)
    if len(found) > 1:
        raise NotConvertible("the script starts a launcher more than once: write each rank's own command")
    command, first, launch = found[0]
    before = [word for word in command.words[:first] if word != "exec"]
    last = command is commands[-1] and not any(word in _BEFORE for word in before)
    # behind `exec` the program is the rank: signals reach it, and its exit code is the rank's
    assigned = [f"export {word};" for word in before] if last else before
    words = [*assigned, "exec", *launch.program] if last else [*before, *launch.program]
    return RewrittenScript(text[: command.begin] + " ".join(words) + text[command.end :], launch, variables)


def unquoted(word: str) -> str:
    """Takes the quotes off a word that has one pair around it."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def _commands(text: str) -> list[_Command]:
    """Its commands in their order. Here-documents are not understood."""
    if "<<" in text:
        raise NotConvertible("the script has a here-document: write each rank's own command")
    found: list[_Command] = []
    words: list[str] = []
    at = begin = end = 0
    while at < len(text):
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing too
        comment = _COMMENT.match(text, at)
        if comment is not None:
            at = comment.end()
            continue
        word = _WORD.match(text, at)
        if word is not None:
            begin = begin if words else at
            words.append(word[0])
            at = end = word.end()
            continue
        if words:
            found.append(_Command(tuple(words), begin, end))
        words = []
        ends = _ENDS.match(text, at)
        if ends is None and at < len(text):
            raise NotConvertible("the shell script is not understood: write each rank's own command")
        at = ends.end() if ends is not None else at
    if words:
        found.append(_Command(tuple(words), begin, end))
    return found
