"""What makes a test that was written for CUDA and FileSystemWriter one for CPUs and this engine. Text alone."""

from __future__ import annotations

import re
from pathlib import Path

STORAGE = re.compile(r"FileSystem(Writer|Reader)|checkpoint_id|\bsaver\.|(?i:dcp)\.save|save_state_dict")
"""What a file says that asks something of a storage; the others try DCP's own planning and dictionaries."""

_TO_CPU = (
    (re.compile(r"\.cuda\([^()]*\)"), ""),
    (re.compile(r'f"cuda:\{[^}]*\}"|"cuda(:\d+)?"'), '"cpu"'),
    (re.compile(r'f"\{[^}]*device_type\}:\{[^}]*\}"'), '"cpu"'),
    (re.compile(r"torch\.cuda\.device_count\(\)"), "4"),
    (re.compile(r"device_id=torch\.cuda\.current_device\(\)"), 'device_id=torch.device("cpu")'),
    (re.compile(r"torch\.cuda\.current_device\(\)"), "0"),
    (re.compile(r'"(cpu:gloo,)?(cuda:)?nccl"'), '"gloo"'),
)

_BEGIN = re.compile(r"\A(?:(?:#.*|\s*)\n)*(?:from __future__ .*\n)?")


def asks_a_storage(text: str) -> bool:
    return STORAGE.search(text) is not None


def ported(text: str) -> str:
    """The test file, which loads `shim` before anything of torch, on CPUs."""
    for pattern, instead in _TO_CPU:
        text = pattern.sub(instead, text)
    head = _BEGIN.match(text)
    begin = head.end() if head is not None else 0
    return (
        f"{text[:begin]}import shim  # first: it puts this engine where torch's writer and reader are\n{text[begin:]}"
    )


def cases(folder: Path) -> list[Path]:
    """Every test file below `folder`, by name."""
    return sorted(folder.rglob("test_*.py"))
