"""Mirrors all API objects of one kind by a list and a watch.

Owned by `cluster_cache`. The results of the operator's own writes are applied at once, so that an observation after a
write includes it.
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


# ---- trimmed objects -------------------------------------------------------------------------------------------------
# Reduces API objects to the fields that the operator reads. Pure; called by `cluster_cache` for every object that it
# stores. A worker's pod as sent by the API server takes 45 kB of memory, most of it managedFields and the pod template;
# ten thousand of them took half a gigabyte.

Object = dict[str, Any]

_METADATA_FIELDS = (
    "name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "ownerReferences", "labels",
)  # fmt: skip
_CONDITION_FIELDS = ("type", "status", "reason", "message", "lastTransitionTime")
_POD_CONDITIONS = ("Ready", "PodScheduled", "DisruptionTarget")
_CONTAINER_STATUS_FIELDS = ("name", "state", "containerID")
_SHARED_TEXT_FIELDS = frozenset(
    ("namespace", "creationTimestamp", "nodeName", "phase", "type", "status", "reason", "lastTransitionTime")
)
"""Fields whose values are equal in thousands of objects; each distinct text is stored once."""


def trim_worker_pod(pod: Object) -> Object:
    """Returns a worker's pod with only the fields that the operator reads."""
    trimmed = _trim_pod(pod, ("nodeName",))
    labels = trimmed["metadata"].get("labels") or {}
    own_labels = {intern(name): intern(value) for name, value in labels.items() if name.startswith(GROUP)}
    trimmed["metadata"]["labels"] = own_labels
    return trimmed


def trim_server_pod(pod: Object) -> Object:
    """Returns a memory server's pod with only the fields that the operator reads."""
    trimmed = _trim_pod(pod, ("nodeName", "containers"))
    if "containers" in trimmed["spec"]:
        trimmed["spec"]["containers"] = [
            _select_fields(container, ("name", "ports")) for container in trimmed["spec"]["containers"]
        ]
    annotations = pod["metadata"].get("annotations") or {}
    if api_objects.MEMORY_SERVER_TLS in annotations:
        trimmed["metadata"]["annotations"] = {api_objects.MEMORY_SERVER_TLS: annotations[api_objects.MEMORY_SERVER_TLS]}
    return trimmed


def trim_node(node: Object) -> Object:
    """Returns a node with only the fields that the operator reads."""
    return {
        "metadata": _trim_metadata(node),
        "spec": _select_fields(node.get("spec") or {}, ("taints", "unschedulable")),
        "status": _trim_conditions(node.get("status") or {}),
    }


def trim_lease(lease: Object) -> Object:
    """Returns a lease with only its metadata and the time of its last renewal."""
    return {"metadata": _trim_metadata(lease), "spec": _select_fields(lease.get("spec") or {}, ("renewTime",))}


def trim_managed_fields(item: Object) -> Object:
    """Returns an object without managedFields, the record of which client wrote which field."""
    if "managedFields" not in item["metadata"]:
        return item
    metadata = {name: value for name, value in item["metadata"].items() if name != "managedFields"}
    return {**item, "metadata": metadata}


def _trim_pod(pod: Object, spec_fields: Collection[str]) -> Object:
    status = pod.get("status") or {}
    trimmed_status = {
        **_select_fields(status, ("phase", "reason", "message", "podIP")),
        **_trim_conditions(status, _POD_CONDITIONS),
    }
    for name in ("initContainerStatuses", "containerStatuses"):
        if name in status:
            trimmed_status[name] = [
                _select_fields(container_status, _CONTAINER_STATUS_FIELDS) for container_status in status[name]
            ]
    return {
        "metadata": _trim_metadata(pod),
        "spec": _select_fields(pod.get("spec") or {}, spec_fields),
        "status": trimmed_status,
    }


def _trim_conditions(status: Object, types: Collection[str] = ()) -> Object:
    """Returns the conditions of these types, or all, without the times that every heartbeat changes."""
    if "conditions" not in status:
        return {}
    conditions = (condition for condition in status["conditions"] if not types or condition["type"] in types)
    return {"conditions": [_select_fields(condition, _CONDITION_FIELDS) for condition in conditions]}


def _trim_metadata(item: Object) -> Object:
    return _select_fields(item["metadata"], _METADATA_FIELDS)


def _select_fields(mapping: Mapping[str, Any], names: Collection[str]) -> Object:
    return {
        name: intern(mapping[name]) if name in _SHARED_TEXT_FIELDS and type(mapping[name]) is str else mapping[name]
        for name in names
        if name in mapping
    }


# ---- watched objects -------------------------------------------------------------------------------------------------

OnEvent = Callable[[Object | None, Object | None], None]
"""Called with the old and the new state of one object; None: it does not exist."""
TrimFunction = Callable[[Object], Object]
"""Returns an object with only the fields to store."""

