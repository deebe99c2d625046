"""Defines the Lua scripts by which a memory server fences, commits and deletes.

They are called by EVALSHA under the job's own account (the operator loads them) and touch declared keys only. Each
returns a list of strings whose first one is the outcome. They must work when memory is full: a server above its limit
rejects writes of a script until that script has written once, but never rejects UNLINK. So each of them unlinks a key
that never exists before it writes.

KEYS begin with fence, instance, absent and index; ARGV with the writer's generation and the instance that it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha1

from surefoot.protocol.bounds import MAX_SERVER_VALUE_BYTES
from surefoot.protocol.identities import RankSave

_GUARD = """
local fence = tonumber(redis.call('GET', KEYS[1]) or '-1')
if not fence then return {'damaged', KEYS[1]} end
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return {'replaced'} end
if tonumber(ARGV[1]) < fence then return {'fenced', tostring(fence)} end
"""


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its digest."""

    name: str
    """Name for messages."""
    source: str
    """Source in Lua."""
    sha: str = field(init=False)
    """SHA-1 of the source, by which EVALSHA calls it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", sha1(self.source.encode(), usedforsecurity=False).hexdigest())


PROVISION = Script(
    "provision",
    """
local fence = tonumber(redis.call('GET', KEYS[1]) or '-1')
if not fence then return {'damaged', KEYS[1]} end
if tonumber(ARGV[1]) < fence then return {'fenced', tostring(fence)} end
redis.call('UNLINK', KEYS[3])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[1], ARGV[1])
return {'ok'}
""",
)
"""Records the instance and the first fence of a job. Only the operator may call it: it makes the server one of the job's."""

FENCE = Script(
    "fence",
    _GUARD
    + """
redis.call('UNLINK', KEYS[3])
redis.call('SET', KEYS[1], ARGV[1])
return {'ok'}
""",
)
"""Raises the fence to ARGV[1]: writers of older generations are rejected from then on."""

COMMIT = Script(
    "commit",
    _GUARD
    + """
for i = 6, #KEYS do
  local wanted = tonumber(ARGV[i])
  local found = redis.call('STRLEN', KEYS[i])
  if found ~= wanted then return {'missing', KEYS[i], tostring(found)} end
end
if redis.call('STRLEN', KEYS[5]) == 0 then return {'missing', KEYS[5], '0'} end
local before = redis.call('HGET', KEYS[4], ARGV[3])
if before and before ~= ARGV[4] and before ~= ARGV[5] then return {'conflict', before} end
redis.call('UNLINK', KEYS[3])
redis.call('SET', KEYS[1], ARGV[1])
if before ~= ARGV[4] then redis.call('HSET', KEYS[4], ARGV[3], ARGV[4]) end
return {'ok'}
""",
)
"""Adds an entry to the index if all its data is there. KEYS[5] is the layout, KEYS from 6 on the data. ARGV: 3 field,
4 manifest, 5 the damaged entry that it may replace, from 6 on the lengths of the data."""

DELETE = Script(
    "delete",
    _GUARD
    + """
redis.call('HDEL', KEYS[4], ARGV[3])
for i = 5, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'ok'}
""",
)
"""Deletes an entry, and data in the same call, after the entry. KEYS from 5 on are the data, ARGV[3] is the field."""

SET_WATERMARK = Script(
    "set_watermark",
    _GUARD
    + """
redis.call('UNLINK', KEYS[3])
redis.call('SET', KEYS[5], ARGV[3])
return {'ok'}
""",
)
"""Stores the watermark. KEYS[5] is its key, ARGV[3] the value."""

READ = Script(
    "read",
    """
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return {'replaced'} end
return {'ok', redis.call('GET', KEYS[1]) or '', redis.call('GET', KEYS[5]) or '', redis.call('HGETALL', KEYS[4])}
""",
)
"""Reads fence, watermark and index at one moment. A restarted server counts as unreachable, never as empty."""

_BOUNDS = """
for _, key in ipairs({KEYS[1], KEYS[2], KEYS[5]}) do
  local length = redis.call('STRLEN', key)
  if length > tonumber(ARGV[3]) then return {'large', 'the length of ' .. key, tostring(length), ARGV[3]} end
end
local entries = redis.call('HLEN', KEYS[4])
if entries > tonumber(ARGV[4]) then return {'large', 'the number of index entries', tostring(entries), ARGV[4]} end
local size = redis.call('MEMORY', 'USAGE', KEYS[4], 'SAMPLES', '0') or 0
if size > tonumber(ARGV[5]) then return {'large', 'the bytes of the index', string.format('%.0f', size), ARGV[5]} end
"""
"""Rejects a large index by its size alone. Must run in the same script as the read, as the tenant may write in between."""

READ_BOUNDED = Script("read_bounded", _BOUNDS + READ.source)
"""Like READ, for the administrator, who reads the keys of all jobs. Rejects an index that is larger than ARGV[3] (bytes
of a key), ARGV[4] (entries) or ARGV[5] (bytes of the index)."""

