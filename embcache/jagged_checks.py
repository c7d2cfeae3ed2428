"""What a jagged layout must satisfy: each check names the first position that does not."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .errors import BadJagged, BadJaggedType

INDEX_DTYPES = (torch.int32, torch.int64)


def check_index(tensor: Tensor, what: str) -> None:
    if not isinstance(tensor, Tensor):
        raise BadJaggedType(f"{what} is a {type(tensor).__name__}, must be a tensor")
    if tensor.dtype not in INDEX_DTYPES:
        raise BadJaggedType(f"{what} has dtype {tensor.dtype}, must be torch.int32 or torch.int64")
    if tensor.dim() != 1:
        raise BadJagged(f"{what} has shape {list(tensor.shape)}, must be one-dimensional")


def offsets_from_lengths(lengths: Tensor, n: int) -> Tensor:
    """int64 [len(lengths) + 1]; lengths must be >= 0 and sum to ``n``."""
    high = 0
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    if lengths.numel():
        if lengths.device.type == "cpu":  # numpy: torch would wake its threads for a minimum
            array = lengths.numpy()
            np.cumsum(array, dtype=np.int64, out=offsets.numpy()[1:])
            low, high = array.min(), array.max()
        else:
            torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
            low, high = (int(x) for x in lengths.aminmax())
        if low < 0:
            i = int((lengths < 0).nonzero()[0])
            raise BadJagged(f"lengths[{i}] = {int(lengths[i])}, must be >= 0")
    if int(offsets[-1]) != n:
        raise BadJagged(f"sum(lengths) = {int(offsets[-1])} but there are {n} values")
    if high > n:  # the sum went around
        i = int((lengths > n).nonzero()[0])
        raise BadJagged(f"lengths[{i}] = {int(lengths[i])} but there are {n} values")
    return offsets


def check_offsets(offsets: Tensor, n: int) -> None:
    """offsets must begin at 0, never decrease and end at ``n``."""
    if offsets.numel() < 1:
        raise BadJagged("offsets is empty, must hold at least the leading 0")
    if int(offsets[0]) != 0:
        raise BadJagged(f"offsets[0] = {int(offsets[0])}, must be 0")
    down = offsets[1:] < offsets[:-1]
    if bool(down.any()):
        i = int(down.nonzero()[0]) + 1
        raise BadJagged(f"offsets[{i}] = {int(offsets[i])} is below offsets[{i - 1}] = {int(offsets[i - 1])}")
    if int(offsets[-1]) != n:
        raise BadJagged(f"offsets[{offsets.numel() - 1}] = {int(offsets[-1])} but there are {n} values")


def check_weights(weights: Tensor | None, n: int) -> None:
    if weights is None:
        return
    if not isinstance(weights, Tensor):
        raise BadJaggedType(f"weights is a {type(weights).__name__}, must be a tensor")
    if not weights.is_floating_point():
        raise BadJaggedType(f"weights has dtype {weights.dtype}, must be floating point")
    if weights.dim() != 1 or weights.numel() != n:
        raise BadJagged(f"weights has shape {list(weights.shape)} but there are {n} values")


def check_one_of(lengths: Tensor | None, offsets: Tensor | None) -> None:
    if (lengths is None) == (offsets is None):
        raise BadJagged(f"give either lengths or offsets, got {'both' if lengths is not None else 'neither'}")
