"""Lists every mistake of a TrainingJob's file at once, each with its line, for `surefoot validate` and `local`.

Pure. The parser stops at the first mistake. Here that mistake is taken out of a copy of the document, and the copy is
parsed again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import yaml

from surefoot_operator.api.parse import TRAINER, parse_job
from surefoot_operator.api.spec import API_VERSION, KIND
from surefoot_operator.errors import SpecError

_MAX_MISTAKES = 30
_PLACEHOLDERS: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "placeholder"},
    "spec.template": {"spec": {"containers": [{"name": TRAINER, "command": ["true"]}]}},
}
"""Required field -> a valid value that replaces a missing or invalid one."""


_SUGGESTION = re.compile(r"did you mean ([A-Za-z]+)\?")


def list_mistakes(content: str, document: dict[str, Any]) -> list[str]:
    """Returns a sentence for each mistake, by line.

    Args:
        content: Text of the file.
        document: The mapping that was loaded from it.
    """
    lines = dict(_lines_of(yaml.compose(content, Loader=yaml.SafeLoader)))
    remaining = copy.deepcopy(document)
    sentences: list[tuple[int, str]] = []
    removed_paths: set[str] = set()
    while len(sentences) < _MAX_MISTAKES:
        try:
            parse_job(remaining)
            break
        except SpecError as error:
            path = _path_of(error)
            if path not in removed_paths:
                line = next((lines[part] for part in _ancestors(path) if part in lines), 0)
                sentences.append((line, f"line {line}: {error}" if line else str(error)))
            # A required field that is missing, or was just removed, is required still: remove the mapping around it.
            if not any(_take_out(remaining, part, error, removed_paths) for part in _ancestors(path)):
                break
            if (suggested := _SUGGESTION.search(str(error))) is not None:
                renamed = f"{path.rpartition('.')[0]}.{suggested[1]}".removeprefix(".")
                lines |= {renamed + old[len(path) :]: line for old, line in lines.items() if old.startswith(path)}
    return [sentence for _, sentence in sorted(sentences, key=lambda numbered: numbered[0])]


def _lines_of(node: yaml.Node | None, path: str = "") -> Iterator[tuple[str, int]]:
    """Yields the path of each value with the line of its key, or of itself in a list. Aliases are not followed."""
    pending = [] if node is None else [(node, path)]
    visited: set[int] = set()
    while pending:
        current, current_path = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        if isinstance(current, yaml.MappingNode):
            for key, value in current.value:
                child_path = f"{current_path}.{key.value}".removeprefix(".")
                yield child_path, key.start_mark.line + 1
                pending.append((value, child_path))
        elif isinstance(current, yaml.SequenceNode):
            for index, item in enumerate(current.value):
                yield f"{current_path}[{index}]", item.start_mark.line + 1
                pending.append((item, f"{current_path}[{index}]"))


def _path_of(error: SpecError) -> str:
    """Returns the path of the value at fault; the error of an unknown field has the path of its mapping."""
    if "there is no field of that name" not in str(error):
        return error.path
    return str(error.value) if error.path == "the document" else f"{error.path}.{error.value}"


def _ancestors(path: str) -> Iterator[str]:
    """Yields the path and its prefixes, the longest first."""
    while path:
        yield path
        path = path[: max(path.rfind("."), path.rfind("["), 0)]


def _take_out(document: dict[str, Any], path: str, error: SpecError, removed_paths: set[str]) -> bool:
    """Removes or replaces the value at `path`, or renames a misspelt field; returns False if that was done before.

    Args:
        removed_paths: Paths that were taken out; `path` is added.
    """
    is_missing = "this field is required" in str(error) and path == _path_of(error)
    if path in removed_paths or (is_missing and path not in _PLACEHOLDERS):
        removed_paths.add(path)
        return False
    removed_paths.add(path)
    if path in _PLACEHOLDERS:
        required_in = document.get("spec") if path == "spec.template" else document
        if isinstance(required_in, dict):
            required_in[path.rpartition(".")[2]] = copy.deepcopy(_PLACEHOLDERS[path])
        return isinstance(required_in, dict)
    parent: Any = document
    *steps, last = (int(step[1:-1]) if step[0] == "[" else step for step in re.findall(r"[^.\[\]]+|\[\d+\]", path))
    try:
        for step in steps:
            parent = parent[step]
        value = parent[last]
    except (KeyError, IndexError, TypeError):
        return False
    if isinstance(parent, list):
        parent[last] = "placeholder"  # not removed: the later items keep their numbers
        return True
    del parent[last]
    if (suggested := _SUGGESTION.search(str(error))) is not None:
        parent.setdefault(suggested[1], value)
    return True
