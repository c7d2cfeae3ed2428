"""What the training loop needs to know of a model family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["BatchSource", "Evaluation", "Task"]


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a pass over a split, and the calibration bins (weight, predicted, observed) where there are any."""

    metrics: Mapping[str, float]
    calibration: Sequence[tuple[float, float, float]] = ()


class Task(Protocol):
    """A model and how it is trained and judged. A batch is whatever the task's data source gives.

    The loss of a batch is a sum of terms (samples, valid positions); the loop divides by the number of terms of the
    whole batch, so that micro-batches add up to it.
    """

    monitor: str
    """The metric that early stopping and the best checkpoint follow."""
    higher_is_better: bool
    counters: dict[str, int]
    """Ids looked up in training by feature, for the report; saved with the run."""

    @property
    def model(self) -> nn.Module:
        """The model, moved to its device."""

    def split(self, batch: Any, parts: int) -> Sequence[Any]:
        """The batch as micro-batches, some of them possibly empty; asked again, the same objects."""

    def jagged(self, batch: Any) -> Sequence[Any]:
        """The ids of a batch that the model looks up, as the KeyedJaggedTensors that it will look up: their rows are
        staged ahead, on another thread."""

    def count(self, batch: Any) -> int:
        """Loss terms of the batch."""

    def samples(self, batch: Any) -> int:
        """Samples of the batch, for speed and progress."""

    def loss(self, batch: Any) -> Tensor:
        """The sum of the loss terms, differentiable."""

    def evaluate(self, batches: Iterable[Any], merged: Callable[[Any], Any]) -> Evaluation:
        """Metrics over the batches; changes no weight and draws no random number. ``merged`` makes a meter of what this
        rank has seen one of what all have seen (see ``Meter`` in ``distributed.py``)."""


class BatchSource(Protocol):
    """Batches of an epoch, from any position: batch ``t`` of epoch ``e`` is a function of (seed, e, t) alone."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def set_position(self, epoch: int, batch: int) -> None: ...


@dataclass
class Window:
    """What the next point of the training curve is made of."""

    loss: float = 0.0
    terms: int = 0
    samples: int = 0
    seconds: float = 0.0


@dataclass
class Progress:
    """Where a run is: part of every checkpoint. ``epoch`` and ``batch`` are those of the next batch to train.

    ``loss`` is the mean training loss of the last whole window of steps; ``seconds`` counts training steps and
    the waiting for their data.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    skipped: int = 0
    seconds: float = 0.0
    best_value: float | None = None
    best_step: int | None = None
    without_improvement: int = 0
    stopped: bool = False
    stages: dict[str, float] = field(default_factory=dict)
    window: Window = field(default_factory=Window)
    loss: float = math.nan
