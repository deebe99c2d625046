"""Defines the Lua scripts by which a holder seals, commits and drops.

They run by EVALSHA under the job's own account (the operator loads them), touch declared keys only, and answer with a
list of strings whose first says what happened. They must work when memory is full: a server over its limit refuses
writes to a script until that script has written once, and UNLINK is never refused. So each unlinks a key that is
never there before it writes.

KEYS always begin with fence, instance, absent, index; ARGV with the writer's epoch and the instance it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha1

from surefoot.protocol.bounds import MAX_KEY_BYTES
from surefoot.protocol.identities import RankSave

_GUARD = """
local fence = tonumber(redis.call('GET', KEYS[1]) or '-1')
if not fence then return {'damaged', KEYS[1]} end
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return {'replaced'} end
if tonumber(ARGV[1]) < fence then return {'fenced', tostring(fence)} end
"""


@dataclass(frozen=True, slots=True)
class Script:
    """Defines a script: name for messages, source, and digest for EVALSHA."""

    name: str
    source: str
    sha: str = field(init=False)

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
"""Names the instance and sets the first fence. The operator's alone: it is what makes this server a holder of the job."""

SEAL = Script(
    "seal",
    _GUARD
    + """
redis.call('UNLINK', KEYS[3])
redis.call('SET', KEYS[1], ARGV[1])
return {'ok'}
""",
)

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
"""KEYS[5] is the layout, from 6 on the data; ARGV: 3 field, 4 manifest, 5 entry it may replace, from 6 on lengths."""

DROP = Script(
    "drop",
    _GUARD
    + """
redis.call('HDEL', KEYS[4], ARGV[3])
for i = 5, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'ok'}
""",
)
"""KEYS from 5 on are the data; ARGV[3] is the field. The entry goes first, and all of it in one call."""

MARK = Script(
    "mark",
    _GUARD
    + """
redis.call('UNLINK', KEYS[3])
redis.call('SET', KEYS[5], ARGV[3])
return {'ok'}
""",
)
"""KEYS[5] is the watermark, ARGV[3] its new value."""

READ = Script(
    "read",
    """
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return {'replaced'} end
return {'ok', redis.call('GET', KEYS[1]) or '', redis.call('GET', KEYS[5]) or '', redis.call('HGETALL', KEYS[4])}
""",
)
"""Fence, watermark and index of one moment and one instance; one that restarted is silent, never empty."""

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
"""Looks at sizes alone, and in the same moment as what follows: a tenant may write whatever it likes in between."""

LOOK = Script("look", _BOUNDS + READ.source)
"""As READ, for the administrator, who reads the keys of all jobs: refuses what is larger than ARGV[3] (bytes of a key),
ARGV[4] (entries) or ARGV[5] (bytes of the index)."""

FIELDS = Script("fields", _BOUNDS + "return {'ok', redis.call('HKEYS', KEYS[4])}")
"""The names of the index' entries, under the same bounds."""

SWEEP = Script(
    "sweep",
    _GUARD
    + """
if redis.call('HGET', KEYS[4], ARGV[3]) then return {'indexed'} end
for i = 5, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'ok'}
""",
)
"""As DROP, of data that has no entry: one that was committed since it was looked at stays whole."""

ALL = (PROVISION, SEAL, COMMIT, DROP, MARK, READ, LOOK, FIELDS, SWEEP)


# ---- keys ------------------------------------------------------------------------------------------------------------
# Names the keys on a holder, all below `sf:{job uid}:`. A job's account reaches nothing else.

KEY_PREFIX = "sf:"
FILL_PREFIX = "surefoot-prefault:"
"""Values that only touch memory; gone when that is done."""
FILLING_KEY = "surefoot-prefaulting"
"""There while a new server's memory is touched, for seconds: it is nobody's holder yet."""


def of_job(job: str) -> str:
    """The prefix of all the job's keys."""
    return f"{KEY_PREFIX}{job}:"


def fence_key(job: str) -> str:
    """String: the newest epoch that sealed or committed; older writers are refused."""
    return f"{of_job(job)}fence"


def instance_key(job: str) -> str:
    """String: which run of the server the job was provisioned on.

    It tells a holder that restarted from the one before.
    """
    return f"{of_job(job)}instance"


def index_key(job: str) -> str:
    """Hash: `epoch:step:rank` to the rank manifest.

    An entry means that the whole rank save is here.
    """
    return f"{of_job(job)}index"


def watermark_key(job: str) -> str:
    """String: `epoch:step` of the newest checkpoint known to be on enough holders."""
    return f"{of_job(job)}watermark"


def absent_key(job: str) -> str:
    """A key that is never written, for scripts to unlink first.

    A full server lets a script write once it has unlinked.
    """
    return f"{of_job(job)}absent"


def layout_key(job: str, digest: str) -> str:
    """String: the layout record of that digest."""
    return f"{of_job(job)}layout:{digest}"


def chunk_key(job: str, save: RankSave, number: int) -> str:
    return f"{_of_save(job, save)}c{number}"


def digests_key(job: str, save: RankSave) -> str:
    return f"{_of_save(job, save)}d"


def values_key(job: str, save: RankSave) -> str:
    return f"{_of_save(job, save)}v"


def data_of(job: str, save: RankSave, chunks: int) -> list[str]:
    """Lists the data keys of a rank save: digests, values, chunks."""
    return list(names_of(job, save, chunks))


def names_of(job: str, save: RankSave, chunks: int) -> Iterator[str]:
    """Yields what `data_of` lists: of a large save they are some hundred thousand."""
    yield digests_key(job, save)
    yield values_key(job, save)
    yield from (chunk_key(job, save, number) for number in range(chunks))


def is_data_of(name: str, chunks: int) -> bool:
    """Whether the last part of a key's name is that of data of a save with so many chunks."""
    if name in ("d", "v"):
        return True
    return name[:1] == "c" and name[1:].isdecimal() and len(name) < 12 and int(name[1:]) < chunks


def index_field(save: RankSave) -> str:
    """The rank save's field in the index."""
    return f"{save.generation}:{save.step}:{save.rank}"


def save_of(field_text: str) -> RankSave | None:
    """The inverse of `field`; None where it is not one."""
    parts = field_text.split(":") if len(field_text) <= MAX_KEY_BYTES else []
    return RankSave(*map(int, parts)) if len(parts) == 3 and all(p.isdecimal() for p in parts) else None


def jobs_of(names: Iterable[str]) -> set[str]:
    """Job uids that these key names belong to."""
    return {name.split(":")[1] for name in names if name.startswith(KEY_PREFIX) and name.count(":") > 1}


def _of_save(job: str, save: RankSave) -> str:
    return f"{of_job(job)}{save.generation}:{save.step}:{save.rank}:"


def escape_pattern(text: str) -> str:
    """`text` as a pattern that matches itself alone."""
    return "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in text)
