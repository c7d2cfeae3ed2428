"""The harness itself: results in order, failures with the story of each rank, kills."""

import os
import signal
import time

import pytest
import ranks
import torch
import torch.distributed as dist


def total(rank, start):
    value = torch.tensor([start + rank.rank])
    dist.all_reduce(value)
    return int(value), rank.rank, rank.world, torch.get_num_threads()


def raises_on_one(rank):
    print("this is rank", rank.rank)
    if rank.rank == 1:
        raise IndexError("the reason")
    dist.barrier()


def sleeps(rank):
    rank.note("ready", "yes")
    time.sleep(60)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_in_rank_order(world):
    expected = sum(5 + r for r in range(world))
    assert ranks.run(world, total, start=5) == [(expected, r, world, 1) for r in range(world)]


def test_a_rank_that_raises_fails_the_run_with_what_each_printed():
    with pytest.raises(ranks.RanksFailed) as caught:
        ranks.run(2, raises_on_one)
    for part in ("the reason", "this is rank 0", "rank 1: status 1", "IndexError"):
        assert part in str(caught.value)


def test_ranks_can_be_watched_and_killed():
    started = ranks.start(2, sleeps)
    assert [started.noted("ready", r) for r in range(2)] == ["yes", "yes"]
    started.kill(1)
    outcomes = started.wait(limit=20, grace=0.2)
    assert [o.signal for o in outcomes] == [signal.SIGKILL, signal.SIGKILL]
    assert all(o.seconds < 10 for o in outcomes)
    for outcome in outcomes:
        with pytest.raises(ProcessLookupError):
            os.kill(outcome.pid, 0)
