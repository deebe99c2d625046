"""Loads YAML documents as mappings, strictly: no duplicate keys, and limits for size and depth.

Pure; called by the CLI. Errors never quote the document, because it may contain a secret.
"""

from __future__ import annotations

from typing import Any

import yaml

from surefoot.protocol.text import shorten
from surefoot_operator.api.fields import require_mapping
from surefoot_operator.api.parse import MAX_DEPTH, MAX_DOCUMENT_CHARACTERS, check_nodes
from surefoot_operator.errors import Redacted, SpecError

# errors of PyYAML's constructors for a scalar that does not match its tag, such as `!!int ""` or `!!bool "x"`
_UNREADABLE = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError)


class InvalidYaml(SpecError):
    """The file is not valid YAML. The message never quotes it, because it may contain a secret."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, Redacted(), "YAML is")
        self.args = (f"{where}: this is not YAML: {shorten(problem)}",)


class _StrictLoader(yaml.SafeLoader):
    """Rejects duplicate keys, of which PyYAML would silently use the last."""


def _unique_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Constructs a mapping, and raises SpecError for a duplicate key."""
    keys: set[str] = set()
    for key_node, _ in node.value:
        key = str(key_node.value)
        if key in keys:
            line = key_node.start_mark.line + 1
            raise SpecError(f"line {line}", key, "each field may occur once in its mapping")
        keys.add(key)
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
    if len(content) > MAX_DOCUMENT_CHARACTERS:
        raise SpecError(
            "the document", Redacted(f"{len(content)} characters"), f"at most {MAX_DOCUMENT_CHARACTERS} are allowed"
        )
    try:
        documents = _load_all(content)
    except yaml.MarkedYAMLError as error:
        # the parser's own message quotes the line, which may contain a secret
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the document"
        raise InvalidYaml(where, error.problem or "it cannot be read") from None
    except RecursionError:
        raise InvalidYaml(
            "the document", f"it is nested too deep; no more than {MAX_DEPTH} levels are allowed"
        ) from None
    except _UNREADABLE as error:
        raise InvalidYaml("the document", type(error).__name__) from None
    return [require_mapping(document, "the document") for document in documents]


def _load_all(content: str) -> list[Any]:
    """Constructs every document after its size was checked; empty documents are left out."""
    loader = _StrictLoader(content)
    documents = []
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is None:
                break
            check_nodes(node)
            documents.append(loader.construct_document(node))
    finally:
        loader.dispose()
    return [document for document in documents if document is not None]
