"""The SageMaker HyperPod client against the server of its own tests, which keeps everything in memory, once.

The vendor's daemon is not public; this server is what the client's source distribution tests with.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from bench.systems.dcp import DcpThread

PORT = 9202
PEERS = "build/bench/peers"
"""Where the client's source distribution was unpacked."""
START_SECONDS = 20.0
SERVE = "import sys, uvicorn; sys.path.insert(0, sys.argv[1]); from membrain_server import app; uvicorn.run(app, host='127.0.0.1', port=int(sys.argv[2]), log_level='warning')"


class SageMaker(DcpThread):
    def prepare(self) -> None:
        super().prepare()
        sources = sorted(Path(PEERS).glob("amzn_sagemaker_checkpointing-*/tests/local_tests"))
        if not sources:
            raise FileNotFoundError(f"its test server is not in {PEERS}: `python -m bench checkpoint` fetches it")
        self._server = subprocess.Popen([sys.executable, "-c", SERVE, str(sources[-1]), str(PORT)])
        _wait_for(f"http://127.0.0.1:{PORT}/health", self._server)
        client = importlib.import_module("amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client")
        where = importlib.import_module("amzn_sagemaker_checkpointing.config.in_memory_client").InMemoryClientConfig(
            base_url=f"http://127.0.0.1:{PORT}", log_requests=False
        )
        made = client.InMemoryCheckpointClient.__init__

        def with_our_server(self: Any, *given: Any, config: Any = None, **named: Any) -> None:
            made(self, *given, config=config or where, **named)

        client.InMemoryCheckpointClient.__init__ = with_our_server
        files = importlib.import_module("amzn_sagemaker_checkpointing.checkpointing.filesystem")
        settings = importlib.import_module("amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config")
        self._writer, self._reader = files.SageMakerTieredStorageWriter, files.SageMakerTieredStorageReader
        self._settings = settings.SageMakerCheckpointConfig(namespace="bench", world_size=1)

    def begin(self, step: int) -> None:
        self.finish()
        self._step = step
        writer = self._writer(checkpoint_config=self._settings, step=step)
        answer = dcp.async_save(self.program.state(), storage_writer=writer)
        self._upload = getattr(answer, "upload_completion", answer)

    def incomplete(self) -> list[str]:
        """Its writer logs a save that its server did not take and goes on, so the server is asked."""
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/cp/checkpoints/bench/latest") as answer:
            newest = json.load(answer)
        return [] if self._step in newest else [f"step {self._step} is not on the server, which has {newest}"]

    def load(self) -> None:
        state = self.program.state()
        dcp.load(state, storage_reader=self._reader(checkpoint_config=self._settings, step=self._step))

    def close(self) -> None:
        self._server.kill()
        self._server.wait()
        super().close()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the test server ended with code {server.returncode}")
        try:
            urllib.request.urlopen(url).close()
        except urllib.error.URLError:
            time.sleep(0.05)  # between two tries; the answer is the condition
        else:
            return
    raise RuntimeError("the test server did not answer")
