"""Runs `surefoot-operator`, the operator of a cluster, as a kopf operator.

kopf owns the process: signals, startup and cleanup. docs/adr/0005 explains which parts of kopf are not used.

Exit codes: 0 after SIGTERM or SIGINT, 1 with a message if the operator cannot run, 2 for an invalid setting.
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
from surefoot_operator.optional_dependencies import require_extra

with require_extra("surefoot-operator", "operator"):
    import kopf

    from surefoot.errors import ConfigurationError
    from surefoot_operator.controller.cluster_operator import ClusterOperator
    from surefoot_operator.controller.cluster_settings import (
        NAMESPACE_FILE,
        ClusterSettings,
        InvalidSetting,
        read_cluster_settings,
    )
    from surefoot_operator.controller.process_setup import configure_gc, configure_logs
    from surefoot_operator.platforms.kubernetes.api_client import Api, connect_to_api_server, load_configuration

log = logging.getLogger("surefoot_operator.controller")


class OperatorProcess:
    """Starts and stops the operator with kopf, and stops kopf when the operator ends by itself."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._stop_requested, self._operator_ended = asyncio.Event(), asyncio.Event()
        self._operator: asyncio.Task[None] | None = None
        self._api: Api | None = None

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT; raises the operator's error if it ended by one."""
        registry = kopf.OperatorRegistry()  # not the default one, which other code that imports kopf shares
        kopf.on.startup(registry=registry)(self._start_operator)
        kopf.on.cleanup(registry=registry)(self._stop_operator)
        kopf.on.login(registry=registry)(self._kopf_credentials)
        api = self._api = await connect_to_api_server(self._settings.kubeconfig)
        try:
            await kopf.operator(
                registry=registry,
                settings=kopf_settings(),
                standalone=True,  # the Lease decides who leads: kopf's peering is no fence
                clusterwide=True,
                # kopf would use the name of its user, who has no name in a container.
                identity=cast(Any, "surefoot-operator"),
                stop_flag=self._operator_ended,
            )
        finally:
            await self._stop_operator()  # kopf skips its cleanup if it fails during startup
            await api.close()
        if self._operator is not None:
            self._operator.result()

    async def _start_operator(self, **_: Any) -> None:
        assert self._api is not None, "it is connected before kopf starts"
        operator = ClusterOperator(self._api, self._settings)
        self._operator = asyncio.create_task(operator.run(self._stop_requested), name="operator")
        self._operator.add_done_callback(lambda _: self._operator_ended.set())

    async def _stop_operator(self, **_: Any) -> None:
        self._stop_requested.set()
        if self._operator is not None:
            await asyncio.wait((self._operator,))

    async def _kopf_credentials(self, **_: Any) -> kopf.ConnectionInfo:
        return await kopf_connection_info(self._settings.kubeconfig)


def kopf_settings() -> kopf.OperatorSettings:
    """Configures kopf to write nothing, watch nothing and survive any failure of the API server."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.request_timeout = 10
    settings.networking.connect_timeout = 3
    settings.networking.error_backoffs = itertools.repeat(5.0)  # for kopf's discovery, which nothing here waits for
    settings.process.ultimate_exiting_timeout = None  # otherwise kopf kills the process before leases are released
    return settings


async def kopf_connection_info(kubeconfig: Path | None) -> kopf.ConnectionInfo:
    """Returns the API server and credentials for kopf. Raises PlatformError."""
    config = await load_configuration(kubeconfig)
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
    """Runs the operator and returns its exit code."""
    pod_namespace = NAMESPACE_FILE.read_text(encoding="utf-8").strip() if NAMESPACE_FILE.exists() else ""
    try:
        command_arguments = sys.argv[1:] if arguments is None else arguments
        settings = read_cluster_settings(os.environ, command_arguments, pod_namespace, secrets.token_hex(3))
        configure_logs(settings.log_level, settings.log_format)
    except (InvalidSetting, ConfigurationError) as error:
        sys.stderr.write(f"surefoot-operator: {error}\n")
        return 2
    configure_gc()
    try:
        asyncio.run(OperatorProcess(settings).run())
    except (OperatorError, OSError, kopf.LoginError) as error:
        log.error("the operator cannot run: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
