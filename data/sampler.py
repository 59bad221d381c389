"""Which samples belong to which step: the same on every rank of a domain group, resumable at any world size."""

from dataclasses import dataclass

import numpy as np

from core import InputError


@dataclass
class DomainSampler:
    """An endless shuffled stream of sample numbers, cut into global batches, each cut over the data groups.

    The whole state is the epoch and the samples of it that all ranks together have used, kept as one number,
    ``consumed``; it means the same at any world size. Each epoch visits every sample once, in an order that depends
    only on the seed and the epoch.

    Args:
        count: number of samples.
        batch: global batch size; a multiple of ``groups``.
        groups: number of data groups (the size of the ``ddp`` axis); ``group`` is this rank's.
    """

    count: int
    batch: int
    groups: int = 1
    group: int = 0
    seed: int = 0
    consumed: int = 0

    def __post_init__(self):
        if self.count < 1:
            raise InputError("no samples to train on", remedy="Check the archive and its splits.")
        if self.batch < 1 or self.batch % self.groups:
            raise InputError(
                f"a global batch of {self.batch} does not divide over {self.groups} data groups",
                remedy="Choose --batch as a multiple of the number of data groups.",
            )

    def next(self):
        """This group's samples of the next global batch: list of (sample, global position in the stream)."""
        samples = self.coming()
        self.consumed += self.batch
        return samples

    def coming(self):
        """What `next` will return, to read ahead; uses nothing up."""
        each = self.batch // self.groups
        first = self.consumed + self.group * each
        return [(self._at(p), p) for p in range(first, first + each)]

    def _at(self, position):
        epoch, index = divmod(position, self.count)
        return int(np.random.default_rng((self.seed, epoch)).permutation(self.count)[index])

    def state_dict(self):
        epoch, used = divmod(self.consumed, self.count)
        return {"epoch": epoch, "used": used, "consumed": self.consumed, "count": self.count, "seed": self.seed}

    def load_state_dict(self, state):
        if (state["count"], state["seed"]) != (self.count, self.seed):
            raise InputError(
                f"the checkpoint was trained on {state['count']} samples with seed {state['seed']}, "
                f"not {self.count} with seed {self.seed}",
                remedy="Resume with the same archive and seed.",
            )
        self.consumed = state["consumed"]
