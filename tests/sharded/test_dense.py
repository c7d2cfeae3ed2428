"""Dense gradients are summed in rank order: the same bits whatever the buckets, on every rank, run to run."""

import contextlib

import pytest
import ranks
import torch
from torch import nn

from embcache.sharded.dense import DenseSum, summed


class Net(nn.Module):
    """Sizes that fall across buckets; ``unused`` layers are reached by no loss, ``odd`` by that of odd ranks."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.last = nn.Linear(7, 33), nn.Linear(33, 61), nn.Linear(61, 1)
        self.unused, self.odd = nn.Linear(3, 3), nn.Linear(61, 1)

    def forward(self, x, target, odd=False):
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        out = self.last(hidden) + (self.odd(hidden) if odd else 0.0)
        return ((out.squeeze(1) - target) ** 2).sum()


def sample(rank, step, n):
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, 7, generator=g), torch.randn(n, generator=g)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(a, b):
    return all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a, b, strict=True))


def expected(rank, step, sizes, parts=1):
    """Every rank's own gradient, micro-batches added up, then added in rank order."""
    total = None
    for r in range(rank.world):
        model = Net()
        x, target = sample(r, step, sizes[r])
        for xs, ts in zip(x.tensor_split(parts), target.tensor_split(parts), strict=True):
            model(xs, ts).backward()
        own = gradients(model)
        total = own if total is None else [t if t is None else t + o for t, o in zip(total, own, strict=True)]
    return total


def several_steps(rank, lanes, sizes, parts=1, bucket=None):
    """Gradients of four steps; DDP rebuilds its buckets after the first. Cases share a run: a start costs a second."""
    lane, model = lanes.dense, Net()
    wrapped, state = summed(model, lane, rank.rank, rank.world)
    if bucket is not None:
        wrapped = nn.parallel.DistributedDataParallel(
            model, init_sync=False, find_unused_parameters=True, bucket_cap_mb=bucket
        )
        wrapped.register_comm_hook(None, lambda _, bucket: state.hook(bucket))
    steps = []
    for step in range(4):
        x, target = sample(rank.rank, step, sizes[rank.rank])
        pieces = list(zip(x.tensor_split(parts), target.tensor_split(parts), strict=True))
        for i, (xs, ts) in enumerate(pieces):
            with wrapped.no_sync() if i + 1 < len(pieces) else contextlib.nullcontext():
                wrapped(xs, ts).backward()
        state.check()
        steps.append(gradients(model))
        assert same(steps[-1], expected(rank, step, sizes, parts)), step
        model.zero_grad()
    return steps


def many_cases(rank):
    lanes = rank.lanes()
    even, empty = [5] * rank.world, [4, 0, 3, 1][: rank.world]
    plain = several_steps(rank, lanes, even)
    again = several_steps(rank, lanes, even, bucket=0.001)
    assert all(same(a, b) for a, b in zip(plain, again, strict=True)), "buckets change bits"
    uneven = several_steps(rank, lanes, empty)
    assert torch.isfinite(uneven[0][0]).all()
    several_steps(rank, lanes, empty, parts=3)
    several_steps(rank, lanes, [9, 2, 6, 7][: rank.world], parts=4)
    lanes.close()
    return [[None if g is None else g.tolist() for g in step] for step in plain + uneven]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_are_added_in_rank_order(world):
    first, second = ranks.run(world, many_cases), ranks.run(world, many_cases, delays=3)
    assert first == second
    assert all(result == first[0] for result in first)


def parameters_of_one_rank(rank):
    """A parameter that only some ranks' losses reach gets the sum of those; one that none reaches has no gradient."""
    model = Net()
    wrapped, state = summed(model, rank.lanes().dense, rank.rank, rank.world)
    for step in range(3):
        x, target = sample(rank.rank, step, 4)
        wrapped(x, target, odd=rank.rank % 2 == 1).backward()
        state.check()
        assert model.unused.weight.grad is None
        total = torch.zeros(1, 61)
        for r in range(1, rank.world, 2):
            other = Net()
            other(*sample(r, step, 4), odd=True).backward()
            total += other.odd.weight.grad
        assert torch.equal(model.odd.weight.grad, total)
        model.zero_grad()
    return True


def test_parameters_that_some_or_no_losses_reach():
    assert ranks.run(3, parameters_of_one_rank) == [True] * 3


def any_tensor(rank):
    lanes = rank.lanes()
    lane = lanes.dense
    state = DenseSum(lane, rank.rank, rank.world)
    for n in (0, 1, 2, rank.world, 17, 1000):
        for dtype in (torch.float32, torch.bfloat16):
            mine = [torch.randn(n, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(rank.world)]
            total = mine[0].float()
            for other in mine[1:]:
                total = total + other
            got = mine[rank.rank].clone()
            lane.submit(state.sum, got).result()
            assert torch.equal(got, total.to(dtype)), (n, dtype)
    before = lanes.ledger.sent("dense")
    lane.submit(state.sum, torch.zeros(rank.world * 10)).result()
    return lanes.ledger.sent("dense") - before


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_of_any_size_and_their_bytes(world):
    assert ranks.run(world, any_tensor) == [2 * (world - 1) * 10 * 4] * world


def raising(error):
    def function(*_):
        raise error

    return function


def a_lane_that_fails(rank):
    model, lane = Net(), rank.lanes().dense
    wrapped, state = summed(model, lane, rank.rank, rank.world)
    state.sum = raising(ConnectionError("the peer is gone"))
    wrapped(*sample(0, 0, 4)).backward()
    with pytest.raises(ConnectionError, match="the peer is gone"):
        state.check()
    state.check()
    return True


def test_what_goes_wrong_on_the_lane_is_raised_after_the_backward():
    assert ranks.run(2, a_lane_that_fails) == [True, True]


def test_nothing_to_sum():
    module = nn.Linear(2, 1)
    assert summed(module, None, 0, 1) == (module, None)
    module.requires_grad_(False)
    assert summed(module, None, 0, 2) == (module, None)
