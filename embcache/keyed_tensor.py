"""Pooled outputs of many features in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .errors import BadJagged, UnknownFeature


class KeyedTensor:
    """Pooled outputs: ``values`` [B, D_1 + ... + D_F], the columns of feature f side by side.

    Where batch sizes differ (``stride_per_key``), ``values`` is one-dimensional: [B_1, D_1], then [B_2, D_2], ...

    >>> kt = KeyedTensor(["movie", "user"], [2, 1], torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    >>> kt["user"]
    tensor([[3.],
            [6.]])
    """

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        stride_per_key: Sequence[int] | None = None,
    ) -> None:
        self._keys, self._length_per_key, self._values = list(keys), list(length_per_key), values
        self._stride_per_key = None if stride_per_key is None else list(stride_per_key)
        if len(self._keys) != len(self._length_per_key):
            raise BadJagged(f"{len(self._keys)} keys but {len(self._length_per_key)} lengths")
        if self._stride_per_key is None:
            if values.dim() != 2 or values.shape[1] != sum(self._length_per_key):
                raise BadJagged(f"values has shape {list(values.shape)}, must be [B, {sum(self._length_per_key)}]")
        elif values.dim() != 1 or values.numel() != sum(self._sizes()):
            raise BadJagged(f"values has shape {list(values.shape)}, must be [{sum(self._sizes())}]")

    @staticmethod
    def from_tensor_list(keys: Sequence[str], tensors: Sequence[Tensor]) -> KeyedTensor:
        """From one [B, D_f] tensor per feature."""
        return KeyedTensor(keys, [t.shape[1] for t in tensors], torch.cat(list(tensors), dim=1))

    def _sizes(self) -> list[int]:
        assert self._stride_per_key is not None
        return [b * d for b, d in zip(self._stride_per_key, self._length_per_key, strict=True)]

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def key_dim(self) -> int:
        return 1

    def length_per_key(self) -> list[int]:
        """Columns of each feature."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        return [0, *accumulate(self._length_per_key)]

    def device(self) -> torch.device:
        return self._values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        moved = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, moved, self._stride_per_key)

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise UnknownFeature(f"feature {key!r} is not in this tensor; it has {self._keys}")
        i = self._keys.index(key)
        if self._stride_per_key is None:
            start = sum(self._length_per_key[:i])
            return self._values[:, start : start + self._length_per_key[i]]
        sizes = self._sizes()
        start = sum(sizes[:i])
        return self._values[start : start + sizes[i]].view(self._stride_per_key[i], self._length_per_key[i])

    def to_dict(self) -> dict[str, Tensor]:
        return {key: self[key] for key in self._keys}

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """One [B, sum of D] tensor per group of feature names, gathered from all of ``keyed_tensors``."""
        found: dict[str, KeyedTensor] = {}
        for kt in reversed(keyed_tensors):
            found.update(dict.fromkeys(kt.keys(), kt))
        for key in (key for group in groups for key in group):
            if key not in found:
                raise UnknownFeature(f"feature {key!r} is in none of the tensors")
        return [torch.cat([found[key][key] for key in group], dim=1) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """``regroup`` with a name for each group."""
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def __repr__(self) -> str:
        return f"KeyedTensor({dict(zip(self._keys, self._length_per_key, strict=True))}, {list(self._values.shape)})"
