"""Defines how a program may differ from the checkpoint it restores.

Used by `program`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from surefoot.errors import StateMismatch
from surefoot.state.entries import Entry, Saved, dtype_named


@dataclass(frozen=True, slots=True)
class Fit:
    """States which differences between program and checkpoint are allowed.

    Args:
        strict: False: every name may differ as `optional` ones may.
        optional: objects, or patterns of tensor names, that one side may lack or have in another shape.
        convert_dtypes: numbers may be read in another precision.
    """

    strict: bool = True
    optional: tuple[str, ...] = ()
    convert_dtypes: bool = False

    def may_differ(self, name: str) -> bool:
        """Returns whether a name matches `optional`, or nothing is strict.

        A pattern that names an object, or a name's beginning up to a `/`, covers all below it.
        """
        return not self.strict or any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}/*") for p in self.optional)

    def converts(self, entry: Entry, what: Saved) -> bool:
        """Returns whether elements may be read as another type of their kind."""
        mine, theirs = dtype_named(entry.dtype), dtype_named(what.dtype)
        alike = (mine.is_floating_point, mine.is_complex) == (theirs.is_floating_point, theirs.is_complex)
        return self.convert_dtypes and alike and (mine.is_floating_point or mine.is_complex)

    def misfit(self, entry: Entry, what: Saved | None) -> str | None:
        """Explains why an entry cannot be filled; None if it can.

        Raises StateMismatch for a difference that is not allowed.
        """
        name = entry.name
        if what is None:
            found = f"the checkpoint has no {name}: the program has changed since it was saved"
        elif what.shape != entry.place.shape:
            found = f"{name} has shape {entry.place.shape} here and {what.shape} in the checkpoint"
        elif what.dtype != entry.dtype and not self.converts(entry, what):
            found = f"{name} is {entry.dtype} here and {what.dtype} in the checkpoint"
            if not self.may_differ(name):
                raise StateMismatch(f"{found}: convert_dtypes=True converts floating point numbers as they are read")
        else:
            return None
        if not self.may_differ(name):
            raise StateMismatch(
                f"{found}; optional=({name.partition('/')[0] + '/…'!r},) or strict=False leaves it as built"
            )
        return f"{found}: it stays as the program built it"
