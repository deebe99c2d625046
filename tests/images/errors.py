"""What the tool says when images cannot be had."""

from __future__ import annotations


class ImagesError(Exception):
    """A sentence for people: what could not be done, and what to do."""
