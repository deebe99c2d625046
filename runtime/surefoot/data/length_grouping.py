"""`Grouping` cuts windows into groups of samples of similar length.

A group is a micro-batch of bounded padded size, as fairseq's `max_tokens` batches. Samples of any length in one batch
are padded to the longest, and the longest batch of a run ends it out of memory. Groups follow from one lane's window
alone, so that every world makes the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.data.data_source import BadSample
from surefoot.data.sample_order import samples_at
from surefoot.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Grouping:
    """`Grouping` bounds groups by padded tokens, by samples, or by both."""

    max_tokens: int | None = None
    max_samples: int | None = None
    length: Callable[[Any], int] = len

    def cut(self, samples: Sequence[Any], seed: int) -> tuple[list[int], list[int]]:
        """Returns a window's sample order and the end of each group.

        Samples are sorted by length, ties in the seed's order, and cut greedily; then groups are shuffled. Bad samples
        come first.

        Args:
            samples: the window's, `BadSample` among them.
            seed: the window's own.

        Returns:
            Indexes into `samples` in reading order, and for each group the place in that order behind its last sample.
        """
        good = [at for at in samples_at(seed, len(samples), 0, len(samples)) if not isinstance(samples[at], BadSample)]
        lengths = {at: self.length(samples[at]) for at in good}
        groups: list[list[int]] = []
        for at in sorted(good, key=lengths.__getitem__):
            if groups and self._fits(len(groups[-1]) + 1, lengths[at]):
                groups[-1].append(at)
            else:
                groups.append([at])
        order = [at for at, sample in enumerate(samples) if isinstance(sample, BadSample)]
        ends = [len(order)] if order else []
        for number in samples_at(seed + 1, len(groups), 0, len(groups)) if groups else ():
            order += groups[number]
            ends.append(len(order))
        return order, ends

    def check(self, sample: Any) -> None:
        """Raises ValueError for a sample longer than `max_tokens`."""
        size = self.length(sample)
        if self.max_tokens is not None and size > self.max_tokens:
            raise ValueError(f"it has {size} tokens, and max_tokens={self.max_tokens}")

    def tokens(self, groups: Sequence[Sequence[Any]]) -> int:
        """Returns the tokens in these groups, without padding."""
        return sum(self.length(sample) for group in groups for sample in group)

    def _fits(self, samples: int, longest: int) -> bool:
        fewer = self.max_samples is None or samples <= self.max_samples
        return fewer and (self.max_tokens is None or samples * longest <= self.max_tokens)


def token_weight(tokens: int, world: int, total: int) -> float:
    """Returns the factor for a rank's mean loss over its own tokens.

    With it the ranks' average is the mean over all tokens; without it a rank with few tokens counts as much as one with
    many. 0 where there are no tokens at all.
    """
    return tokens * world / total if total else 0.0


def summed_over_ranks(tokens: int) -> int:
    """Returns the ranks' sum of `tokens`, by one all-reduce.

    Raises:
        ConfigurationError: there is no default process group.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigurationError(
            "token_weight() adds up what all ranks have, and there is no process group: give it total=, the sum of their"
            " batch.tokens"
        )
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    found = torch.tensor([tokens], device=device)
    dist.all_reduce(found)
    return int(found.item())
