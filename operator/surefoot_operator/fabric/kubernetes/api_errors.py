"""Defines what a call to the API server may raise.

Pure. Apart from `api`, since commands that talk to no cluster are there where its client is not installed.
"""

from __future__ import annotations

from surefoot_operator.errors import FabricError


class ApiRefused(FabricError):
    """The server answered with an error code."""

    def __init__(self, asked: str, code: int, reason: str, message: str) -> None:
        super().__init__(f"the API server refused to {asked}: {code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.lasting = code in (400, 422)
        self.decided = code < 500


class ApiSilent(FabricError):
    """The server did not answer; whether the call succeeded is unknown."""

    def __init__(self, asked: str, problem: BaseException) -> None:
        said = str(problem) or type(problem).__name__
        super().__init__(f"the API server did not answer when asked to {asked}: {said}; trying again later")
