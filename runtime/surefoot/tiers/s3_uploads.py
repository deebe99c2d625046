"""Sends bodies to S3, hashed no more often than their server needs.

In clear botocore signs the SHA-256 of every body, and hashing it cost both ends more than sending it. A large body goes
without once the server has shown that it checks the CRC-32, which is signed with the other headers: an answer names it.
A body whose own answer does not, or that is refused, is sent again, signed: no store loses its guard unseen.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from surefoot import metrics
from surefoot.tiers.bodies import Body
from surefoot.tiers.s3_client import code_of

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

log = logging.getLogger(__name__)

_SMALL_BYTES = 64 * 1024
_REFUSED = {
    *("AccessDenied", "403", "InvalidRequest", "InvalidArgument", "InvalidDigest", "400"),
    *("SignatureDoesNotMatch", "XAmzContentSHA256Mismatch", "NotImplemented", "501"),
}
"""What servers answer that want every body signed; some of it also says that nobody may write."""
_signing: set[str] = set()
"""Servers of this process that took a body only signed, by endpoint: the tier is opened anew for each promotion."""
_lock = threading.Lock()
_NOT_CHECKED = "its answer names no checksum"


class Uploads:
    """Writes objects, hashing large bodies only where it must.

    One client signs bodies, a second one, opened when it is wanted, does not. `put` may be called by several threads at once.
    """

    def __init__(self, client: S3Client, endpoint: str, open_unsigned: Callable[[], S3Client] | None) -> None:
        """`open_unsigned` is None where `client` signs no bodies itself, as over TLS."""
        self._client = client
        self._endpoint = endpoint
        self._open = open_unsigned
        self._unsigned: S3Client | None = None
        self._is_checked = False

    def put(self, body: Body, told: Mapping[str, Any]) -> None:
        """Writes an object.

        Args:
            body: Its bytes.
            told: Further arguments of `PutObject`.
        """
        told = {**told, "ChecksumCRC32": body.checksum()}
        # a small body goes as bytes: for one that is read, botocore first waits for the server's leave
        is_small = len(body) <= _SMALL_BYTES
        refusal = None if is_small or not self._is_checked else self._sent_unsigned(body, told)
        if refusal == "":
            return
        if refusal == _NOT_CHECKED:
            # the unsigned request created the object: "only if it is not there" would refuse the signed bytes
            told.pop("IfNoneMatch", None)
        body.seek(0)
        answer = self._client.put_object(Body=body.whole() if is_small else body, **told)  # type: ignore[arg-type]
        self._is_checked = answer.get("ChecksumCRC32") == told["ChecksumCRC32"]
        if refusal:
            self._note(refusal)

    def close(self) -> None:
        if self._unsigned is not None:
            self._unsigned.close()

    def _sent_unsigned(self, body: Body, told: Mapping[str, Any]) -> str | None:
        """Empty: it is there and was checked. None: not tried. Else why it has to be sent signed."""
        client = self._unsigned_client()
        if client is None:
            return None
        body.seek(0)
        try:
            answer = client.put_object(Body=body, **told)  # type: ignore[arg-type]
        except ClientError as error:
            if code_of(error) not in _REFUSED:
                raise
            return code_of(error)
        return "" if answer.get("ChecksumCRC32") == told["ChecksumCRC32"] else _NOT_CHECKED

    def _unsigned_client(self) -> S3Client | None:
        if self._open is None or self._endpoint in _signing:
            return None
        with _lock:
            if self._unsigned is None:
                self._unsigned = self._open()
            return self._unsigned

    def _note(self, refusal: str) -> None:
        metrics.fallbacks.labels("s3_body_signed").inc()
        with _lock:
            is_new = self._endpoint not in _signing
            _signing.add(self._endpoint)
        if is_new:
            log.warning("%s takes a body only signed (%s): each is hashed for it from now on", self._endpoint, refusal)
