"""A rank that dies ends the others, who name it; a launcher's restart goes on from the last complete checkpoint."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from launch import launch, succeed

from apps.cli import command
from core import DistributedManager, InputError


# -- the ways to die ---------------------------------------------------------------------------------------------
def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ZeroDivisionError("of this rank\nand more")


def leave():
    sys.exit(0)


def refuse():
    raise InputError("a chunk is damaged", file="c/0")


def _works(rank, victim, way, busy):
    """Messages without end, in which one rank dies; the others meet it in a collective, or are busy elsewhere."""

    def main(argv):
        DistributedManager.initialize(backend="gloo")
        for step in range(10_000):
            if step == 20 and rank == victim:
                way()
            if step == 20 and busy:
                time.sleep(120)
            dist.all_reduce(torch.ones(100))

    command(main)()


@pytest.mark.parametrize(
    "way, victim, busy, status, words",
    [
        (kill, 2, False, -9, "rank 2 died without a word"),
        (kill, 2, True, -9, "rank 2 died without a word"),
        (kill, 0, False, -9, "rank 0 died without a word"),
        (fail, 1, False, 1, "rank 1 failed: ZeroDivisionError: of this rank"),
        (leave, 2, False, 0, "rank 2 failed: SystemExit: 0"),
        (refuse, 0, True, 2, "rank 0 failed: InputError: file c/0: a chunk is damaged"),
    ],
)
def test_a_death_ends_the_others_by_name(way, victim, busy, status, words):
    outcome = launch(3, _works, victim, way, busy, timeout=60)
    assert outcome[victim][0] == status and "ends because" not in outcome[victim][1]
    for rank in {0, 1, 2} - {victim}:
        assert outcome[rank][0] > 0, outcome[rank]  # not killed for want of time
        assert f"error: rank {rank} ends because {words}" in outcome[rank][1], outcome[rank]


def _ends_apart(rank, alike):
    def main(argv):
        DistributedManager.initialize(backend="gloo")
        dist.all_reduce(torch.ones(2))
        time.sleep(0.3 * rank if not alike else 0)
        if alike:
            raise InputError("the archive is damaged")

    command(main)()


def test_regular_ends_at_different_times_are_no_deaths():
    succeed(3, _ends_apart, False)


def test_an_error_that_all_meet_is_told_once_by_each():
    for status, text in launch(3, _ends_apart, True):
        assert (status, text.strip()) == (2, "error: the archive is damaged")


def _slow(rank):
    DistributedManager.initialize(backend="gloo")
    torch.ones(1)
    time.sleep(3.5 if rank == 1 else 0)  # longer than any patience
    dist.all_reduce(torch.ones(2))
    DistributedManager.cleanup()


def test_a_slow_rank_is_not_taken_for_a_dead_one():
    succeed(2, _slow)
