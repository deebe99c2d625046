"""Lists and watches all API objects of one kind.

Touches the network through `api_client`; owned by `cluster_cache`. Results of our own writes are applied at once, so that an
observation after a write includes it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing
from sys import intern
from typing import Any

from surefoot.protocol.timeouts import Backoff
from surefoot_operator import metrics
from surefoot_operator.api.spec import GROUP
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError

log = logging.getLogger(__name__)


# ---- fields that are kept of an object -------------------------------------------------------------------------------
# Reduces API objects to the fields that anything here reads. Pure; called by `cluster_cache` for whatever it lists,
# watches or learns. A worker's pod as the API server tells it takes 45 kB of memory, most of it managedFields and the
# template that the job has too; ten thousand of them were half a gigabyte.

Object = dict[str, Any]

_IDENTITY = (
    "name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "ownerReferences", "labels",
)  # fmt: skip
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")
_POD_CONDITIONS = ("Ready", "PodScheduled", "DisruptionTarget")
_CONTAINER_STATUS = ("name", "state", "containerID")
_OF_MANY = frozenset(
    ("namespace", "creationTimestamp", "nodeName", "phase", "type", "status", "reason", "lastTransitionTime")
)
"""What thousands of objects have in common: each such text is kept once."""


def trim_worker_pod(found: Object) -> Object:
    """Keeps what is read of a worker's pod."""
    kept = _pod(found, ("nodeName",))
    given = kept["metadata"].get("labels") or {}
    own = {intern(name): intern(value) for name, value in given.items() if name.startswith(GROUP)}
    kept["metadata"]["labels"] = own
    return kept


def trim_server_pod(found: Object) -> Object:
    """Keeps what is read of a holder's pod."""
    kept = _pod(found, ("nodeName", "containers"))
    if "containers" in kept["spec"]:
        kept["spec"]["containers"] = [_chosen(one, ("name", "ports")) for one in kept["spec"]["containers"]]
    annotations = found["metadata"].get("annotations") or {}
    if api_objects.HOLDER_TLS in annotations:
        kept["metadata"]["annotations"] = {api_objects.HOLDER_TLS: annotations[api_objects.HOLDER_TLS]}
    return kept


def trim_node(found: Object) -> Object:
    """Keeps what is read of a node."""
    return {
        "metadata": _identity(found),
        "spec": _chosen(found.get("spec") or {}, ("taints", "unschedulable")),
        "status": _conditions(found.get("status") or {}),
    }


def trim_lease(found: Object) -> Object:
    """Keeps which lease it is, and its last renewal."""
    return {"metadata": _identity(found), "spec": _chosen(found.get("spec") or {}, ("renewTime",))}


def trim_managed_fields(found: Object) -> Object:
    """Keeps everything but who wrote which field."""
    if "managedFields" not in found["metadata"]:
        return found
    metadata = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    return {**found, "metadata": metadata}


def _pod(found: Object, of_spec: Collection[str]) -> Object:
    status = found.get("status") or {}
    kept = {**_chosen(status, ("phase", "reason", "message", "podIP")), **_conditions(status, _POD_CONDITIONS)}
    for name in ("initContainerStatuses", "containerStatuses"):
        if name in status:
            kept[name] = [_chosen(one, _CONTAINER_STATUS) for one in status[name]]
    return {"metadata": _identity(found), "spec": _chosen(found.get("spec") or {}, of_spec), "status": kept}


def _conditions(status: Object, types: Collection[str] = ()) -> Object:
    """Those of these types, or all; without the moments that each heartbeat writes."""
    if "conditions" not in status:
        return {}
    wanted = (one for one in status["conditions"] if not types or one["type"] in types)
    return {"conditions": [_chosen(one, _CONDITION) for one in wanted]}


def _identity(found: Object) -> Object:
    return _chosen(found["metadata"], _IDENTITY)


def _chosen(found: Mapping[str, Any], names: Collection[str]) -> Object:
    return {
        name: intern(found[name]) if name in _OF_MANY and type(found[name]) is str else found[name]
        for name in names
        if name in found
    }


