"""How sure a score is: the spread of its values when the cases are drawn again (bootstrap, Efron 1979)."""

import torch


def draws(count, times, seed, blocks=None):
    """How often each of ``count`` cases occurs in each of ``times`` draws with replacement, fp64 (times, count).

    blocks: an id for each case, (count,) ints from 0: cases of one id are drawn together, for they are not
    independent of each other.
    """
    blocks = torch.arange(count) if blocks is None else blocks
    n = int(blocks.max()) + 1
    picks = torch.randint(n, (times, n), generator=torch.Generator().manual_seed(seed))
    return torch.zeros(times, n, dtype=torch.float64).scatter_add_(1, picks, torch.ones(times, n).double())[:, blocks]


def drawn(sums, weights):
    """Sums (case, ...) added in each draw of ``weights`` (times, case): (times, ...)."""
    return {key: torch.tensordot(weights, value, 1) for key, value in sums.items()}


def limits(values):
    """The two ends between which 95 % of values (times, ...) lie, without those that are NaN: (2, ...)."""
    ends = torch.tensor([0.025, 0.975], dtype=values.dtype)
    columns = values.reshape(len(values), -1).split(max(10**7 // len(values), 1), 1)  # torch takes 2^24 numbers at most
    return torch.cat([torch.nanquantile(column, ends, 0) for column in columns], 1).view(2, *values.shape[1:])