READ_FIELDS = Script("read_fields", _BOUNDS + "return {'ok', redis.call('HKEYS', KEYS[4])}")
"""Reads the names of the index entries, within the same limits."""

DELETE_UNCOMMITTED = Script(
    "delete_uncommitted",
    _GUARD
    + """
if redis.call('HGET', KEYS[4], ARGV[3]) then return {'indexed'} end
for i = 5, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'ok'}
""",
)
"""Deletes data that has no index entry, and nothing if the save was committed in the meantime. Arguments as in DROP."""

ALL = (PROVISION, FENCE, COMMIT, DELETE, SET_WATERMARK, READ, READ_BOUNDED, READ_FIELDS, DELETE_UNCOMMITTED)
"""The scripts that the operator loads."""


# ---- keys ------------------------------------------------------------------------------------------------------------
# Names the keys on a memory server. All are below `sf:{job uid}:`, and a job's account can access nothing else.

KEY_PREFIX = "sf:"
"""Prefix of the keys of all jobs."""
PREFAULT_PREFIX = "surefoot-prefault:"
"""Prefix of values that only prefault memory; deleted when that is done."""
PREFAULTING_KEY = "surefoot-prefaulting"
"""Exists for some seconds while a new server prefaults its memory. No job may use the server yet."""


def job_prefix(job: str) -> str:
    """Returns the prefix of all keys of a job."""
    return f"{KEY_PREFIX}{job}:"


def fence_key(job: str) -> str:
    """Names the string with the newest generation that fenced or committed; older writers are rejected."""
    return f"{job_prefix(job)}fence"


def instance_key(job: str) -> str:
    """Names the string with the run id of the server when the job was provisioned, which reveals a restart."""
    return f"{job_prefix(job)}instance"


def index_key(job: str) -> str:
    """Names the hash from `generation:step:rank` to rank manifest; an entry means that the whole rank save is here."""
    return f"{job_prefix(job)}index"


def watermark_key(job: str) -> str:
    """Names the string `generation:step` with the newest checkpoint that is known to be on enough memory servers."""
    return f"{job_prefix(job)}watermark"


def absent_key(job: str) -> str:
    """Names the key that is never written; scripts unlink it first, after which a full server lets them write."""
    return f"{job_prefix(job)}absent"


def layout_key(job: str, digest: str) -> str:
    """Names the string with a layout record."""
    return f"{job_prefix(job)}layout:{digest}"


def chunk_key(job: str, save: RankSave, number: int) -> str:
    """Names the string with a chunk of a save."""
    return f"{_save_prefix(job, save)}c{number}"


def digests_key(job: str, save: RankSave) -> str:
    """Names the string with the digest table of a save."""
    return f"{_save_prefix(job, save)}d"


def values_key(job: str, save: RankSave) -> str:
    """Names the string with the plain values of a save."""
    return f"{_save_prefix(job, save)}v"


def list_data_keys(job: str, save: RankSave, chunks: int) -> list[str]:
    """Lists the data keys of a rank save: digests, values and chunks."""
    return list(iterate_data_keys(job, save, chunks))


def iterate_data_keys(job: str, save: RankSave, chunks: int) -> Iterator[str]:
    """Yields the data keys of a rank save one by one: a large save has some hundred thousand."""
    yield digests_key(job, save)
    yield values_key(job, save)
    yield from (chunk_key(job, save, number) for number in range(chunks))


def is_data_key_part(name: str, chunks: int) -> bool:
    """Whether the last part of a key's name is that of data of a save with this many chunks."""
    if name in ("d", "v"):
        return True
    return name[:1] == "c" and name[1:].isdecimal() and len(name) < 12 and int(name[1:]) < chunks


def index_field(save: RankSave) -> str:
    """Returns the field of a rank save in the index."""
    return f"{save.generation}:{save.step}:{save.rank}"


def parse_index_field(field_text: str) -> RankSave | None:
    """Parses a field of the index; None if it is malformed."""
    parts = field_text.split(":") if len(field_text) <= MAX_SERVER_VALUE_BYTES else []
    return RankSave(*map(int, parts)) if len(parts) == 3 and all(p.isdecimal() for p in parts) else None


def job_uids_of(names: Iterable[str]) -> set[str]:
    """Returns the uids of the jobs that these keys belong to."""
    return {name.split(":")[1] for name in names if name.startswith(KEY_PREFIX) and name.count(":") > 1}


def _save_prefix(job: str, save: RankSave) -> str:
    """Returns the prefix of the data keys of a save."""
    return f"{job_prefix(job)}{save.generation}:{save.step}:{save.rank}:"


def escape_pattern(text: str) -> str:
    """Escapes a text so that it matches only itself in a Redis pattern."""
    return "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in text)
