"""What the API server says, as it says it: objects of one kind in one namespace, each change with the moment it was heard.

A thread of its own reads the watch; tests wait on it and read its history. A server that is away is asked again, and
what changed meanwhile is found by listing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from cluster.api import Api
from cluster.processes import wait

Object = dict[str, Any]

_QUIET_SECONDS = 60
_AGAIN_SECONDS = 0.2
_MOST_KEPT = 50_000


@dataclass(frozen=True)
class Heard:
    """One change: by this machine's clock, ADDED, MODIFIED or DELETED."""

    at: float
    kind: str
    thing: Object

    @property
    def name(self) -> str:
        return str(self.thing["metadata"]["name"])


class Watch:
    """`path` names the collection. `items` is how it stands; `changed` is notified at each change."""

    def __init__(self, api: Api, path: str, changed: threading.Condition) -> None:
        self._api, self._path = api, path
        self._changed = changed
        self._ended = threading.Event()
        self.items: dict[str, Object] = {}
        self.history: deque[Heard] = deque(maxlen=_MOST_KEPT)
        self._listed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch {path}", daemon=True)

    def start(self) -> None:
        """Returns once everything was listed."""
        self._thread.start()
        if not self._listed.wait(30.0):
            raise AssertionError(f"{self._path} could not be listed in 30 s")

    def end(self) -> None:
        """The thread ends with the next word of the server, and with the process at the latest."""
        self._ended.set()

    def heard(self, name: str, since: float = 0.0) -> list[Heard]:
        """Of one object, oldest first."""
        with self._changed:
            return [one for one in self.history if one.name == name and one.at >= since]

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._follow(self._list())
            except (OSError, HTTPException, ValueError, _Expired):  # away, restarted, or a line cut in the middle
                self._ended.wait(_AGAIN_SECONDS)

    def _list(self) -> str:
        body = self._api.call("GET", self._path)
        found = {item["metadata"]["name"]: item for item in body["items"]}
        for name, old in list(self.items.items()):
            if name not in found:
                self._learn("DELETED", old)
        for name, item in found.items():
            known = self.items.get(name)
            if known is None or known["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                self._learn("ADDED" if known is None else "MODIFIED", item)
        self._listed.set()
        return str(body["metadata"]["resourceVersion"])

    def _follow(self, version: str) -> None:
        query = f"{self._path}?watch=1&resourceVersion={version}&timeoutSeconds={_QUIET_SECONDS // 2}"
        for line in self._api.lines(query, _QUIET_SECONDS):
            if line["type"] == "ERROR":
                raise _Expired
            self._learn(line["type"], line["object"])
            if self._ended.is_set():
                return

    def _learn(self, kind: str, thing: Object) -> None:
        with self._changed:
            self.history.append(Heard(time.time(), kind, thing))
            if kind == "DELETED":
                self.items.pop(thing["metadata"]["name"], None)
            else:
                self.items[thing["metadata"]["name"]] = thing
            self._changed.notify_all()


class _Expired(Exception):
    """The server has forgotten that version: list again."""


class Namespace:
    """Jobs, pods and events of one namespace, watched together."""

    def __init__(self, api: Api, name: str) -> None:
        self.api, self.name = api, name
        self.changed = threading.Condition()
        self.jobs = self._watch("/apis/surefoot.dev/v1alpha1", "trainingjobs")
        self.pods = self._watch("/api/v1", "pods")
        self.events = self._watch("/api/v1", "events")

    def start(self) -> Namespace:
        """Makes the namespace unless it is there, and begins to listen."""
        self.api.create(
            "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.name}}
        )
        account = f"/api/v1/namespaces/{self.name}/serviceaccounts/default"
        if not wait(lambda: self.api.answers(account), 30.0):
            raise AssertionError(f"namespace {self.name} got no service account in 30 s")
        for watch in self._watches():
            watch.start()
        return self

    def end(self) -> None:
        for watch in self._watches():
            watch.end()

    def wait(self, what: str, condition: Callable[[], object], seconds: float, said: Callable[[], str] = str) -> None:
        """Looks at each change, and a few times a second for what is no object; fails with `what` and `said()`."""
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"not within {seconds:g} s: {what}\n{said()}"
            with self.changed:
                self.changed.wait(min(left, 0.1))

    def _watches(self) -> Iterator[Watch]:
        yield from (self.jobs, self.pods, self.events)

    def _watch(self, group: str, kind: str) -> Watch:
        return Watch(self.api, f"{group}/namespaces/{self.name}/{kind}", self.changed)
