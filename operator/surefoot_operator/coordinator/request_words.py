"""Says in words what an agent was asked to do.

Pure; called by `request_replies` for sentences about requests that failed.
"""

from __future__ import annotations

from surefoot.protocol.messages import DropPersistent, ListPersistent, RepairSave
from surefoot.protocol.plain import listed
from surefoot.protocol.sighting_messages import LookAtHolders


def request_words(message: ListPersistent | RepairSave | DropPersistent | LookAtHolders) -> str:
    """Describes a request by its verb and what it is about."""
    if isinstance(message, RepairSave):
        return f"copy {message.save} from {message.source} to {message.target}"
    if isinstance(message, ListPersistent):
        return f"list {message.older_job or 'the persistent tier'}"
    if isinstance(message, LookAtHolders):
        return f"look at {listed([e.holder for e in message.holders])}"
    return "delete from the persistent tier"
