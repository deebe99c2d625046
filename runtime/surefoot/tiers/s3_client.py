"""Makes clients of S3 servers.

With time limits, few tries, and each request counted. A tier is opened for each promotion and each listing. Without a
memory of botocore's description of S3 each time parsed it anew, which took longer than uploading a tenth of a GB.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

from surefoot import metrics
from surefoot.settings import PersistentSettings
from surefoot.tiers.parallel_reads import READERS

if TYPE_CHECKING:
    from botocore.loaders import Loader
    from botocore.session import Session
    from mypy_boto3_s3 import S3Client


def session_of() -> Session:
    """A session of its own, with botocore's files shared.

    Credentials may change between two, where they come from the environment.
    """
    session = botocore.session.Session()
    session.register_component("data_loader", _descriptions())
    # of each object that a listing names; parsing them took longer than all the rest of it, and nobody looks at one
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    return session


def client_of(settings: PersistentSettings, session: Session, signs_bodies: bool) -> S3Client:
    """A client with connections of its own.

    With `signs_bodies` each body is hashed for its signature.
    """
    config = Config(
        connect_timeout=3,
        read_timeout=15,
        retries={"mode": "standard", "total_max_attempts": 3},
        max_pool_connections=READERS,
        # botocore's own are sent in a trailer, which other servers often lack: ours goes in a header
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={
            "addressing_style": "path" if settings.endpoint else "auto",
            "payload_signing_enabled": signs_bodies,
        },
    )
    made = session.create_client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region or "us-east-1",
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        verify=settings.ca_bundle or None,
        config=config,
    )
    made.meta.events.register("before-send.s3", _count)
    return cast("S3Client", made)


def in_clear(settings: PersistentSettings) -> bool:
    """Whether no TLS guards what is sent."""
    return settings.endpoint is not None and urlsplit(settings.endpoint).scheme == "http"


def code_of(error: ClientError) -> str:
    """The server's own word for what went wrong."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))


@cache
def _descriptions() -> Loader:
    """Botocore's files, each read once in a process; 12 MB stay in memory."""
    return cast("Loader", botocore.session.Session().get_component("data_loader"))


def _count(request: Any, event_name: str, **_: Any) -> None:
    """Counts each try of a request, as it leaves."""
    told = request.headers.get("amz-sdk-request", b"")
    first = "attempt=1" in (told.decode() if isinstance(told, bytes) else told)
    metrics.s3_requests.labels(event_name.rsplit(".", 1)[-1], "first" if first else "again").inc()
