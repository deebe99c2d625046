"""Signatures and first sentences of the Python API, written into docs and compared with them by a test.

`PYTHONPATH=tests python -m support.python_reference` writes what lies between the pages' markers anew; everything else
there is written by hand.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "python.md"
PAGES = (PAGE, DOCS / "integrations.md")
_MARKED = re.compile(r"(?<=<!-- made from )(?P<name>[\w.]+)(?P<open> -->\n).*?(?=<!-- end -->)", re.DOTALL)
_WIDTH = 100
NOT_FOR_USERS = ("link", "disable_after_fork")
"""A parameter that tests alone give, and a method that a forked child calls."""


def written(page: str) -> str:
    """The page with every marked part as the code says it now."""
    return _MARKED.sub(lambda found: f"{found['name']}{found['open']}{described(found['name'])}", page)


def marked(page: str) -> list[str]:
    """The names whose parts are made from the code."""
    return [found["name"] for found in _MARKED.finditer(page)]


def described(name: str) -> str:
    """One class or function: its signature, and for a class what may be called on it."""
    room, _, last = name.rpartition(".")
    subject = getattr(importlib.import_module(room), last)
    if not inspect.isclass(subject):
        return f"```python\n{_signature(name, subject)}\n```\n"
    if issubclass(subject, Exception):
        return f"* `{name}` ({subject.__mro__[1].__name__}): {_sentence(subject)}\n"
    lines = [_signature(name, subject)]
    for method, function in _methods(subject):
        shown = _signature(f".{method}", function) if callable(function) else f".{method}"
        lines.append(f"{shown}  # {_sentence(function).rstrip('.')}")
    return "```python\n" + "\n".join(lines) + "\n```\n"


def parameters(name: str) -> list[str]:
    """What it takes by keyword."""
    room, _, last = name.rpartition(".")
    signature = inspect.signature(getattr(importlib.import_module(room), last))
    return [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]


def _methods(subject: type[Any]) -> list[tuple[str, Any]]:
    """Public ones with a docstring, in the order of the source.

    What Checkpointer alone calls is no user's, nor is what a class does for an interface of torch.
    """
    inherited = {name for base in subject.__mro__[1:] for name in vars(base)}
    found = []
    for name, value in vars(subject).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        documented = inspect.isfunction(function) or isinstance(function, property)
        internal = name.startswith("_") or name in inherited or name in NOT_FOR_USERS
        if documented and not internal and not _sentence(function).startswith("Called by"):
            found.append((name, function))
    return found


def _signature(name: str, subject: Any) -> str:
    """Names and defaults; an editor shows the types."""
    words: list[str] = []
    for parameter in inspect.signature(subject).parameters.values():
        if parameter.name in NOT_FOR_USERS:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(_parameter(parameter))
    text = f"{name}({', '.join(word for word in words if word != 'self')})"
    return "\n".join(textwrap.wrap(text, _WIDTH, subsequent_indent="    ", break_long_words=False))


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    return f"{stars}{parameter.name}" + ("" if parameter.default is parameter.empty else f"={parameter.default!r}")


def _sentence(subject: Any) -> str:
    """The first sentence of the docstring, in one line."""
    paragraph = (inspect.getdoc(subject) or "").partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
