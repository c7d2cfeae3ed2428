"""Jagged batches: for every feature and sample a list of ids of any length. Method names follow TorchRec, so that code
written for its ``KeyedJaggedTensor`` runs unchanged; contradictions are found at construction, with their position.

A batch of F = 2 features and B = 3 samples::

    #            sample 0   sample 1   sample 2
    # "movie"    [7, 8]     []         [9]
    # "user"     [1]        [2]        [3, 4, 5]
    #
    # keys    = ["movie", "user"]
    # values  = [7, 8, 9, 1, 2, 3, 4, 5]      feature-major: all of "movie", then all of "user"
    # lengths = [2, 0, 1, 1, 1, 3]            F * B of them
    # offsets = [0, 2, 2, 3, 4, 5, 8]         where each bag begins, and the end

>>> kjt = KeyedJaggedTensor(["movie", "user"], torch.tensor([7, 8, 9, 1, 2, 3, 4, 5]),
...                         lengths=torch.tensor([2, 0, 1, 1, 1, 3]))
>>> kjt.stride(), kjt.length_per_key(), kjt["user"].to_dense()
(3, [3, 5], [tensor([1]), tensor([2]), tensor([3, 4, 5])])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from .errors import BadJagged, BadJaggedType, UnknownFeature
from .jagged_checks import check_index, check_offsets, check_one_of, check_weights, offsets_from_lengths


class JaggedTensor:
    """B lists of different lengths: ``values`` [n, ...], and ``lengths`` [B] or ``offsets`` [B + 1].

    >>> jt = JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 0, 1]))
    >>> jt.to_padded_dense()
    tensor([[1., 2.],
            [0., 0.],
            [3., 0.]])
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        check_one_of(lengths, offsets)
        check_weights(weights, values.shape[0])
        if offsets is None:
            assert lengths is not None
            check_index(lengths, "lengths")
            offsets = offsets_from_lengths(lengths, values.shape[0])
        else:
            check_index(offsets, "offsets")
            check_offsets(offsets, values.shape[0])
        self._set(values, weights, lengths, offsets)

    def _set(self, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor) -> None:
        self._values, self._weights, self._lengths, self._offsets = values, weights, lengths, offsets

    @classmethod
    def _trusted(cls, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor) -> JaggedTensor:
        out = cls.__new__(cls)
        out._set(values, weights, lengths, offsets)
        return out

    @staticmethod
    def from_dense(values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> JaggedTensor:
        """From one tensor per list."""
        lengths = torch.tensor([v.shape[0] for v in values], dtype=torch.int64)
        flat = torch.cat(list(values)) if values else torch.empty(0)
        return JaggedTensor(flat, torch.cat(list(weights)) if weights else None, lengths)

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """From padded ``values`` [B, L, ...] of which list i uses the first ``lengths[i]``."""
        mask = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
        return JaggedTensor(values[mask], None if weights is None else weights[mask], lengths)

    def values(self) -> Tensor:
        return self._values

    def weights(self) -> Tensor:
        if self._weights is None:
            raise BadJagged("this jagged tensor has no weights")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def offsets(self) -> Tensor:
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        return self._offsets

    def lengths(self) -> Tensor:
        if self._lengths is None:
            self._lengths = self._offsets[1:] - self._offsets[:-1]
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        return self._lengths

    def device(self) -> torch.device:
        return self._values.device

    def with_values(self, values: Tensor) -> JaggedTensor:
        """The same lists with other ``values`` [n, ...]."""
        if values.shape[0] != self._values.shape[0]:
            raise BadJagged(f"{values.shape[0]} values for lists that hold {self._values.shape[0]}")
        return self._trusted(values, self._weights, self._lengths, self._offsets)

    def to_dense(self) -> list[Tensor]:
        """One tensor per list."""
        at = self._offsets.tolist()
        return [self._values[a:b] for a, b in pairwise(at)]

    def to_dense_weights(self) -> list[Tensor] | None:
        if self._weights is None:
            return None
        at = self._offsets.tolist()
        return [self._weights[a:b] for a, b in pairwise(at)]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[B, L, ...] with L the longest list or ``desired_length``; longer lists lose their end. Differentiable."""
        return self._pad(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        return None if self._weights is None else self._pad(self._weights, desired_length, padding_value)

    def _pad(self, values: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        lengths, rows = self.lengths(), self._offsets.numel() - 1
        width = desired_length if desired_length is not None else (int(lengths.max()) if rows else 0)
        row = torch.repeat_interleave(torch.arange(rows, device=lengths.device), lengths)
        column = torch.arange(values.shape[0], device=lengths.device) - self._offsets[row]
        keep = column < width
        out = values.new_full((rows, width, *values.shape[1:]), padding_value)
        return out.index_put((row[keep], column[keep]), values[keep])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        return self._trusted(*(None if t is None else t.to(device, non_blocking=non_blocking) for t in self._parts()))  # type: ignore[arg-type]

    def pin_memory(self) -> JaggedTensor:
        return self._trusted(*(None if t is None else t.pin_memory() for t in self._parts()))  # type: ignore[arg-type]

    def _parts(self) -> tuple[Tensor | None, ...]:
        return self._values, self._weights, self._lengths, self._offsets

    def __repr__(self) -> str:
        return f"JaggedTensor(lists={self._offsets.numel() - 1}, values={list(self._values.shape)})"


class KeyedJaggedTensor:
    """F features of B bags of ids each, feature-major (see the drawing at the top of this module).

    Args:
        keys: names of the F features, unique.
        values: int32 or int64 [n], the ids.
        weights: floating [n], a weight per id, or None.
        lengths, offsets: one of them; see above.
        stride: B. Needed only where it cannot be told (no features).
        stride_per_key: B of each feature, where they differ.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key: Sequence[int] | None = None,
    ) -> None:
        if isinstance(keys, str):
            raise BadJaggedType(f"keys = {keys!r}, must be a list of names, not one string")
        keys = list(keys)
        for i, key in enumerate(keys):
            if not isinstance(key, str):
                raise BadJaggedType(f"keys[{i}] = {key!r}, must be a string")
            if key in keys[:i]:
                raise BadJagged(f"keys[{i}] = {key!r} is already at position {keys.index(key)}")
        check_index(values, "values")
        check_weights(weights, values.numel())
        check_one_of(lengths, offsets)
        name, given = ("lengths", lengths) if offsets is None else ("offsets", offsets)
        assert given is not None
        check_index(given, name)
        bags = given.numel() - (offsets is not None)
        strides = self._strides(keys, bags, name, stride, stride_per_key)
        if offsets is None:
            offsets = offsets_from_lengths(given, values.numel())
        else:
            check_offsets(offsets, values.numel())
        self._set(keys, values, weights, lengths, offsets, strides)

    @staticmethod
    def _strides(
        keys: list[str], bags: int, name: str, stride: int | None, per_key: Sequence[int] | None
    ) -> tuple[int, ...]:
        if per_key is not None:
            strides = tuple(int(b) for b in per_key)
            if len(strides) != len(keys) or min(strides, default=0) < 0:
                raise BadJagged(f"stride_per_key = {list(per_key)}, must be {len(keys)} numbers >= 0")
            if stride is not None and stride != max(strides, default=0):
                raise BadJagged(f"stride = {stride} contradicts stride_per_key = {list(per_key)}")
            if sum(strides) != bags:
                raise BadJagged(f"{name} describe {bags} bags but stride_per_key sums to {sum(strides)}")
            return strides
        if not keys:
            if bags:
                raise BadJagged(f"{name} describe {bags} bags but there are no keys")
            return ()
        if bags % len(keys):
            raise BadJagged(f"{name} describe {bags} bags, not divisible by {len(keys)} keys")
        if stride is not None and stride * len(keys) != bags:
            raise BadJagged(f"{name} describe {bags} bags but stride {stride} x {len(keys)} keys needs another number")
        return (bags // len(keys),) * len(keys)

    def _set(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor,
        strides: tuple[int, ...],
    ) -> None:
        # the kernels read memory as it lies: strided and expanded tensors are copied, others pass as they are
        self._keys, self._values = keys, values.contiguous()
        self._weights = None if weights is None else weights.contiguous()
        self._lengths, self._offsets, self._stride_per_key = lengths, offsets.contiguous(), strides
        self._offset_per_key: list[int] | None = None
        self._suffixed: dict[str, KeyedJaggedTensor] = {}
        self.staged: Any = None  # the handle that look-ahead puts here; modules use it where it is theirs

    @classmethod
    def _trusted(cls, *parts: Any) -> KeyedJaggedTensor:
        out = cls.__new__(cls)
        out._set(*parts)
        return out

    @staticmethod
    def trusted(
        keys: list[str], values: Tensor, weights: Tensor | None, offsets: Tensor, strides: tuple[int, ...]
    ) -> KeyedJaggedTensor:
        """Without the checks, for callers that made ``offsets`` themselves."""
        return KeyedJaggedTensor._trusted(keys, values, weights, None, offsets, strides)

    # construction -----------------------------------------------------------------------------------------------

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key: Sequence[int] | None = None,
    ) -> KeyedJaggedTensor:
        """From lengths [F * B]."""
        return KeyedJaggedTensor(keys, values, weights, lengths, None, stride, stride_per_key)

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key: Sequence[int] | None = None,
    ) -> KeyedJaggedTensor:
        """From offsets [F * B + 1]."""
        return KeyedJaggedTensor(keys, values, weights, None, offsets, stride, stride_per_key)

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """From one JaggedTensor per feature, in the dict's order; their batch sizes may differ."""
        parts = list(jt_dict.values())
        weighted = [jt.weights_or_none() is not None for jt in parts]
        if any(weighted) and not all(weighted):
            raise BadJagged(f"feature {list(jt_dict)[weighted.index(False)]!r} has no weights but others have")
        if not parts:
            return KeyedJaggedTensor.empty()
        return KeyedJaggedTensor(
            list(jt_dict),
            torch.cat([jt.values() for jt in parts]),
            torch.cat([jt.weights() for jt in parts]) if all(weighted) else None,
            torch.cat([jt.lengths() for jt in parts]),
            stride_per_key=[jt.offsets().numel() - 1 for jt in parts],
        )

    @staticmethod
    def empty(is_weighted: bool = False, device: torch.device | str | None = None) -> KeyedJaggedTensor:
        """No features, no samples, no values."""
        values = torch.empty(0, dtype=torch.int64, device=device)
        weights = torch.empty(0, device=device) if is_weighted else None
        return KeyedJaggedTensor([], values, weights, lengths=torch.empty(0, dtype=torch.int64, device=device))

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The features of all, one after the other."""
        if not kjt_list:
            return KeyedJaggedTensor.empty()
        weighted = [kjt.weights_or_none() is not None for kjt in kjt_list if kjt.keys()]
        if any(weighted) and not all(weighted):
            raise BadJagged("cannot concatenate batches of which only some have weights")
        return KeyedJaggedTensor(
            list(chain.from_iterable(kjt.keys() for kjt in kjt_list)),
            torch.cat([kjt.values() for kjt in kjt_list]),
            torch.cat([kjt.weights() for kjt in kjt_list if kjt.keys()]) if weighted and all(weighted) else None,
            torch.cat([kjt.lengths() for kjt in kjt_list]),
            stride_per_key=[b for kjt in kjt_list for b in kjt.stride_per_key()],
        )

    @staticmethod
    def adopt(batch: Any) -> KeyedJaggedTensor:
        """``batch`` itself, or TorchRec's KeyedJaggedTensor (anything with its methods) as one of ours, validated."""
        if isinstance(batch, KeyedJaggedTensor):
            return batch
        needed = ("keys", "values", "offsets", "stride_per_key", "weights_or_none")
        missing = [name for name in needed if not hasattr(batch, name)]
        if missing:
            raise BadJaggedType(f"a {type(batch).__name__} is no KeyedJaggedTensor: it lacks {missing[0]}()")
        return KeyedJaggedTensor(
            batch.keys(),
            batch.values(),
            batch.weights_or_none(),
            offsets=batch.offsets(),
            stride_per_key=batch.stride_per_key(),
        )

    # reading ----------------------------------------------------------------------------------------------------

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def weights(self) -> Tensor:
        if self._weights is None:
            raise BadJagged("this batch has no weights")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def lengths(self) -> Tensor:
        if self._lengths is None:
            self._lengths = self._offsets[1:] - self._offsets[:-1]
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        return self._lengths

    def offsets(self) -> Tensor:
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        return self._offsets

    def stride(self) -> int:
        """B (the largest, where features differ)."""
        return max(self._stride_per_key, default=0)

    def stride_per_key(self) -> list[int]:
        return list(self._stride_per_key)

    @property
    def strides(self) -> tuple[int, ...]:
        """``stride_per_key()`` as a tuple."""
        return self._stride_per_key

    def variable_stride_per_key(self) -> bool:
        return len(set(self._stride_per_key)) > 1

    def lengths_offset_per_key(self) -> list[int]:
        """Where each feature's bags begin in ``lengths``, and the end."""
        return [0, *accumulate(self._stride_per_key)]

    def offset_per_key(self) -> list[int]:
        """Where each feature's ids begin in ``values``, and the end."""
        if self._offset_per_key is None:
            self._offset_per_key = self._offsets[self.lengths_offset_per_key()].tolist()
        return self._offset_per_key

    def length_per_key(self) -> list[int]:
        """Number of ids of each feature."""
        at = self.offset_per_key()
        return [b - a for a, b in pairwise(at)]

    def index_per_key(self) -> dict[str, int]:
        return {key: i for i, key in enumerate(self._keys)}

    def device(self) -> torch.device:
        return self._values.device

    def size_in_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors() if t is not None)

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise UnknownFeature(f"feature {key!r} is not in this batch; it has {self._keys}")
        return self._feature(self._keys.index(key))

    def _feature(self, i: int) -> JaggedTensor:
        bags, ids = self.lengths_offset_per_key(), self.offset_per_key()
        return JaggedTensor._trusted(
            self._values[ids[i] : ids[i + 1]],
            None if self._weights is None else self._weights[ids[i] : ids[i + 1]],
            None if self._lengths is None else self._lengths[bags[i] : bags[i + 1]],
            self._offsets[bags[i] : bags[i + 1] + 1] - ids[i],
        )

    def to_dict(self) -> dict[str, JaggedTensor]:
        return {key: self._feature(i) for i, key in enumerate(self._keys)}

    # selecting --------------------------------------------------------------------------------------------------

    def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
        """The features at ``indices``, in that order."""
        for i in indices:
            if not 0 <= i < len(self._keys):
                raise BadJagged(f"feature index {i}, valid range [0, {len(self._keys)})")
        bags, ids, lengths = self.lengths_offset_per_key(), self.offset_per_key(), self.lengths()
        at = [slice(ids[i], ids[i + 1]) for i in indices]
        picked = [lengths[bags[i] : bags[i + 1]] for i in indices]
        weights = self._weights
        return KeyedJaggedTensor(
            [self._keys[i] for i in indices],
            torch.cat([self._values[s] for s in at] or [self._values[:0]]),
            None if weights is None else torch.cat([weights[s] for s in at] or [weights[:0]]),
            torch.cat(picked or [lengths[:0]]),
            stride_per_key=[self._stride_per_key[i] for i in indices],
        )

    def with_suffix(self, suffix: str) -> KeyedJaggedTensor:
        """The same bags under keys that end in ``suffix``; asked again, the same object."""
        if suffix not in self._suffixed:
            keys = [key + suffix for key in self._keys]
            self._suffixed[suffix] = self._trusted(keys, *self._tensors(), self._stride_per_key)
        return self._suffixed[suffix]

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Consecutive groups of features: ``segments`` holds how many each group gets."""
        if sum(segments) != len(self._keys) or min(segments, default=0) < 0:
            raise BadJagged(f"segments {list(segments)} do not add up to {len(self._keys)} features")
        bags, ids, lengths = self.lengths_offset_per_key(), self.offset_per_key(), self.lengths()
        out, start = [], 0
        for count in segments:
            stop = start + count
            values, bag = slice(ids[start], ids[stop]), slice(bags[start], bags[stop])
            out.append(
                self._trusted(
                    self._keys[start:stop],
                    self._values[values],
                    None if self._weights is None else self._weights[values],
                    lengths[bag],
                    self._offsets[bags[start] : bags[stop] + 1] - ids[start],
                    self._stride_per_key[start:stop],
                )
            )
            start = stop
        return out

    def masked(self, values: Tensor, keep: Tensor | None) -> KeyedJaggedTensor:
        """The same bags with other ``values``, without those where ``keep`` (bool [n]) is False."""
        weights, offsets = self._weights, self._offsets
        if keep is None:
            return self._trusted(self._keys, values, weights, self._lengths, offsets, self._stride_per_key)
        before = torch.zeros(keep.numel() + 1, dtype=torch.int64, device=keep.device)
        torch.cumsum(keep, 0, dtype=torch.int64, out=before[1:])
        weights = None if weights is None else weights[keep]
        return self._trusted(self._keys, values[keep], weights, None, before[offsets], self._stride_per_key)

    # moving -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self._values, self._weights, self._lengths, self._offsets

    def _rebuilt(self, tensors: Iterable[Tensor | None]) -> KeyedJaggedTensor:
        return self._trusted(self._keys, *tensors, self._stride_per_key)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        return self._rebuilt(None if t is None else t.to(device, non_blocking=non_blocking) for t in self._tensors())

    def pin_memory(self) -> KeyedJaggedTensor:
        return self._rebuilt(None if t is None else t.pin_memory() for t in self._tensors())

    def record_stream(self, stream: Any) -> None:
        for tensor in self._tensors():
            if tensor is not None:
                tensor.record_stream(stream)

    def sync(self) -> KeyedJaggedTensor:
        """Counts are known at once here; exists for callers of TorchRec's method."""
        self.offset_per_key()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: pins stay with the original."""
        return {**self.__dict__, "_suffixed": {}, "staged": None}

    def __repr__(self) -> str:
        per_key = dict(zip(self._keys, zip(self._stride_per_key, self.length_per_key(), strict=True), strict=True))
        return f"KeyedJaggedTensor({{feature: (bags, ids)}} = {per_key}, weighted={self._weights is not None})"
