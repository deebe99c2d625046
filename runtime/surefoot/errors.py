"""Defines the runtime's errors.

Every message says what happened, to what, and what to do about it.
"""

from __future__ import annotations


class SurefootError(Exception):
    """Anything the runtime raises on purpose."""


class ProtocolError(SurefootError):
    """A message or record cannot be read by this version.

    Or it belongs to somebody else.
    """


class OutOfBounds(ProtocolError):
    """A foreign record has a number or size that nothing may be sized by.

    Names the record, the field and its bound; the bounds are in `protocol.bounds`.
    """

    MARK = "is out of bounds"

    def __init__(self, record: str, field: str, value: str, bound: str) -> None:
        super().__init__(f"{record} {self.MARK}: {field} is {value}, allowed are {bound}; remove or rewrite it")
        self.record, self.field, self.bound = record, field, bound


class Fenced(SurefootError):
    """A newer epoch rules the job, so a write was refused.

    Final for this epoch: stop writing.
    """


class TierError(SurefootError):
    """A tier could not do a call: away, full, too slow.

    The save is lost, the training is not.
    """


class TierUnavailable(TierError):
    """The tier did not answer in time, or its line broke.

    What it has is unknown, never empty.
    """


class ObjectRefused(TierUnavailable):
    """The tier answers, and gives an error for this one object.

    A bad sector, a wrong mode, a denied key; or all of its objects are refused, which only a look at others tells.
    """


class AccessDenied(TierUnavailable):
    """The tier answers and refuses this password or authority.

    It lives; what it has is unknown.
    """


class ServerPrefaulting(TierUnavailable):
    """A holder has just started, and its memory is being touched.

    It holds nothing yet. Ask again in a moment.
    """

    def __init__(self, text: str, instance: str) -> None:
        super().__init__(text)
        self.instance = instance


class CopyUnsupported(TierError):
    """A tier does not copy within itself, and takes what is sent.

    A server that speaks less than Redis or S3 do, or an account that may not read what is copied.
    """


class SaveExists(TierError):
    """Another save is committed under the same name, and stays as it is.

    Final: names both.
    """


class TierFull(TierError):
    """The tier has no room left. Saving resumes when it has."""


class StagingMemoryUnavailable(SurefootError):
    """There is no memory to stage saves in.

    The training goes on unprotected; each due save asks again.
    """


class InvalidServerReply(TierError):
    """A holder answered what no holder answers.

    One of its keys was overwritten or damaged. Restarting it empties it.
    """


class ChunkMissing(TierError):
    """The tier answered, and does not have what was asked for."""


class Corrupt(SurefootError):
    """Bytes do not match their digest.

    Names the chunk and the copy; another copy may be good.
    """


class Unreadable(SurefootError):
    """No copy of a needed range is good.

    Every copy answered and failed verification or lacks a part, or (`absent`) every place answered and no index names
    one any more.
    """

    def __init__(self, text: str, absent: bool = False) -> None:
        super().__init__(text)
        self.absent = absent


class OtherWriter(SurefootError):
    """Another program writes to the same job's folder, and has not ended."""


class LastStepNotSaved(SurefootError):
    """A program without an agent ended, and its last step is in no checkpoint.

    `step` is the one that was to be saved, `saved_step` the newest that this rank's saves reached; 0: none.
    """

    def __init__(self, step: int, saved_step: int, cause: str) -> None:
        newest = f"the newest saved step is {saved_step}" if saved_step else "this program saved no step"
        super().__init__(f"step {step} is not saved, {newest}: {cause}")
        self.step, self.saved_step = step, saved_step


class StateMismatch(SurefootError):
    """Checkpoint and program disagree about a name, shape or dtype.

    An application failure, not a fallback.
    """


class StateNotRestorable(SurefootError):
    """The program holds state that no restore could bring back.

    Names the object, the key and what to do about it.
    """


class ConfigurationError(SurefootError):
    """A setting is not possible.

    Names the setting, its value and what is allowed.
    """
