"""Validates a job's pod template by a server-side dry run.

Without strict validation the server silently drops a field that does not exist, and a job would run without its limits
or tolerations. Owned by `platform`; touches the network through `api_writes`.
"""

from __future__ import annotations

import logging
from typing import Any

from surefoot_operator.platforms.kubernetes import api_writes
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_errors import ApiRefused, ApiSilent

log = logging.getLogger(__name__)

_UNSUPPORTED = "does not support dry run"
"""Of an admission webhook with side effects. The server says 400 then, and nothing of the pod is wrong."""
_ANSWERED = (403, 409)
"""Whoever answers so has read the pod and found no fault in it."""


class TemplateDryRun:
    """Validates one job's template once for each generation of its spec.

    Without an answer it tries again with the next pod.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._proved = 0
        self._wrong: tuple[int, ApiRefused] | None = None

    async def give(self, namespace: str, pod: dict[str, Any], generation: int) -> None:
        """Validates a pod. Raises ApiRefused, lasting, if it is invalid.

        One call at a time.
        """
        if self._wrong is not None and self._wrong[0] == generation:
            raise self._wrong[1]
        if self._proved == generation:
            return
        try:
            await api_writes.try_pod(self._api, namespace, pod)
        except ApiSilent:
            return  # the pod itself is asked for then: a webhook that only hangs on dry runs keeps no job from beginning
        except ApiRefused as error:
            if error.lasting and _UNSUPPORTED not in str(error):
                self._wrong = generation, error
                raise
            if not error.lasting and error.code not in _ANSWERED:
                return  # a server in trouble says nothing of the pod; it is asked again with the next
            if error.lasting:
                log.warning("creating pods of %s without validation, the dry run failed: %s", namespace, error)
        self._proved = generation
