"""The pool of workers that the cases run on: a death by a signal is tried once more, one that repeats fails."""

import os
import signal

import pytest
import torch.distributed as dist
from pool import CaseFailed


def dies(meshes, path):
    """Rank 1 dies, unless the file says that it did."""
    if dist.get_rank() == 1 and not (path and os.path.exists(path)):
        if path:
            open(path, "w").close()
        os.kill(os.getpid(), signal.SIGABRT)
    return dist.get_rank()


def test_a_death_is_told_and_tried_again(pool, tmp_path):
    with pytest.warns(UserWarning, match="rank 1 died with exit code -6"):
        assert pool.run(dies, str(tmp_path / "died")) == [0, 1, 2, 3]


def test_a_death_that_repeats_fails(pool):
    with (
        pytest.warns(UserWarning, match="rank 1 died"),
        pytest.raises(CaseFailed, match="rank 1 died with exit code -6"),
    ):
        pool.run(dies, "")
