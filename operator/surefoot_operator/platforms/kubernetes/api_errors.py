"""Defines what a call to the API server may raise.

Pure. Apart from `api_client`, since commands that talk to no cluster are there where its client is not installed.
"""

from __future__ import annotations

import re

from surefoot_operator.errors import FabricError

_LONG_VALUE = re.compile(r'(?:(?<=value: )"|"(?=[{\[]))(?:[^"\\]|\\.){100,}"')
"""A quoted value, or a whole object, that the server repeats; what is wrong with it stands behind."""
_MOST = 700
TEST_FAILED = "the server rejected our request due to an error in our request"
"""All that the API server says where a JSON Patch's `test` fails: somebody else was faster."""
_CRD = (
    "; does the CustomResourceDefinition in the cluster fit this operator? If it is older, apply the one of the"
    " operator's version (crd.yaml of its chart)"
)


class ApiRefused(FabricError):
    """The server answered with an error code."""

    def __init__(self, asked: str, code: int, reason: str, message: str, closing: bool = False) -> None:
        self.sentence = readable(message)
        """The server's own, which leads: log viewers cut lines at their end."""
        if code == 422 and message != TEST_FAILED and "/trainingjobs/" in asked and asked.endswith("/status"):
            self.sentence += _CRD
        super().__init__(f"{self.sentence} ({code} {reason}: the API server refused to {asked})")
        self.code = code
        self.reason = reason
        self.lasting = code in (400, 422)
        self.decided = code < 500
        self.busy = code == 429
        # servers before 1.19 give no cause, and all of them these words
        self.closing = closing or (code == 403 and "because it is being terminated" in message)


class ApiSilent(FabricError):
    """The server did not answer; whether the call succeeded is unknown."""

    def __init__(self, asked: str, problem: BaseException) -> None:
        said = str(problem) or type(problem).__name__
        super().__init__(f"the API server did not answer when asked to {asked}: {said}; trying again later")


def readable(message: str) -> str:
    """Shortens a refusal's message; its end is kept, where the server says what is wrong."""
    text = _LONG_VALUE.sub('"…"', message).strip() or "the API server gave no reason"
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]} … {text[-_MOST // 2 :]}"
