"""What a docstring claims of its callers is so: who reads "Called by `x`" opens x next."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import surefoot

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("runtime/surefoot", "operator/surefoot_operator")
CLAIM = re.compile(r"\b(?:called|used|owned) by\b([^.;:\n]*(?:\.\w[^.;:\n]*)*)", re.IGNORECASE)
ENDS = re.compile(r"\b(?:which|that|who|whose|when|where|before|through|with|to)\b|`\w+` by\b")
"""Where a claim's names end, and what they do begins."""
NAMED = re.compile(r"`([A-Za-z_][\w.]*)`")

MAX_FIRST_LINE_CHARACTERS = 100

PROTOCOLS = {"surefoot.tiers.tier": "Tier", "surefoot_operator.platforms.interface": "Fabric"}
"""What others implement: every method says what it does."""


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to((ROOT / package).parent).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """Every module that `name` imports; `from package import module` counts as both."""
    found: set[str] = set()
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found & modules().keys())


@cache
def classes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    return found


@cache
def meant(name: str) -> list[str]:
    """The modules that a name in a docstring may mean: a module, a room, or where that class is defined."""
    exact = [one for one in modules() if one == name or one.endswith(f".{name}")]
    inside = [one for one in modules() if any(one.startswith(f"{room}.") for room in exact)]
    return [*exact, *inside] or classes().get(name.rpartition(".")[2], [])


def imported_by(importer: str, module: str) -> bool:
    """Whether it imports the module, or the room that hands the module's names on, or for a room anything in it."""
    theirs = imports(importer)
    room = module.rpartition(".")[0]
    handed_on = room in theirs and module in imports(room) if room in modules() else False
    return module in theirs or handed_on or any(one.startswith(f"{module}.") for one in theirs)


def documented(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield re.sub(r"\s+", " ", ast.get_docstring(node) or "")


Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public(tree: ast.Module | ast.ClassDef, inside: str) -> Iterator[tuple[str, Documented]]:
    """Functions and classes without an underscore, those of public classes too."""
    for node in tree.body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield f"{inside}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{inside}.{node.name}")


def false_claims() -> dict[str, str]:
    found = {}
    for module, tree in modules().items():
        for text in documented(tree):
            for claim in CLAIM.findall(text):
                for name in NAMED.findall(ENDS.split(claim)[0]):
                    if not meant(name):
                        found[f"{module}: {name}"] = "no such module or class"
                    elif not any(imported_by(one, module) for one in meant(name) if one != module):
                        found[f"{module}: {name}"] = "does not import it"
    return found


def test_claimed_callers_import_the_module() -> None:
    assert false_claims() == {}


def test_first_line_of_modules_and_of_what_is_public_fits_one_line() -> None:
    long = {}
    for module, tree in modules().items():
        for name, node in ((module, tree), *public(tree, module)):
            first = re.split(r"\n\s*\n", ast.get_docstring(node) or "")[0]
            if len(re.sub(r"`[^`]*`|\([^)]*\)", "x", first)) > MAX_FIRST_LINE_CHARACTERS:
                long[name] = first
    assert long == {}


@pytest.mark.parametrize("name", ["Checkpointer", "ElasticLoader", "ElasticSampler", "ElasticStream"])
def test_every_argument_that_a_script_gives_is_described(name: str) -> None:
    given: type[Any] = getattr(surefoot, name)
    text = inspect.getdoc(given) or ""
    assert "Raises:" in text
    arguments = text.partition("Args:")[2].partition("Raises:")[0]
    named = set(inspect.signature(given.__init__).parameters) - {"self", "link", "objects"}
    assert {one for one in named if not re.search(rf"\b{one}\b", arguments)} == set()


def test_every_method_that_others_implement_is_described() -> None:
    for module, protocol in PROTOCOLS.items():
        methods = dict(public(modules()[module], module))
        mine = {name: node for name, node in methods.items() if name.startswith(f"{module}.{protocol}.")}
        assert mine
        assert [name for name, node in mine.items() if not ast.get_docstring(node)] == []


def test_a_module_is_found_by_its_last_names_and_a_class_by_its_own() -> None:
    assert meant("agent_client") == ["surefoot.ipc.agent_client"]
    assert "surefoot.checkpointer.checkpointer" in meant("checkpointer")
    assert meant("Checkpointer") == ["surefoot.checkpointer.checkpointer"]
    assert meant("farewell_committee") == []
