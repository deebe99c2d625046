"""`refuse_options` refuses DataLoader options that loader and stream lack.

A sampler of one's own decides on each rank which samples come in what order: it cannot be divided among another number
of ranks, so that samples would be lost or repeated. The message says what to give instead; a bare TypeError would not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from surefoot.errors import ConfigurationError

_ORDER = (
    "the order follows from seed=. For a part of the samples, or some of them more often, give it"
    " torch.utils.data.Subset(dataset, indexes), with indexes drawn once by a seed of your own, alike on all ranks"
)
_OWN_LOADER = (
    "it is not passed on. Of a data set with samples by number, torch's DataLoader takes it, with"
    " batch_sampler=surefoot.ElasticSampler(dataset, global_batch, batches_per_step=1)"
)
_INSTEAD = {
    "batch_size": "give global_batch=, the samples a step on all ranks together",
    "num_workers": "give workers=",
    "collate_fn": "give collate=",
    "shuffle": "samples are always shuffled, by seed=",
    "drop_last": "every batch is whole: no sample is left over, as the next pass fills the last one up",
    "sampler": _ORDER,
    "batch_sampler": "give ElasticLoader the data set and batch_sampler=. For batches of like length, or of so many"
    " tokens, give ElasticStream(Items(dataset), max_tokens=, window=)",
    **dict.fromkeys(("timeout", "multiprocessing_context", "pin_memory_device", "in_order"), _OWN_LOADER),
    "generator": "give seed=, and transform=, which is called with each sample's own generator",
}


def refuse_options(kind: str, given: Iterable[str]) -> None:
    """Refuses each option in `given`, with what to give instead.

    Raises:
        ConfigurationError: torch's DataLoader has the option.
        TypeError: nobody has it.
    """
    for name in given:
        if name not in _INSTEAD:
            raise TypeError(f"{kind} has no option {name}")
        raise ConfigurationError(f"{kind} has no {name}=: {_INSTEAD[name]}")


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for options of worker processes without workers.

    Torch's DataLoader would ignore some of them silently.
    """
    for name in ("prefetch_factor", "worker_init_fn", "persistent_workers"):
        if options.get(name) and not options["num_workers"]:
            raise ConfigurationError(f"{name} is for workers, and there are none: give workers= too")
