"""What a training step does, as the stages that a schedule runs.

Listed in the plain order: of each micro-batch ids, rows, forward and backward; then whether all ranks may step, and the
updates. Where tables are not sharded, lookups stage their rows themselves, within the forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embcache.errors import NonFiniteLoss
from embcache.optim import SparseOptimizer
from embcache.schedule.base import COMPUTE, Key, Stage
from embcache.store import EmbeddingStore
from embcache.train.config import TrainConfig
from embcache.train.distributed import Session
from embcache.train.task import Task

__all__ = ["Work", "Workshop"]

DENSE, SPARSE = "dense optimizer", "embedding update"


class Workshop:
    """What all steps of a run have in common.

    Args:
        task, optimizers, session, config: of the run.
        stores: the embedding stores that the optimizers train.
        clip_norm: bound of the dense gradient's norm, or None.
    """

    def __init__(
        self,
        task: Task,
        optimizers: Sequence[torch.optim.Optimizer],
        stores: Sequence[EmbeddingStore],
        session: Session,
        config: TrainConfig,
        clip_norm: float | None,
    ) -> None:
        self.task, self.optimizers, self.stores = task, list(optimizers), list(stores)
        self.session, self.config, self.clip_norm = session, config, clip_norm
        self.loss: Callable[[Any, bool], Tensor] = session.losses(task)
        self.dense = [p for p in task.model.parameters() if p.requires_grad]
        self.shared = session.world > 1
        # the store whose exchange has stages of its own; with several, lookups know which ids are whose
        sharded: list[Any] = [store for store in stores if hasattr(store, "lanes")]
        self.remote: Any = sharded[0] if len(sharded) == len(self.stores) == 1 else None

    def split(self, batch: Any) -> list[Any]:
        """The micro-batches that are trained on."""
        parts = self.config.micro_batches
        pieces = [batch] if parts == 1 else self.task.split(batch, parts)
        return [piece for piece in pieces if self.session.takes(self.task.count(piece))]

    def update(self) -> list[tuple[str, torch.optim.Optimizer]]:
        """The optimizers by the name of their stage, in their order."""
        return [(SPARSE if isinstance(o, SparseOptimizer) else DENSE, o) for o in self.optimizers]


class Work:
    """One step on one batch.

    Attributes:
        count, samples: loss terms and samples of the whole batch, on all ranks.
        total: the sum of its loss terms.
        allowed: whether the update was made.
    """

    def __init__(self, shop: Workshop, batch: Any, where: str) -> None:
        self._shop, self._batch, self._where = shop, batch, where
        self.parts = shop.split(batch)
        self.count = self.samples = 0
        self.total, self.allowed = 0.0, False
        self._losses: list[Tensor | None] = [None] * len(self.parts)
        self._sums = [0.0] * len(self.parts)
        self._staged: list[tuple[Any, Any]] = []

    def stages(self) -> list[Stage]:
        """In the plain order."""
        road = "dense" if self._shop.shared else COMPUTE
        stages = [Stage("batch size", self._measure, road)]
        for i in range(len(self.parts)):
            stages += self._of_part(i)
        ends = tuple(stage.key for stage in stages if stage.name == "backward")
        stages.append(Stage("agreement", self._agree, road, after=(("batch size", None), *ends)))
        before: Key = ("agreement", None)
        for name, optimizer in self._shop.update():
            lane = "grads" if name == SPARSE and self._shop.shared else COMPUTE
            same = sum(stage.name.startswith(name) for stage in stages)
            name = f"{name} {same + 1}" if same else name
            stages.append(Stage(name, partial(self._step, optimizer), lane, after=(before,)))
            before = stages[-1].key
        return stages

    def release(self) -> None:
        """Give back what the step has staged itself."""
        for jagged, handle in self._staged:
            if getattr(jagged, "staged", None) is handle:
                jagged.staged = None
            handle.release()
        self._staged = []

    # micro-batches ----------------------------------------------------------------------------------------------

    def _of_part(self, i: int) -> list[Stage]:
        ready: tuple[Key, ...] = ()
        exchange = []
        if self._shop.remote is not None:
            exchange = [
                Stage("ids", partial(self._ask, i), "ids", i),
                Stage("rows", partial(self._fetch, i), "rows", i, (("ids", i),)),
            ]
            ready = (("rows", i),)
        # gradients of dense parameters are added in the order of the micro-batches
        needs: tuple[Key, ...] = (("forward", i), ("batch size", None), *([("backward", i - 1)] if i else []))
        return [
            *exchange,
            Stage("forward", partial(self._forward, i), COMPUTE, i, ready),
            Stage("backward", partial(self._backward, i), COMPUTE, i, needs),
        ]

    def _ask(self, i: int) -> None:
        """Tell the owners of rows which are needed, unless look-ahead has."""
        for jagged in self._shop.task.jagged(self.parts[i]):
            if getattr(jagged, "staged", None) is None:
                handle = self._shop.remote.stage(jagged, training=True)
                self._staged.append((jagged, handle))
                jagged.staged = handle

    def _fetch(self, i: int) -> None:
        for jagged in self._shop.task.jagged(self.parts[i]):
            self._shop.remote.fetch(jagged.staged)

    def _forward(self, i: int) -> None:
        loss = self._shop.loss(self.parts[i], i == len(self.parts) - 1)
        self._losses[i], self._sums[i] = loss, float(loss.detach())

    def _backward(self, i: int) -> None:
        loss, self._losses[i] = self._losses[i], None
        assert loss is not None
        (loss / max(self.count, 1)).backward()

    # the whole batch --------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        task = self._shop.task
        self.count, self.samples = self._shop.session.total(task.count(self._batch), task.samples(self._batch))

    def _agree(self) -> None:
        """Clip, and decide what the policy says of numbers that are not finite; with the loss sum of all ranks."""
        total, policy = 0.0, self._shop.config.on_nonfinite
        for value in self._sums:
            total += value
        seen = None if policy == "allow" else self._loss_problem(total)
        problem, self.total = self._shop.session.agree(seen, total)
        problem = problem or self._clip(policy != "allow")
        if problem is not None and policy == "raise":
            raise problem
        self.allowed = problem is None
        if self.allowed:  # what can still go wrong with rows goes wrong on all ranks, before any weight changes
            for store in self._shop.stores:
                store.agree_finite()

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.allowed:
            optimizer.step()

    def _loss_problem(self, total: float) -> Exception | None:
        """What this rank alone may have seen."""
        if not math.isfinite(total):
            return NonFiniteLoss(
                f"{self._where}: the loss is {total}; no weight has changed (--on-nonfinite skip goes on)"
            )
        return next((store.problem for store in self._shop.stores if store.problem is not None), None)

    def _clip(self, check: bool) -> Exception | None:
        """Clip the dense gradient, which is that of all ranks; give what is wrong with it instead."""
        clip_norm = self._shop.clip_norm
        grads = [q.grad for q in self._shop.dense if q.grad is not None]
        if not grads or not (check or clip_norm is not None):
            return None
        norm = torch.nn.utils.get_total_norm(grads)
        if check and not torch.isfinite(norm):
            name = self._nonfinite_parameter()
            return NonFiniteLoss(f"{self._where}: the gradient of {name} is not finite; no weight has changed")
        if clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._shop.dense, clip_norm, norm)
        return None

    def _nonfinite_parameter(self) -> str:
        for name, p in self._shop.task.model.named_parameters():
            if p.grad is not None and not bool(torch.isfinite(p.grad).all()):
                return name
        return "all dense parameters together (their norm overflows)"
