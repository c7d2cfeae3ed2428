"""Click-through prediction as a task of the training loop: binary cross-entropy, judged by AUC, NE and log loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm.data.batch import ClickBatch
from dlrm.models.base import ClickModel
from embcache.jagged import KeyedJaggedTensor
from embcache.train.metrics import BinaryMetrics
from embcache.train.task import Evaluation

__all__ = ["ClickTask", "split_batch"]


class ClickTask:
    """Trains a click model on ``ClickBatch``es; the loss terms are the samples.

    Args:
        model: gives logits from (dense, sparse); its ``dense_dtype`` decides about bf16 autocast, evaluation included.
        device: of the dense part.
        monitor: "auc", "ne" or "logloss": what early stopping follows.
    """

    def __init__(self, model: ClickModel, device: str = "cpu", monitor: str = "auc") -> None:
        if monitor not in ("auc", "ne", "logloss"):
            raise ValueError(f"monitor must be auc, ne or logloss, got {monitor!r}")
        self.model = model.to(device)
        self.device = torch.device(device)
        self.monitor, self.higher_is_better = monitor, monitor == "auc"
        self.counters: dict[str, int] = {}

    def split(self, batch: ClickBatch, parts: int) -> list[ClickBatch]:
        """See :func:`split_batch`; asked again, the same objects."""
        if parts not in batch.parts:
            batch.parts[parts] = split_batch(batch, parts)
        return batch.parts[parts]

    def jagged(self, batch: ClickBatch) -> list[KeyedJaggedTensor]:
        """The ids that the model looks up."""
        return self.model.inputs(batch.sparse)

    def count(self, batch: ClickBatch) -> int:
        """Samples: each has one loss term."""
        return len(batch)

    samples = count

    def loss(self, batch: ClickBatch) -> Tensor:
        """Sum over the samples of the binary cross-entropy, in fp32."""
        self._count_lookups(batch.sparse)
        logits, labels = self._forward(batch)
        return binary_cross_entropy_with_logits(logits, labels, reduction="sum")

    def evaluate(self, batches: Iterable[ClickBatch], merged: Callable[[Any], Any] = lambda meter: meter) -> Evaluation:
        """AUC, NE, log loss and calibration over the batches, those of all ranks where ``merged`` adds them."""
        meter = BinaryMetrics()
        for batch in batches:
            logits, labels = self._forward(batch)
            meter.update(logits, labels)
        meter = merged(meter)
        return Evaluation(meter.compute(), [(b.weight, b.predicted, b.observed) for b in meter.calibration_bins()])

    def _forward(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        if self.device.type != "cpu":
            batch = batch.to(self.device, non_blocking=True)
        return self.model(batch.dense, batch.sparse), batch.labels

    def _count_lookups(self, sparse: Any) -> None:
        keys, size = sparse.keys(), sparse.stride()
        bounds = sparse.offsets()[:: size or 1].tolist() if size else [0] * (len(keys) + 1)
        for i, key in enumerate(keys):
            self.counters[key] = self.counters.get(key, 0) + bounds[i + 1] - bounds[i]


def split_batch(batch: ClickBatch, parts: int) -> list[ClickBatch]:
    """Consecutive micro-batches whose sizes differ by at most one; some are empty when there are more than samples.

    >>> sparse = KeyedJaggedTensor(["a"], torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 0, 2]))
    >>> halves = split_batch(ClickBatch(torch.zeros(3, 1), sparse, torch.tensor([0.0, 1.0, 1.0])), 2)
    >>> [(part.labels.tolist(), part.sparse.values().tolist()) for part in halves]
    [([0.0], [7]), ([1.0, 1.0], [8, 9])]
    """
    samples, keys = len(batch), batch.sparse.keys()
    bounds = [samples * i // parts for i in range(parts + 1)]
    lengths = batch.sparse.lengths().view(len(keys), samples)
    offsets, values = batch.sparse.offsets(), batch.sparse.values()
    weights = batch.sparse.weights_or_none()
    out = []
    for low, high in pairwise(bounds):
        ends = [(int(offsets[f * samples + low]), int(offsets[f * samples + high])) for f in range(len(keys))]
        part = KeyedJaggedTensor(
            keys,
            torch.cat([values[a:b] for a, b in ends]),
            None if weights is None else torch.cat([weights[a:b] for a, b in ends]),
            lengths=lengths[:, low:high].reshape(-1),
        )
        out.append(ClickBatch(batch.dense[low:high], part, batch.labels[low:high]))
    return out
