"""Gradients of the dense layers, summed over the ranks in rank order.

DistributedDataParallel finds the parameters, fills its buckets and overlaps them with the backward; what it does with a
bucket is decided here: slices go out by all-to-all, each rank adds the slices it gets in rank order in fp32, and the
sums go back to all. So an element's sum depends on neither the bucket it lies in (DDP rebuilds them after its first
step) nor the place there, as it does in gloo's own reduction from three ranks on. It is a sum, never a mean: losses are
divided by the global number of their terms before.
"""

from __future__ import annotations

import time
import warnings
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DenseSum", "summed"]


class DenseSum:
    """The comm hook of a DistributedDataParallel module, on a lane.

    What counts as waited is the time from the last bucket to its sum: a backward has nothing else to do by then. The
    hook never raises, since DDP would hang or hide what went wrong; ``check`` raises it after the backward.
    """

    def __init__(self, lane: Any, rank: int, world: int) -> None:
        self.lane, self.rank, self.world = lane, rank, world
        self.error: BaseException | None = None
        self._asked = self._done = 0.0

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The bucket's buffer, summed; DDP asks as soon as its gradients are there."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        flat, self._asked = bucket.buffer(), time.perf_counter()

        def settle(pending: Future[None]) -> None:
            self._note(pending.exception())
            future.set_result(flat)

        try:
            self.lane.submit(self.sum, flat).add_done_callback(settle)
        except Exception as error:  # the lane has failed before
            self._note(error)
            future.set_result(flat)
        return future

    def check(self) -> None:
        """After a backward: raise what went wrong in it."""
        self.lane.ledger.waited(self.lane.name, max(0.0, self._done - self._asked))
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _note(self, error: BaseException | None) -> None:
        self.error, self._done = self.error or error, time.perf_counter()

    def sum(self, flat: Tensor) -> None:
        """Replace a tensor [n] by its sum over all ranks; on the lane's thread."""
        ends = [flat.numel() * r // self.world for r in range(self.world + 1)]
        sizes = [(end - begin) * flat.element_size() for begin, end in pairwise(ends)]
        mine = [sizes[self.rank]] * self.world
        first, *others = self.lane.all_to_all((flat, sizes), mine).view(flat.dtype).chunk(self.world)
        total = first.float()
        for other in others:
            total += other
        self.lane.all_to_all([total.to(flat.dtype)] * self.world, sizes, flat.view(torch.uint8))


def summed(module: nn.Module, lane: Any, rank: int, world: int) -> tuple[nn.Module, DenseSum | None]:
    """``module`` with the gradients of its parameters summed over all ranks after each backward, and what sums them.

    ``module.no_sync()`` is DDP's. A module without parameters to train, or a single rank, is returned as it is.
    Parameters are taken as they are: equal on all ranks at the start, and so ever after.
    """
    if world == 1 or not any(p.requires_grad for p in module.parameters()):
        return module, None
    # Parameters that a loss does not reach keep a gradient of None, as on one rank. The default group is DDP's own:
    # it reduces its map of used parameters there, on the caller's thread.
    wrapped = DistributedDataParallel(_Quiet(module), init_sync=False, find_unused_parameters=True)
    state = DenseSum(lane, rank, world)
    wrapped.register_comm_hook(None, lambda _, bucket: state.hook(bucket))  # torch refuses annotations that are text
    # Of layers with one output; the copy into the bucket is made either way.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    return wrapped, state


class _Quiet(nn.Module):
    """A module, and a parameter that no loss reaches: DDP would print a warning on every rank if it found none."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.unreached = module, nn.Parameter(torch.zeros(1))

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)