WATCH_SECONDS = 30
"""Time after which the server ends each watch; a connection that broke unnoticed is detected by then."""
EVENT_TIMEOUT_SECONDS = WATCH_SECONDS + 5.0
"""Time without any event after which a watch's connection counts as broken."""
MAX_AGE_SECONDS = 45.0
"""Time without contact to the server after which the mirrored objects count as out of date."""
PAGE_OBJECTS = 500
"""Objects in one page of a list."""
NOT_SERVED_RETRY_SECONDS = 10.0
"""Least time between two requests for an optional kind that is not served; the longest is twice that."""
_BACKOFF = Backoff(0.1, 2.0)
_MAX_TOMBSTONES = 4096
"""UIDs of deleted objects that are remembered, the newest."""
_MIN_WATCH_SECONDS = 1.0
"""A watch that ends sooner than this is followed by a pause of this length."""


class _WatchExpired(Exception):
    """The watch cannot be continued from its resourceVersion; the objects must be listed again."""


class WatchedObjects:
    """Mirrors the objects of one kind in `items`, by namespace and name, while `run` runs.

    Args:
        api: The API server.
        path: API path of the kind.
        selector: Label selector of the objects; empty: all.
        on_event: Called in the event loop after each change.
        optional: Whether the server may not serve this kind, or not let this operator watch it, without a fault.
        trim: Returns an object with only the fields to store.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        selector: str,
        on_event: OnEvent,
        optional: bool = False,
        trim: TrimFunction = trim_managed_fields,
    ) -> None:
        self.path = path
        self.items: dict[tuple[str, str], Object] = {}
        self.has_listed, self.has_answered = asyncio.Event(), asyncio.Event()
        """Events that are set once the kind was listed, and once the server has answered, even with an error."""
        self.answered_seconds = time.monotonic()
        """Monotonic time of the last answer, even an error, which a restart of the operator would not change."""
        self.last_contact_seconds = self.contact_since_seconds = time.monotonic()
        """Monotonic times of the last event or list, and of the first one since the last interruption."""
        self.rejection = ""
        """Why the server does not let this operator watch the kind; empty: it does, or has not answered yet."""
        self._optional, self._trim = optional, trim
        self._was_interrupted = False
        self._api, self._selector, self._on_event = api.without_reports() if optional else api, selector, on_event
        self._list_version = ""
        self._deleted_uids: OrderedDict[str, None] = OrderedDict()
        self._uids_of_own_writes: set[str] = set()
        """UIDs of objects that own writes returned since the list under way began; its pages may lack them."""

    @property
    def is_synced(self) -> bool:
        """Whether `items` was listed and the server was in contact recently, so that `items` is up to date."""
        return self.has_listed.is_set() and self.age_seconds() < MAX_AGE_SECONDS

    def age_seconds(self) -> float:
        """Returns the seconds since the last event or list."""
        return time.monotonic() - self.last_contact_seconds

    async def run(self) -> None:
        """Lists and watches until cancelled, with backoff after failures."""
        failures = 0
        while True:
            try:
                if not self._list_version:
                    await self._list_all()
                start_seconds = time.monotonic()
                await self._watch_until_closed()
                failures = 0
                if time.monotonic() - start_seconds < _MIN_WATCH_SECONDS:
                    await asyncio.sleep(_MIN_WATCH_SECONDS)  # no busy loop if a proxy ends each watch at once
            except _WatchExpired:
                self._list_version = ""  # the server requests a new list; do it without a pause
            except PlatformError as error:
                self._was_interrupted = True
                if self._optional and isinstance(error, ApiError) and error.code in (403, 404):
                    self._record_unavailable(error)
                    await asyncio.sleep(NOT_SERVED_RETRY_SECONDS * (1 + random.random()))
                    continue
                if isinstance(error, ApiError):
                    self.rejection, self.answered_seconds = str(error), time.monotonic()
                    self.has_answered.set()
                metrics.watch_failures.labels(self.path.rsplit("/", 1)[-1]).inc()
                log.warning("watching %s failed and is retried: %s", self.path, error)
                # jitter: many operators must not reconnect to a restarted server at the same moment
                failures += 1
                await asyncio.sleep(_BACKOFF.wait_seconds(failures, random.random()))

    def apply_write_result(self, item: Object) -> None:
        """Stores an object that an own write returned, unless it is outdated."""
        key, old = _key_of(item), self.items.get(_key_of(item))
        # an object that is older than the watch and not in `items` was deleted since: storing it would revive it
        known_version = int(self._list_version or 0) if old is None else _version_of(old)
        if _uid_of(item) in self._deleted_uids or known_version >= _version_of(item):
            return
        self._uids_of_own_writes.add(_uid_of(item))
        self.items[key] = trimmed = self._trim(item)
        self._on_event(old, trimmed)

    def remove_deleted(self, namespace: str, name: str, uid: str) -> None:
        """Removes an object that this operator has deleted; later events about it are ignored."""
        self._deleted_uids[uid] = None
        while len(self._deleted_uids) > _MAX_TOMBSTONES:
            self._deleted_uids.popitem(last=False)
        old = self.items.get((namespace, name))
        if old is not None and _uid_of(old) == uid:
            del self.items[namespace, name]
            self._on_event(old, None)

    def _record_unavailable(self, error: ApiError) -> None:
        """Records why an optional kind cannot be watched.

        Drops its objects if the kind does not exist (404). If the operator may not watch it (403), they may still
        exist.
        """
        remedy = (
            "install its CustomResourceDefinition"
            if error.code == 404
            else "give the operator the permission to watch it"
        )
        rejection = f"{error}; {remedy}"
        if rejection != self.rejection:
            log.warning(
                "cannot watch %s: %s; trying again in %.0f s or more", self.path, rejection, NOT_SERVED_RETRY_SECONDS
            )
        self.rejection, self._list_version = rejection, ""
        for key in list(self.items) if error.code == 404 else ():
            self._on_event(self.items.pop(key), None)

    async def _list_all(self) -> None:
        listed_items: dict[tuple[str, str], Object] = {}
        self._uids_of_own_writes.clear()
        query: dict[str, str | int] = {"limit": PAGE_OBJECTS, **self._selector_query()}
        while True:
            page = await self._api.get(self.path, query)
            existing_items = (item for item in page["items"] if _uid_of(item) not in self._deleted_uids)
            listed_items |= {_key_of(item): self._trim(item) for item in existing_items}
            continue_token = page["metadata"].get("continue")
            if not continue_token:
                break
            query["continue"] = continue_token
        self._list_version = page["metadata"]["resourceVersion"]
        self._record_contact()
        # a newer version alone does not prove that an object exists: after the API server's store was restored from a
        # backup, all mirrored objects are newer than the list
        newer = {
            key
            for key, item in self.items.items()
            if _uid_of(item) in self._uids_of_own_writes and _version_of(item) > int(self._list_version)
        }
        self._uids_of_own_writes.clear()
        for key in [key for key in self.items if key not in listed_items and key not in newer]:
            self._on_event(self.items.pop(key), None)
        for key, item in listed_items.items():
            if key not in newer:
                self._store_if_newer(item)
        self.has_listed.set()
        self.has_answered.set()

    async def _watch_until_closed(self) -> None:
        query: dict[str, str | int] = {
            "resourceVersion": self._list_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_SECONDS,
            **self._selector_query(),
        }
        try:
            async with aclosing(self._api.watch(self.path, query, EVENT_TIMEOUT_SECONDS)) as events:
                async for event in events:
                    self._record_contact()
                    self._apply_event(event["type"], event.get("object", {}))
        except ApiError as error:
            if error.code == 410:
                raise _WatchExpired from error
            raise

    def _record_contact(self) -> None:
        self.last_contact_seconds = self.answered_seconds = time.monotonic()
        self.rejection = ""
        if self._was_interrupted:
            self.contact_since_seconds, self._was_interrupted = self.last_contact_seconds, False

    def _apply_event(self, kind: str, item: Object) -> None:
        if kind == "ERROR":
            if item.get("code") == 410:
                raise _WatchExpired
            self._list_version = ""
            raise PlatformError(f"the API server ended the watch of {self.path}: {item.get('message')}")
        if kind == "OPEN":
            return
        self._list_version = item["metadata"]["resourceVersion"]
        if kind == "DELETED":
            old = self.items.get(_key_of(item))
            if old is not None and _uid_of(old) == _uid_of(item):
                del self.items[_key_of(item)]
                self._on_event(old, None)
        elif kind != "BOOKMARK" and _uid_of(item) not in self._deleted_uids:
            self._store_if_newer(self._trim(item))

    def _store_if_newer(self, item: Object) -> None:
        old = self.items.get(_key_of(item))
        if old is None or _version_of(old) < _version_of(item) or _uid_of(old) != _uid_of(item):
            self.items[_key_of(item)] = item
            self._on_event(old, item)

    def _selector_query(self) -> dict[str, str | int]:
        return {"labelSelector": self._selector} if self._selector else {}


def _key_of(item: Object) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _uid_of(item: Object) -> str:
    return str(item["metadata"]["uid"])


def _version_of(item: Object) -> int:
    # resource versions are ordered numbers in every server with etcd; Kubernetes 1.35 and later guarantee it
    return int(item["metadata"]["resourceVersion"])
