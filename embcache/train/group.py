"""The session of a run on many ranks, of which this process is one."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from embcache.checkpoint import MANIFEST
from embcache.config import TableConfig
from embcache.errors import BadConfig, RemoteFault
from embcache.sharded import launch
from embcache.sharded.checkpoint import GroupCheckpoints
from embcache.sharded.copies import Copies
from embcache.sharded.dense import DenseSum, summed
from embcache.sharded.lanes import Lanes
from embcache.sharded.plan import Placement, ShardingPlan, first_map
from embcache.sharded.shard import shard
from embcache.sharded.store import local_tables
from embcache.tiers import Unplaced
from embcache.train import state
from embcache.train.distributed import Meter, Session, ShardingConfig
from embcache.train.task import Task

__all__ = ["GroupSession", "open_group"]

POLL = 0.05
PATIENCE = 180.0  # seconds with other ranks during the first steps: they may be compiling kernels
FIRST_STEPS = 20
OPENED = "embcache opened"
T = TypeVar("T")
M = TypeVar("M", bound=Meter)


class GroupSession(Session):
    """A run on the ranks of a group, of which this process is one.

    Every call is a collective: all ranks make the same calls in the same order, on their main threads. All of it
    travels on the lane ``dense``.

    Args:
        lanes: of the group.
        store: a ``torch.distributed`` store of these ranks and this attempt.
        start: one that outlives the attempt: ranks that were started again find what was set there before.
        attempt: how often they were.
    """

    def __init__(self, lanes: Any, store: Any, start: Any, attempt: int = 0) -> None:
        self.lanes, self.rank, self.world = lanes, lanes.rank, lanes.world
        self.is_main = self.rank == 0
        self.restarted = attempt > 0 and bool(start.check([OPENED]))
        self._store, self._start, self._meetings, self._steps = store, start, 0, 0
        self._dense: DenseSum | None = None

    def first(self, work: Callable[[], T]) -> T:
        if not self.is_main:
            self._wait(["first"])
        value = work()
        if self.is_main:
            self._arrive("first")
        self._meetings += 1
        return value

    def meet(self) -> None:
        self._arrive(str(self.rank))
        self._wait(list(map(str, range(self.world))))
        self._meetings += 1

    def losses(self, task: Task) -> Callable[[Any, bool], Tensor]:
        module, self._dense = summed(_Loss(task), self.lanes.dense, self.rank, self.world)

        def loss(part: Any, last: bool) -> Tensor:
            alone = last or self._dense is None
            with contextlib.nullcontext() if alone else module.no_sync():  # type: ignore[operator]
                value: Tensor = module(part)
            return value

        return loss

    def checkpoints(self, folder: Path, keep: int, sharding: ShardingConfig) -> Any:
        copies = None if sharding.checkpoint_dir is None else Copies(sharding.checkpoint_dir)
        if (folder / MANIFEST).exists() and any(folder.glob("generation-*")):
            raise BadConfig(f"{folder} holds the checkpoints of one process: go on without torchrun")
        return GroupCheckpoints(folder, self.lanes, keep, copies=copies, tell=self._tell)

    def claim(self, checkpoints: Any) -> None:
        """Each rank's folder is claimed when it is known what lies in it."""

    def opened(self) -> None:
        self._start.set(OPENED, "yes")

    def first_tiers(self, chain: Callable[[Path | None], list[Any]]) -> list[Any]:
        return [Unplaced()]

    def place(
        self, model: Any, chain: Callable[[Path | None], list[Any]], checkpoints: Any, sharding: ShardingConfig
    ) -> Any:
        tables = model.store.tables
        plan = _plan(tables, self.world, checkpoints.plan(), sharding)
        folder = checkpoints.claim(local_tables(tables, plan))
        shard(model, plan, lanes=self.lanes, tiers=chain(folder))
        return checkpoints

    def takes(self, count: int) -> bool:
        return True

    def begin_step(self, seed: int, step: int) -> None:
        state.seed_step(seed, step, self.rank)
        self._steps += 1
        if self._steps == FIRST_STEPS + 1:
            self.lanes.set_timeout(timedelta(seconds=launch.limit()))

    def total(self, *numbers: float) -> list[Any]:
        sums = _sum(self._table(numbers))
        return [type(number)(value) for number, value in zip(numbers, sums, strict=True)]

    def agree(self, problem: Exception | None, total: float) -> tuple[Exception | None, float]:
        if self._dense is not None:
            self._dense.check()
        table = self._table([problem is not None, total])
        (sum_,) = _sum(table[:, 1:])
        if not table[:, 0].any():
            return None, sum_
        said = self.gathered(None if problem is None else [type(problem).__name__, str(problem)])
        first = next(rank for rank, words in enumerate(said) if words is not None)
        return problem or RemoteFault.of(first, *said[first]), sum_

    def merged(self, meter: M) -> M:
        first, *others = map(type(meter).from_bytes, self._bytes(meter.to_bytes()))
        for other in others:
            first.merge(other)
        merged: M = first
        return merged

    def gathered(self, values: Any) -> list[Any]:
        return [json.loads(data) for data in self._bytes(json.dumps(values).encode())]

    def check_equal(self, model: nn.Module) -> None:
        check = 0
        for name, tensor in state.dense_state(model).items():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            check = zlib.crc32(data.tobytes(), zlib.crc32(name.encode(), check))
        checks = self._table([check])[:, 0]
        different = np.flatnonzero(checks != checks[0])
        if len(different):
            raise BadConfig(
                f"dense parameters of rank {different[0]} are not those of rank 0: seeds or versions differ"
            )

    def exchange(self) -> list[Mapping[str, Any]]:
        return self.gathered(self.lanes.ledger.report())

    def say(self, *lines: str) -> None:
        if self.is_main:
            super().say(*lines)

    def _tell(self, line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def _table(self, numbers: Sequence[float]) -> np.ndarray:
        """float64 [world, n]: every rank's numbers."""
        row = np.array(numbers, np.float64).view(np.int64)
        table: np.ndarray = self.lanes.dense.header(np.tile(row, (self.world, 1))).view(np.float64)
        return table

    def _bytes(self, data: bytes) -> list[bytes]:
        return [part.numpy().tobytes() for part in self.lanes.dense.all_gather(data)]

    def _arrive(self, who: str) -> None:
        self._store.set(f"meeting {self._meetings} {who}", "here")

    def _wait(self, whom: list[str]) -> None:
        keys = [f"meeting {self._meetings} {who}" for who in whom]
        while not self._store.check(keys):
            if self.lanes.error is not None:
                raise self.lanes.error
            time.sleep(POLL)


def _plan(
    tables: Sequence[TableConfig], world: int, before: ShardingPlan | None, sharding: ShardingConfig
) -> ShardingPlan:
    """The plan that the settings name, else the one ``before``, else all rows spread; no more moves than must."""
    plan = before or ShardingPlan(world, {table.name: Placement("row_wise") for table in tables})
    if sharding.plan is not None:
        plan = ShardingPlan.load(sharding.plan)
        plan = plan if plan.world == world else plan.for_world(world)
        if before is not None and plan.ranks == first_map(world, plan.buckets) and plan.buckets == before.buckets:
            plan = dataclasses.replace(plan, ranks=before.ranks)  # it names no rank for a bucket of its own
    if sharding.wire is not None:
        plan = dataclasses.replace(plan, wire=sharding.wire)
    plan.check(tables)
    return plan


class _Loss(nn.Module):
    """A task's loss as a module, so that what wraps a module can wrap it."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model = task.model
        self._loss = task.loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(batch)


def _sum(table: np.ndarray) -> list[float]:
    """Columns added in rank order."""
    sums = table[0].copy()
    for row in table[1:]:
        sums += row
    return [float(value) for value in sums]


@contextlib.contextmanager
def open_group() -> Iterator[GroupSession]:
    """Meet the other ranks that torchrun has started; an error here ends them all."""
    here = launch.init(PATIENCE)
    lanes = Lanes()
    try:
        yield GroupSession(lanes, here.store, here.lasting, here.attempt)
    except BaseException as error:
        told = _told(lanes, error)
        raise told from (None if told is error else error)
    lanes.close()
    launch.finish()


def _told(lanes: Any, error: BaseException) -> BaseException:
    """The error this rank ends with; the others, and torchrun, know it."""
    if isinstance(error, RuntimeError) and "gloo" in str(error):  # of DDP's own group: it names nobody
        error = lanes.broken("dense", error)
    if not isinstance(error, RemoteFault):
        launch.failing(error)
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        get_error_handler().record_exception(error)
    atexit.register(_end)
    return error


def _end() -> None:
    """Threads that wait in a broken group would keep this process until they give up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
