"""Defines the runtime's errors.

Every message states the event, its object and the remedy.
"""

from __future__ import annotations


class SurefootError(Exception):
    """Base class of the errors that the runtime raises on purpose."""


class ProtocolError(SurefootError):
    """This version cannot read a message or record, or it belongs to another job."""


class OutOfBounds(ProtocolError):
    """A record from outside this process has a number or size beyond its bound.

    Names the record, the field and its bound; the bounds are in `protocol.bounds`.
    """

    MARK = "is out of bounds"

    def __init__(self, record: str, field: str, value: str, bound: str) -> None:
        super().__init__(f"{record} {self.MARK}: {field} is {value}, allowed are {bound}; remove or rewrite it")
        self.record, self.field, self.bound = record, field, bound


class Fenced(SurefootError):
    """A store rejected a write, since a newer generation of the job has fenced it; this generation must stop writing."""


class TierError(SurefootError):
    """A call to a tier failed, as when it is unreachable, full or too slow; the save is lost, the training continues."""


class TierUnavailable(TierError):
    """The tier did not answer in time, or the connection broke; its contents are unknown, not empty."""


class ObjectRefused(TierUnavailable):
    """The tier answers, but reports an error for this object: a bad sector, a wrong file mode, a denied key.

    It may reject all objects; only calls for others show that.
    """


class AccessDenied(TierUnavailable):
    """The tier answers, but rejects the password or certificate authority; its contents are unknown."""


class ServerPrefaulting(TierUnavailable):
    """A memory server has just started and prefaults its memory; it is empty, and can be used in a moment."""

    def __init__(self, text: str, instance: str) -> None:
        super().__init__(text)
        self.instance = instance


class CopyUnsupported(TierError):
    """The tier cannot copy its own data, but accepts the data if it is sent.

    Its server lacks a command of Redis or S3, or the account may not read the source of the copy.
    """


class SaveExists(TierError):
    """Another save is already committed under this name and stays unchanged; the message names both."""


class TierFull(TierError):
    """The tier is full; saves continue when it has free space."""


class StagingMemoryUnavailable(SurefootError):
    """There is no memory for staging saves; the training continues without, and each due save requests memory again."""


class InvalidServerReply(TierError):
    """A memory server's reply is invalid, since one of its keys was overwritten or damaged; a restart empties it."""


class ChunkMissing(TierError):
    """The tier answered, but does not have the requested chunk."""


class Corrupt(SurefootError):
    """Bytes do not match their digest; the message names the chunk and the copy, and another copy may be intact."""


class Unreadable(SurefootError):
    """No copy of a needed range can be read.

    Every copy failed verification or lacks a part; or, if `absent`, every tier answered and no index lists a copy.
    """

    def __init__(self, text: str, absent: bool = False) -> None:
        super().__init__(text)
        self.absent = absent


class OtherWriter(SurefootError):
    """Another running program writes to the same job's folder."""


class LastStepNotSaved(SurefootError):
    """A program without an agent ended, and no checkpoint contains its last step.

    `step` is that step, `saved_step` the newest step that this rank saved; 0: none.
    """

    def __init__(self, step: int, saved_step: int, cause: str) -> None:
        newest = f"the newest saved step is {saved_step}" if saved_step else "this program saved no step"
        super().__init__(f"step {step} is not saved, {newest}: {cause}")
        self.step, self.saved_step = step, saved_step


class StateMismatch(SurefootError):
    """Checkpoint and program differ in a name, shape or dtype; this is an error of the program and nothing is restored."""


class StateNotRestorable(SurefootError):
    """The program has state that cannot be restored; the message names the object, the key and the remedy."""


class ConfigurationError(SurefootError):
    """A setting is invalid; the message names it, its value and the allowed values."""
