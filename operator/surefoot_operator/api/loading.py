"""Loads one YAML document as a mapping, strictly.

Pure; called by the CLI. Errors never quote the document, which may hold a secret.
"""

from __future__ import annotations

from typing import Any

import yaml

from surefoot.protocol.text import shorten
from surefoot_operator.api.fields import require_mapping
from surefoot_operator.api.parse import DEEPEST, MOST_CHARACTERS, check_nodes
from surefoot_operator.errors import Redacted, SpecError

# what a constructor of PyYAML raises for a scalar that does not say what its tag promises: `!!int ""`, `!!bool "x"`
_UNREADABLE = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError)


class InvalidYaml(SpecError):
    """The file is not valid YAML; never quotes it, for secrets."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, Redacted(), "YAML is")
        self.args = (f"{where}: this is not YAML: {shorten(problem)}",)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice: the last one would win in silence."""


def _unique_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = str(key_node.value)
        if key in seen:
            line = key_node.start_mark.line + 1
            raise SpecError(f"line {line}", key, "each field may occur once in its mapping")
        seen.add(key)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def load_yaml(content: str) -> dict[str, Any]:
    """Loads the only document in `content`. Raises SpecError."""
    documents = load_documents(content)
    if len(documents) != 1:
        raise SpecError("the document", len(documents), "exactly one TrainingJob is allowed in a file")
    return documents[0]


def load_documents(content: str) -> list[dict[str, Any]]:
    """Loads every document in `content`, each a mapping. Raises SpecError."""
    if len(content) > MOST_CHARACTERS:
        raise SpecError(
            "the document", Redacted(f"{len(content)} characters"), f"at most {MOST_CHARACTERS} are allowed"
        )
    try:
        documents = _documents(content)
    except yaml.MarkedYAMLError as error:
        # the parser's own text repeats the line, which may hold a secret
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the document"
        raise InvalidYaml(where, error.problem or "it cannot be read") from None
    except RecursionError:
        raise InvalidYaml("the document", f"it is nested too deep; no more than {DEEPEST} levels are allowed") from None
    except _UNREADABLE as error:
        raise InvalidYaml("the document", type(error).__name__) from None
    return [require_mapping(document, "the document") for document in documents]


def _documents(content: str) -> list[Any]:
    loader = _StrictLoader(content)
    found = []
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is None:
                break
            check_nodes(node)
            found.append(loader.construct_document(node))
    finally:
        loader.dispose()
    return [body for body in found if body is not None]
