"""Serves admission webhooks over HTTPS.

Listens; run by the composition root. A verdict that cannot be made is answered with an error, and the webhook's failure
policy lets the change in: this server being away or wrong keeps nobody from working.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from surefoot_operator.controller import process_metrics
from surefoot_operator.controller.admission_review import BadReview, Review, Verdict, answered, read_review
from surefoot_operator.controller.http_listener import HttpListener

log = logging.getLogger(__name__)

MOST_BYTES = 8 * 1024 * 1024
"""Of a review: the old and the new object, of 1.5 MiB at most each in etcd, and more as JSON."""
Decide = Callable[[Review], Awaitable[Verdict]]


class AdmissionServer:
    """Answers each of `paths` by its function, until closed."""

    def __init__(self, port: int, context: ssl.SSLContext | None, paths: Mapping[str, Decide]) -> None:
        self._listener, self._paths = HttpListener(port, context), paths

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self) -> None:
        """Listens. Raises OSError if the port is taken."""
        app = web.Application(client_max_size=MOST_BYTES)
        for path in self._paths:
            app.router.add_post(path, self._answer)
        await self._listener.start(app)

    async def close(self) -> None:
        await self._listener.close()

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        try:
            review = read_review(await request.json())
            verdict = await self._paths[path](review)
        except (BadReview, ValueError) as error:
            process_metrics.admission_reviews.labels(path, "unreadable").inc()
            return web.Response(status=400, text=f"{error}\n")
        except web.HTTPException:
            raise  # the body is too large
        except Exception:
            # whatever it was, the failure policy decides instead of a handler that broke
            process_metrics.admission_reviews.labels(path, "failed").inc()
            log.exception("a review of %s failed", path)
            return web.Response(status=500, text="the review failed; the operator's log says why\n")
        process_metrics.admission_reviews.labels(path, "allowed" if verdict.allowed else "refused").inc()
        return web.json_response(answered(review, verdict))
