"""ClickBatch: what a click-through model reads in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from embcache.jagged import KeyedJaggedTensor


@dataclass
class ClickBatch:
    """One batch of samples.

    ``dense``: fp32 ``[B, n_dense]``. ``sparse``: a KeyedJaggedTensor with ``B`` bags for each feature, ids int32
    where every table fits, else int64. ``labels``: fp32 ``[B]``. ``B`` may be 0.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    parts: dict[int, list[ClickBatch]] = field(default_factory=dict, repr=False, compare=False)
    """Its micro-batches, by their number, where it was cut: their rows may be staged."""

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ClickBatch:
        """The same batch on ``device``."""
        return ClickBatch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )
