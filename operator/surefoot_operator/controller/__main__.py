"""Runs `surefoot-operator`, the operator of a cluster, as a kopf operator.

kopf handles signals, startup and cleanup of the process. docs/adr/0005 says what kopf does not do here, and why.

Exits with 0 after SIGTERM or SIGINT, with 1 and a message if it cannot run, with 2 for a setting that is not allowed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from surefoot_operator.errors import OperatorError
from surefoot_operator.optional_dependencies import needing

with needing("surefoot-operator", "operator"):
    import kopf

    from surefoot.errors import ConfigurationError
    from surefoot_operator.controller.cluster_operator import ClusterOperator
    from surefoot_operator.controller.cluster_settings import (
        NAMESPACE_FILE,
        BadSetting,
        ClusterSettings,
        cluster_settings,
    )
    from surefoot_operator.controller.process_setup import begin_collector, begin_logs
    from surefoot_operator.platforms.kubernetes.api_client import Api, connect, loaded

log = logging.getLogger("surefoot_operator.controller")


class OperatorProcess:
    """Starts the operator when kopf starts, stops it when kopf stops, and stops kopf when it ends by itself."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._stopping, self._ended = asyncio.Event(), asyncio.Event()
        self._operator: asyncio.Task[None] | None = None
        self._api: Api | None = None

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT. Raises what the operator ended by."""
        registry = kopf.OperatorRegistry()  # of our own: the default one is shared with whoever imports kopf
        kopf.on.startup(registry=registry)(self._start)
        kopf.on.cleanup(registry=registry)(self._stop)
        kopf.on.login(registry=registry)(self._login)
        api = self._api = await connect(self._settings.kubeconfig)
        try:
            await kopf.operator(
                registry=registry,
                settings=kopf_settings(),
                standalone=True,  # the Lease decides who leads: kopf's peering is no fence
                clusterwide=True,
                # kopf would name itself after its user, who has no name in a container
                identity=cast(Any, "surefoot-operator"),
                stop_flag=self._ended,
            )
        finally:
            await self._stop()  # kopf runs no cleanup where it fails before its startup is over
            await api.close()
        if self._operator is not None:
            self._operator.result()

    async def _start(self, **_: Any) -> None:
        assert self._api is not None, "it is connected before kopf starts"
        operator = ClusterOperator(self._api, self._settings)
        self._operator = asyncio.create_task(operator.run(self._stopping), name="operator")
        self._operator.add_done_callback(lambda _: self._ended.set())

    async def _stop(self, **_: Any) -> None:
        self._stopping.set()
        if self._operator is not None:
            await asyncio.wait((self._operator,))

    async def _login(self, **_: Any) -> kopf.ConnectionInfo:
        return await connection_info(self._settings.kubeconfig)


def kopf_settings() -> kopf.OperatorSettings:
    """Configures kopf to write nothing, to watch nothing and never to end because of the API server."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.request_timeout = 10
    settings.networking.connect_timeout = 3
    settings.networking.error_backoffs = itertools.repeat(5.0)  # of its discovery, which nothing here waits for
    settings.process.ultimate_exiting_timeout = None  # it would kill the process while leases are released
    return settings


async def connection_info(kubeconfig: Path | None) -> kopf.ConnectionInfo:
    """Gives kopf our API server and identity. Raises FabricError."""
    config = await loaded(kubeconfig)
    token = await config.get_api_key_with_prefix("BearerToken")
    return kopf.ConnectionInfo(
        server=config.host,
        ca_path=config.ssl_ca_cert,
        insecure=not config.verify_ssl,
        scheme="Bearer" if token else None,
        token=token.split()[-1] if token else None,
        certificate_path=config.cert_file,
        private_key_path=config.key_file,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    here = NAMESPACE_FILE.read_text(encoding="utf-8").strip() if NAMESPACE_FILE.exists() else ""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        settings = cluster_settings(os.environ, given, here, secrets.token_hex(3))
        begin_logs(settings.log_level, settings.log_format)
    except (BadSetting, ConfigurationError) as error:
        sys.stderr.write(f"surefoot-operator: {error}\n")
        return 2
    begin_collector()
    try:
        asyncio.run(OperatorProcess(settings).run())
    except (OperatorError, OSError, kopf.LoginError) as error:
        log.error("the operator cannot run: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
