"""The project's words are those of its field: names, docstrings, comments, messages and documents.

Each rule below stands for a word that had two meanings here, or that a reader had to decode. `ALLOWED` lists the places in
which such a word is the right one.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SOURCES = ("operator/surefoot_operator", "runtime/surefoot")
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs",
    "manifests/crd.yaml",
    "charts/surefoot/values.yaml",
    "charts/surefoot/files/alerts.yaml",
)

WORDS = {
    r"\b(?:un)?told\b|\b[Tt]ell(?:s|ing)?\b": "name the act: sends, reports, logs",
    r"\b(?:[Ss]ays?|said|[Ss]aying)\b": "name the act: states, reports, contains",
    r"\b(?:[Hh]ear[sd]?|[Uu]nheard|hearing)\b": "received, reported",
    r"\b(?:[Ll]ooks?|looked|LOOK)\b(?! (?:like|for|up|at line))": "probe, check, read",
    r"\b_?[Ee]pochs?(?:_\w+)?\b|\b\w+_epochs?\b": "generation; an epoch is one pass over the data",
    r"\b[Hh]olders?\b|\bHolder[A-Z]\w*|\b\w+_holders?\b": "memory server",
    r"\b[Ff]abrics?\b|\bFabric[A-Z]\w*": "platform",
    r"\b[Pp]romot(?:e|es|ed|ion|ions|er|ing)\b": "upload",
    r"\b[Zz]ygotes?\b": "fork server",
    r"\b[Cc]ompanions?\b": "sidecar",
    r"\b_?[Ss]eal(?:s|ed|ing)?\b": "fence (a server), stage (a slot)",
    r"\b_?[Dd]rain(?:s|ed|ing)?\b": "flush; only `kubectl drain` drains",
    r"\b(?:[Hh]indr|[Tt]estimon)\w+|\b[Ww]itness\w*|\b[Ss]ighting\w*": "blocker, confirmation, probe",
    r"\banew\b|\bmeanwhile\b|\bany more\b|\balike\b": "again, in the meantime, no longer, both",
    r"\bsick\b|\bodd\b": "unhealthy, anomaly, outlier",
    r"\bgiven[ _]up\b|\bgave up\b|\bturned[ _]away\b": "lost (a server), abandoned (an operation), rejected",
}
"""Patterns that apply to names and to text, each with what to write instead."""

PHRASES = {
    r"\b(?:hold(?:s|ing)?|held|halts?|halted)\b": "has, keeps; a barrier stops ranks",
    r"\b[Ww]hoever\b|\b[Ss]omebody\b|\b[Nn]obody\b": "name the subject",
    r"\bbeside\b|\bbehind\b": "next to, in addition to, after",
    r"\b(?:lies|stands|stood)\b": "is",
    r"\bwhat (?:is|was|has|may|can|follows|others|only|it|they|the|a|an)\b": "name the thing",
    r"\bpeople\b|\bgo(?:es)? on\b|\bwent on\b": "users, continues",
}
"""Patterns that apply to text alone."""

FIRST_WORDS = re.compile(r"(?:Of|What|Who|Whoever|That|Those|One|Nor|So many|As)\b")
"""A docstring that begins so needs the text above it to be understood."""

VAGUE_LOCALS = frozenset(
    [
        "found",
        "told",
        "said",
        "known",
        "kept",
        "there",
        "gone",
        "here",
        "lasting",
        "asked",
        "given",
        "made",
        "left",
        "one",
        "wanted",
        "named",
        "own",
        "whole",
        "seen",
        "taken",
        "mine",
        "heard",
    ]
)
"""Names that tell how a value was obtained, not what it is."""
MAX_VAGUE_SHARE = 0.02
MIN_COMMENT_SHARE = 0.026

ALLOWED = (
    (r"data/|integrations/|docs/|README|tests/", r"\b[Ee]pochs?\b|by_epoch|_epochs?\b|epoch_"),  # a pass over the data
    (r"", r"kubectl drain|[Dd]rained? node|drain_node|fault.*drain|drain.*fault"),  # as Kubernetes uses the word
    (r"", r"Lightning Fabric|holderIdentity|F_SEAL|memfd"),
)
"""Pairs of patterns: of a path, and of the line in which a word of the rules is the right one there."""

REMAINING: dict[str, int] = {
    "operator/surefoot_operator/api": 2,
    "operator/surefoot_operator/cli": 5,
    "operator/surefoot_operator/cli/jobs": 1,
    "operator/surefoot_operator/cli/local": 7,
    "operator/surefoot_operator/platforms/local": 1,
    "operator/surefoot_operator/policy/core": 1,
    "operator/surefoot_operator/policy/membership": 2,
    "operator/surefoot_operator/reconcile": 1,
    "runtime/surefoot": 2,
    "runtime/surefoot/agent/health": 1,
    "runtime/surefoot/agent/trainers": 1,
    "runtime/surefoot/checkpointer": 230,
    "runtime/surefoot/checkpointer/library_mode": 128,
    "runtime/surefoot/data": 166,
    "runtime/surefoot/data/sources": 35,
    "runtime/surefoot/flush": 3,
    "runtime/surefoot/format": 1,
    "runtime/surefoot/geometry": 5,
    "runtime/surefoot/integrations": 4,
    "runtime/surefoot/memory_server": 5,
    "runtime/surefoot/protocol": 5,
    "runtime/surefoot/restore": 1,
    "runtime/surefoot/state": 19,
    "runtime/surefoot/tiers": 8,
    "runtime/surefoot/tools": 10,
    "docs/api.md": 1,
    "docs/cli.md": 1,
    "docs/compatibility.md": 3,
    "docs/memory-tier.md": 4,
    "docs/node-health.md": 7,
    "docs/python.md": 1,
    "manifests/crd.yaml": 4,
    "charts/surefoot/values.yaml": 33,
}
"""Uses that are left, by folder of the source or by page. A number may only become smaller; all others have none."""


def python_files(folder: str) -> list[Path]:
    return sorted((PROJECT / folder).rglob("*.py"))


def document_files() -> list[Path]:
    roots = [PROJECT / name for name in DOCUMENTS]
    return [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*.md")))]


def texts_of(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields docstrings, messages and comments of a module with their first lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def names_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the names that a module defines with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def hits(path: Path, line: int, text: str, rules: dict[str, str]) -> Iterator[str]:
    """Yields each use of a word that is not allowed there."""
    where = path.relative_to(PROJECT).as_posix()
    for pattern, instead in rules.items():
        for match in re.finditer(pattern, text):
            start = text.rfind("\n", 0, match.start()) + 1
            sentence = text[start : (text + "\n").index("\n", match.start())]
            if not any(re.search(place, where) and re.search(use, sentence) for place, use in ALLOWED):
                number = line + text.count("\n", 0, match.start())
                yield f"{where}:{number}: {match[0]!r} in {sentence.strip()[:100]!r}; write: {instead}"


def source_hits(path: Path) -> Iterator[str]:
    """Yields the problems of one module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for line, text in texts_of(path, tree):
        yield from hits(path, line, text, WORDS | PHRASES)
    for line, name in names_of(tree):
        yield from hits(path, line, name, WORDS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first_line = node.value.value.strip().split("\n")[0]
            if FIRST_WORDS.match(first_line):
                yield f"{path.relative_to(PROJECT)}:{node.lineno}: {first_line!r} needs the text above it to be understood"


def packages() -> list[Path]:
    return sorted({path.parent for folder in SOURCES for path in python_files(folder)})


@pytest.mark.parametrize("package", packages(), ids=lambda path: path.relative_to(PROJECT).as_posix())
def test_names_and_texts_use_the_words_of_the_field(package: Path) -> None:
    problems = [problem for path in sorted(package.glob("*.py")) for problem in source_hits(path)]
    assert_no_more_than_remain(package, problems)


@pytest.mark.parametrize("path", document_files(), ids=lambda path: path.relative_to(PROJECT).as_posix())
def test_documents_use_the_words_of_the_field(path: Path) -> None:
    assert_no_more_than_remain(path, list(hits(path, 1, path.read_text(encoding="utf-8"), WORDS | PHRASES)))


def assert_no_more_than_remain(path: Path, problems: list[str]) -> None:
    name = path.relative_to(PROJECT).as_posix()
    remaining = REMAINING.get(name, 0)
    assert len(problems) <= remaining, "\n" + "\n".join(problems)
    assert len(problems) == remaining, f"REMAINING of {name} can become {len(problems)}"


@pytest.mark.parametrize("folder", SOURCES)
def test_locals_say_what_they_hold_and_comments_say_why(folder: str) -> None:
    names: list[str] = []
    lines = comments = 0
    for path in python_files(folder):
        source = path.read_text(encoding="utf-8")
        lines += source.count("\n")
        tree = ast.parse(source)
        comments += sum(
            token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(source).readline)
        )
        names += [
            name.arg if isinstance(name, ast.arg) else name.id
            for name in ast.walk(tree)
            if isinstance(name, ast.arg) or (isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
        ]
    vague = [name for name in names if name in VAGUE_LOCALS]
    assert len(vague) / len(names) <= MAX_VAGUE_SHARE, sorted(set(vague))
    assert comments / lines >= MIN_COMMENT_SHARE, f"{comments} comments in {lines} lines"
