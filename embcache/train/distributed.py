"""What a run asks of the processes around it: the same questions with one process, where the answers cost nothing, and
with many.

Under torchrun every process (rank) trains on its share of each batch; tables are sharded, dense gradients summed. What
a run decides it decides from numbers of all ranks, so that all decide alike; what it says, rank 0 says.

>>> alone = Session()
>>> alone.total(3, 0.5), alone.is_main
([3, 0.5], True)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor, nn

from embcache.checkpoint import Checkpoints
from embcache.errors import BadConfig, CorruptStore
from embcache.sharded.launch import under_torchrun
from embcache.train.flags import flag
from embcache.train.task import Task

__all__ = ["Meter", "Session", "ShardingConfig", "open_session"]

T = TypeVar("T")
M = TypeVar("M", bound="Meter")


class Meter(Protocol):
    """What accumulates a metric and can be added up over ranks."""

    def merge(self, other: Any) -> None: ...
    def to_bytes(self) -> bytes: ...
    @classmethod
    def from_bytes(cls, data: bytes) -> Any: ...


@dataclass(frozen=True)
class ShardingConfig:
    """Sharding under torchrun: which rank holds which rows, and how they travel."""

    plan: Path | None = flag(None, "YAML file that places tables (none: every table's rows spread over all ranks)")
    wire: Literal["fp32", "fp16", "bf16", "int8"] | None = flag(
        None, "format of rows and gradients between ranks (none: that of the plan, else fp32)"
    )
    checkpoint_dir: Path | None = flag(
        None, "folder on a shared file system that also takes every checkpoint, so that losing a node loses nothing"
    )


class Session:
    """A run in one process."""

    rank = 0
    world = 1
    is_main = True
    """Whether this is the process that writes files and speaks."""

    restarted = False
    """Whether an attempt before this one has opened the run, and failed: it goes on from the last checkpoint."""

    def first(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, done by rank 0 first and then by the others, who find it done: it may take its time."""
        return work()

    def meet(self) -> None:
        """Return when all ranks have come here, however long that takes."""

    def checkpoints(self, folder: Path, keep: int, sharding: ShardingConfig) -> Any:
        """Checkpoints of a run of so many ranks. BadConfig where it has others, or settings of ranks without any."""
        given = [name for name, value in vars(sharding).items() if value is not None]
        if given:
            raise BadConfig(f"--{given[0].replace('_', '-')} is for several processes: start them with torchrun")
        try:
            return Checkpoints(folder, keep=keep)
        except CorruptStore as error:
            if any(folder.glob("rank-*")):
                raise BadConfig(
                    f"{folder} holds the checkpoints of ranks: go on with torchrun, --nproc-per-node 1 or more"
                ) from error
            raise

    def claim(self, checkpoints: Any) -> None:
        """Keep other runs from writing there."""
        checkpoints.claim()

    def opened(self) -> None:
        """The run's folder is this run's: ranks started again go on in it."""

    def first_tiers(self, chain: Callable[[Path | None], list[Any]]) -> list[Any]:
        """The tiers to build a model with, which ``place`` is given then."""
        return chain(None)

    def place(
        self, model: Any, chain: Callable[[Path | None], list[Any]], checkpoints: Any, sharding: ShardingConfig
    ) -> Any:
        """Put the rows of a model where they belong, those on disk into the folder that ``chain`` is given (None: the
        run's own); returns the checkpoints that save them."""
        store = model.store
        if store.durable is None:
            return checkpoints
        store.checkpoints.keep = checkpoints.keep  # rows and checkpoints are one folder with one commit point
        return store.checkpoints

    def losses(self, task: Task) -> Callable[[Any, bool], Tensor]:
        """The loss of a micro-batch; after the backward of the ``last`` one dense gradients are those of all ranks."""
        return lambda part, last: task.loss(part)

    def takes(self, count: int) -> bool:
        """Whether a micro-batch of so many loss terms is trained on: where others wait for it, also an empty one."""
        return count > 0

    def begin_step(self, seed: int, step: int) -> None:
        """A step begins: with many ranks its random numbers depend on seed, step and rank alone."""

    def total(self, *numbers: float) -> list[Any]:
        """Each number summed over the ranks, in rank order."""
        return list(numbers)

    def agree(self, problem: Exception | None, total: float) -> tuple[Exception | None, float]:
        """What a rank has against going on: its own error there, a ``RemoteFault`` on the others. And a total."""
        return problem, total

    def merged(self, meter: M) -> M:
        """A meter of what all ranks have measured."""
        return meter

    def gathered(self, values: Any) -> list[Any]:
        """Every rank's plain JSON values, by rank."""
        return [values]

    def check_equal(self, model: nn.Module) -> None:
        """The dense part of the model is the same on all ranks."""

    def exchange(self) -> list[Mapping[str, Any]]:
        """Every rank's account of its lanes; empty with one process."""
        return []

    def say(self, *lines: str) -> None:
        """Print lines, once."""
        print("\n".join(lines))


@contextlib.contextmanager
def open_session() -> Iterator[Session]:
    """The session of this process: one of many under torchrun, else alone."""
    if not under_torchrun():
        yield Session()
        return
    from embcache.train.group import open_group  # one process need not know of others

    with open_group() as session:
        yield session
