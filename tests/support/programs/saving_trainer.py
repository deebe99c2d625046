"""A trainer that stages one real save through its agent and dies by SIGKILL at once. argv: the step, "die" or "stay"."""

import os
import resource
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.saves import arrays, split, stream_of
from surefoot.ipc.agent_client import AgentBackend
from surefoot.ipc.trainer_messages import Staged, StepReport
from surefoot.protocol.progress import Progress

SHAPES = {"weight": (64, 32), "bias": (32,)}


def open_many() -> None:
    """As a program with many data files does: what it opens from here on has a number that select() cannot take."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    while os.open(os.devnull, os.O_RDONLY) < 1024:
        pass


def main() -> None:
    open_many()
    step, end = int(sys.argv[1]), sys.argv[2]
    link = AgentBackend.connect()
    about = link.attached
    step += about.generation
    link.report_restore(0, "none", 0, 0.0)
    tensors = arrays(step, SHAPES)
    boxes = {name: split(array.shape, about.world_size, about.rank) for name, array in tensors.items()}
    stream, data = stream_of(tensors, boxes)
    memory, slots, slot_bytes = link.request_arena(1 << 20)
    slot = link.wait_for_free_slot(10.0)
    assert slot is not None, "no slot became free"
    print(f"slot {slot} of {slots}, {slot_bytes} bytes each, first byte {memory[slot * slot_bytes]}", flush=True)
    values = b'{"plain": 1}'
    whole = np.frombuffer(memory, dtype=np.uint8)
    begin = slot * slot_bytes
    whole[begin : begin + len(data) + len(values)] = np.frombuffer(data + values, dtype=np.uint8)
    link.hand_over_slot(Staged(slot, step, len(data), len(values), stream.digest, stream.text))
    link.report_step(StepReport(Progress(step, 1.0, 0.1, stall_seconds=0.001), ((0, 8),), skipped=False))
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    assert link.wait_for_flush(20.0), "the save was not drained"
    print("drained", flush=True)
    link.close(step)


if __name__ == "__main__":
    main()
