"""Limits for every number and size in a record that another process wrote.

Pure. Records from Redis, from a bucket or from an agent are not trusted: anyone who can write a job's keys can claim a
world size of a billion in 300 bytes. Code that allocates memory for such a number would crash the reader, and with the
operator all jobs. So readers compare each number with a limit of this module first; every limit is far above the
needs of a large job.
"""

from __future__ import annotations

from collections.abc import Collection

from surefoot.errors import OutOfBounds
from surefoot.protocol.text import short_repr

MAX_RANKS = 1 << 20
"""Highest world size: ten times the largest training known."""
MAX_COUNT = 1 << 53
"""Highest step, generation or offset: the integers that JSON represents exactly."""
MAX_RANK_BYTES = 1 << 40
"""Largest save of one rank. It also limits the chunks of a save, whose keys are listed to delete it."""
MAX_PART_BYTES = 1 << 29
"""Largest digest table or set of values: Redis stores no longer string."""
MAX_NAME_CHARACTERS = 1024
"""Longest digest, incarnation or object name."""
MAX_OBJECTS = 4096
"""Stateful objects that one rank saves, apart from modules and optimizers."""
MAX_MANIFEST_BYTES = 1 << 19
"""Longest rank manifest: usual are 400 bytes, with `MAX_OBJECTS` objects a few hundred thousand."""
MAX_MANIFEST_VALUES = 1 << 14
"""Numbers, texts and lists in one rank manifest."""

MAX_LAYOUT_BYTES = 1 << 25
"""Longest layout record: 50,000 parameters with two moments each take 25 MiB."""
MAX_LAYOUT_VALUES = 1 << 22
"""Numbers, texts and lists in one layout record: those 150,000 tensors have 3.5 million, of 30 to 60 bytes in memory."""
MAX_DIMENSIONS = 64
"""Dimensions of one tensor; PyTorch has the same limit."""
MAX_COVERAGE_CORNERS = 1 << 22
"""Corners of one tensor's pieces: a million ranks that shard two dimensions. Checking them takes seconds."""

MAX_SMALL_RECORD_BYTES = 1 << 16
"""Longest small record (`newest.json`, a generation's record, the header of a manifest list): usual are some hundred bytes."""
MAX_SMALL_RECORD_VALUES = 1 << 10
"""Numbers, texts and lists in one small record."""
MAX_SERVER_VALUE_BYTES = 64
"""Longest value of a memory server's fence, watermark and instance key."""

MAX_INDEX_ENTRIES = 1 << 13
"""Index entries of one job on one server: the ranks of its node and of a few peers, times a handful of checkpoints."""
MAX_INDEX_BYTES = 1 << 24
"""Bytes of one job's index on one server."""
MAX_LEFTOVER_KEYS = 100_000
"""Keys without an index entry that one probe of a server collects; the next probe collects the rest."""
MAX_REPLY_BYTES = 1 << 26
"""Longest reply of a memory server: four times the longest index."""
MAX_REPLY_SECONDS = 30.0
"""Time limit for one reply, so that a server that trickles bytes cannot block its reader."""

MAX_PAGE_CHARACTERS = 5 << 23
"""Longest page of a listing: a mebibyte of manifests, or one layout record with its quotes escaped."""
MAX_PAGE_TEXTS = 1 << 16
"""Texts in one page of a listing: a mebibyte has some 3,000 manifests, and a thousand unread records may be named."""
MAX_MESSAGE_VALUES = 1 << 18
"""Numbers, texts and lists of a message that needs Python's own JSON parser, because our agents write it differently."""
MAX_LISTING_PAGES = 1 << 16
"""Pages of one listing, repeated ones included."""
MAX_CAUSE_CHARACTERS = 1024
"""Longest cause of a trainer's end, one line: agents send 400 characters."""
MAX_DETAIL_CHARACTERS = 1 << 14
"""Longest detail of a failure (the stack of each rank): agents send less, and the status keeps the beginning."""

_JOB_RECORDS, _RECORDS_OF_RANK = 1 << 15, 256


def max_manifests_per_tier(ranks: int) -> int:
    """Returns how many manifests of one job the operator keeps per tier; grows with the job's world size."""
    return _JOB_RECORDS + _RECORDS_OF_RANK * ranks


def max_listed_layout_bytes(records: int) -> int:
    """Returns how many bytes of layout records one listing may bring along with this many manifests."""
    return 2 * MAX_LAYOUT_BYTES + 4096 * records


def max_retained_layout_values(ranks: int) -> int:
    """Returns how many values of layout records the operator keeps for one job: the longest record for each rank."""
    return MAX_LAYOUT_VALUES * max(1, ranks)


def require_in_range(record: str, field: str, value: int | float, maximum: int, minimum: int = 0) -> None:
    """Raises OutOfBounds unless `minimum` ≤ value ≤ `maximum`."""
    if not minimum <= value <= maximum:  # written so that NaN, for which every comparison is false, is rejected
        raise OutOfBounds(record, field, short_repr(value), f"{minimum} to {maximum}")


def require_max_length(record: str, field: str, text: str, max_characters: int = MAX_NAME_CHARACTERS) -> None:
    """Raises OutOfBounds if the text has more than `max_characters`."""
    if len(text) > max_characters:
        raise OutOfBounds(record, f"the length of {field}", str(len(text)), f"0 to {max_characters}")


def require_json_in_bounds(record: str, text: str | bytes, max_bytes: int, max_values: int) -> None:
    """Raises OutOfBounds if a JSON text is too long or would become too many values; called before it is parsed.

    `[[],[],…` grows to thirty times its length in memory. Every value follows a comma or opens a container, so commas
    and opening brackets are counted. Those within texts count too; the limits leave room for them.
    """
    if len(text) > max_bytes:
        raise OutOfBounds(record, "its length", str(len(text)), f"0 to {max_bytes}")
    values = count_json_values(text)
    if values > max_values:
        raise OutOfBounds(record, "the number of its values", str(values), f"0 to {max_values}")


def count_json_values(json_text: str | bytes) -> int:
    """Returns an upper bound of the number of values in a JSON text, without parsing it."""
    if isinstance(json_text, str):
        return json_text.count(",") + json_text.count("[") + json_text.count("{")
    return json_text.count(b",") + json_text.count(b"[") + json_text.count(b"{")


def has_every_rank(ranks: Collection[int], world_size: int) -> bool:
    """Returns whether these distinct ranks are 0 to `world_size` - 1, without counting up to a foreign number."""
    return len(ranks) == world_size and bool(ranks) and min(ranks) == 0 and max(ranks) == world_size - 1


def truncate_text(text: str, max_characters: int) -> str:
    """Cuts a text to `max_characters`, the last of them `…`."""
    return text if len(text) <= max_characters else f"{text[: max_characters - 1]}…"