# ---- watched objects -------------------------------------------------------------------------------------------------

OnEvent = Callable[[Object | None, Object | None], None]
"""Old and new state of one object; None: it is not there."""
TrimFunction = Callable[[Object], Object]

WATCH_SECONDS = 30
"""The server ends each watch after this: one that was cut without a word is noticed by then, not by TCP's patience."""
SILENCE_SECONDS = WATCH_SECONDS + 5.0
STALE_SECONDS = 45.0
PAGE = 500
NOT_SERVED_SECONDS = 10.0
"""An optional kind that is not served is asked for again after so long, and up to twice that."""
_BACKOFF = Backoff(0.1, 2.0)
_MAX_TOMBSTONES = 4096
_SHORT_SECONDS = 1.0


class _WatchExpired(Exception):
    """The watch cannot be continued from where it stood."""


class WatchedObjects:
    """Mirrors objects of one kind in `items`, by namespace and name.

    `run` until cancelled; `heard` is called in the loop after each change. `optional`: the server may not serve this
    kind, or not let us see it, and may later: that is no fault. `kept`: reduces an object to what is kept.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        selector: str,
        heard: OnEvent,
        optional: bool = False,
        kept: TrimFunction = trim_managed_fields,
    ) -> None:
        self.path = path
        self.items: dict[tuple[str, str], Object] = {}
        self.synced, self.answered = asyncio.Event(), asyncio.Event()
        """Set once it was listed; once the server has answered at all, be it with a refusal."""
        self.answered_at = time.monotonic()
        """When the server last answered: it may refuse, which no restart of ours would change."""
        self.last_contact_seconds = self.contact_since_seconds = time.monotonic()
        """When the server was last heard of, and since when it is without a break."""
        self.rejection = ""
        """Why this kind is not served to us; empty: it is, for all that is known."""
        self._optional, self._kept = optional, kept
        self._broken = False
        self._api, self._selector, self._on_event = api.unreported() if optional else api, selector, heard
        self._version = ""
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._learned: set[str] = set()
        """Uids of what was learned since the listing under way began: its pages may be from before."""

    @property
    def is_synced(self) -> bool:
        """Whether `items` is listed and the server was heard since."""
        return self.synced.is_set() and self.age_seconds() < STALE_SECONDS

    def age_seconds(self) -> float:
        """Seconds since the server was last heard."""
        return time.monotonic() - self.last_contact_seconds

    async def run(self) -> None:
        """Lists and watches until cancelled, with backoff after failures."""
        failures = 0
        while True:
            try:
                if not self._version:
                    await self._list()
                begin = time.monotonic()
                await self._watch()
                failures = 0
                if time.monotonic() - begin < _SHORT_SECONDS:
                    await asyncio.sleep(_SHORT_SECONDS)  # something between ends watches at once: no busy loop
            except _WatchExpired:
                self._version = ""  # listed anew at once: the server told us to
            except PlatformError as error:
                self._broken = True
                if self._optional and isinstance(error, ApiError) and error.code in (403, 404):
                    self._without(error)
                    await asyncio.sleep(NOT_SERVED_SECONDS * (1 + random.random()))
                    continue
                if isinstance(error, ApiError):
                    self.rejection, self.answered_at = str(error), time.monotonic()
                    self.answered.set()
                metrics.watch_failures.labels(self.path.rsplit("/", 1)[-1]).inc()
                log.warning("%s; trying again", error)
                # jitter: many operators must not come back to a restarted server at one moment
                failures += 1
                await asyncio.sleep(_BACKOFF.seconds(failures, random.random()))

    def apply_write_result(self, found: Object) -> None:
        """Applies an object that our own write returned, unless it is outdated."""
        key, old = _key(found), self.items.get(_key(found))
        # what the watch has passed and does not hold has ended meanwhile: learning it would raise a ghost
        known = int(self._version or 0) if old is None else _version(old)
        if _uid(found) in self._forgotten or known >= _version(found):
            return
        self._learned.add(_uid(found))
        self.items[key] = kept = self._kept(found)
        self._on_event(old, kept)

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """Removes an object that we deleted; late events cannot restore it."""
        self._forgotten[uid] = None
        while len(self._forgotten) > _MAX_TOMBSTONES:
            self._forgotten.popitem(last=False)
        old = self.items.get((namespace, name))
        if old is not None and _uid(old) == uid:
            del self.items[namespace, name]
            self._on_event(old, None)

    def _without(self, error: ApiError) -> None:
        """Nothing of this kind is there where nobody serves it; where we may not look, what was seen may be."""
        why = "is its CustomResourceDefinition installed?" if error.code == 404 else "may the operator watch it?"
        refusal = f"{error}; {why}"
        if refusal != self.rejection:
            log.warning("%s Asked again every %.0f s or more", refusal, NOT_SERVED_SECONDS)
        self.rejection, self._version = refusal, ""
        for key in list(self.items) if error.code == 404 else ():
            self._on_event(self.items.pop(key), None)

    async def _list(self) -> None:
        found: dict[tuple[str, str], Object] = {}
        self._learned.clear()
        query: dict[str, str | int] = {"limit": PAGE, **self._select()}
        while True:
            page = await self._api.get(self.path, query)
            there = (item for item in page["items"] if _uid(item) not in self._forgotten)
            found |= {_key(item): self._kept(item) for item in there}
            following = page["metadata"].get("continue")
            if not following:
                break
            query["continue"] = following
        self._version = page["metadata"]["resourceVersion"]
        self._record_contact()
        # newer than the list alone would not do: where a store was restored, everything known is newer, and a ghost
        newer = {
            key
            for key, item in self.items.items()
            if _uid(item) in self._learned and _version(item) > int(self._version)
        }
        self._learned.clear()
        for key in [key for key in self.items if key not in found and key not in newer]:
            self._on_event(self.items.pop(key), None)
        for key, item in found.items():
            if key not in newer:
                self._take(item)
        self.synced.set()
        self.answered.set()

    async def _watch(self) -> None:
        query: dict[str, str | int] = {
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_SECONDS,
            **self._select(),
        }
        try:
            async with aclosing(self._api.watch(self.path, query, SILENCE_SECONDS)) as events:
                async for event in events:
                    self._record_contact()
                    self._event(event["type"], event.get("object", {}))
        except ApiError as error:
            if error.code == 410:
                raise _WatchExpired from error
            raise

    def _record_contact(self) -> None:
        self.last_contact_seconds = self.answered_at = time.monotonic()
        self.rejection = ""
        if self._broken:
            self.contact_since_seconds, self._broken = self.last_contact_seconds, False

    def _event(self, kind: str, found: Object) -> None:
        if kind == "ERROR":
            if found.get("code") == 410:
                raise _WatchExpired
            self._version = ""
            raise PlatformError(f"the watch of {self.path} was ended: {found.get('message')}")
        if kind == "OPEN":
            return
        self._version = found["metadata"]["resourceVersion"]
        if kind == "DELETED":
            old = self.items.get(_key(found))
            if old is not None and _uid(old) == _uid(found):
                del self.items[_key(found)]
                self._on_event(old, None)
        elif kind != "BOOKMARK" and _uid(found) not in self._forgotten:
            self._take(self._kept(found))

    def _take(self, found: Object) -> None:
        old = self.items.get(_key(found))
        if old is None or _version(old) < _version(found) or _uid(old) != _uid(found):
            self.items[_key(found)] = found
            self._on_event(old, found)

    def _select(self) -> dict[str, str | int]:
        return {"labelSelector": self._selector} if self._selector else {}


def _key(found: Object) -> tuple[str, str]:
    return found["metadata"].get("namespace", ""), found["metadata"]["name"]


def _uid(found: Object) -> str:
    return str(found["metadata"]["uid"])


def _version(found: Object) -> int:
    # ordered numbers in every server that keeps them in etcd, and promised to be since Kubernetes 1.35
    return int(found["metadata"]["resourceVersion"])
