"""torch.distributed.checkpoint: blocking, asynchronous in a thread, with the asynchronous stager, in a process."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench.systems.system import System


def join_world_of_one() -> None:
    """DCP's asynchronous saves want a process group."""
    if dist.is_initialized():
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # the process executor reads these to build a group of its own
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    store = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115  # the group has it until the process ends
    dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)


class DcpSave(System):
    def prepare(self) -> None:
        join_world_of_one()

    def begin(self, step: int) -> None:
        dcp.save(self.program.state(), checkpoint_id=self.place(step))

    def load(self) -> None:
        state = self.program.state()
        dcp.load(state, checkpoint_id=self.newest)
        self.program.model.load_state_dict(state["model"])  # type: ignore[arg-type]  # as it was given
        self.program.optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]

    def close(self) -> None:
        dist.destroy_process_group()


class DcpThread(DcpSave):
    """`async_save` as it comes."""

    _options: Mapping[str, Any] = MappingProxyType({})
    _upload: Any = None
    _staging: Any = None

    def begin(self, step: int) -> None:
        self.finish()  # one at a time, or DCP refuses
        answer = dcp.async_save(self.program.state(), checkpoint_id=self.place(step), **self._options)
        self._upload = getattr(answer, "upload_completion", answer)
        self._staging = getattr(answer, "staging_completion", None)

    def before_step(self) -> None:
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def finish(self) -> None:
        self.before_step()
        if self._upload is not None:
            self._upload.result()
            self._upload = None


class DcpStager(DcpThread):
    """With the stager that copies in a thread into memory it keeps."""

    def prepare(self) -> None:
        super().prepare()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
            )
        )
        self._options = {"async_stager": self._stager}

    def close(self) -> None:
        self._stager.close()
        super().close()


class DcpProcess(DcpStager):
    """The same, writing in a process of its own."""

    def prepare(self) -> None:
        super().prepare()
        self._options = {**self._options, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
