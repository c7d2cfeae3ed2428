"""The update rules in plain torch: ``apply`` takes fp32 rows, state and summed gradients, returns new rows and state.

One function a rule, formulas as in ``embcache.optim``. Reductions over the dimension use 16 lanes (lane = column % 16)
and a fixed tree, like the native kernels. Computing in fp64 instead (``w``, ``state`` and ``g`` given as fp64) makes
this the oracle of the tolerance tests. A row whose columns lie in several tables is updated part by part, each with the
sums over all of its columns (``RowSums``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Hyper = list[float]
SUMS = 3


def state_floats(rule: int, dim: int, flags: int) -> int:
    """fp32 numbers of state in a row, by the kernels' number of the rule."""
    wide, scalars = ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 0), (1, 0), (2, 0))[rule]
    return wide * dim + scalars + (1 if flags & 8 else 0)


def lane_sum(x: Tensor) -> Tensor:
    """[n, 1] sums of [n, dim]: 16 lanes, then a tree of 8, 4, 2, 1."""
    dim = x.shape[1]
    if dim % 16:
        x = torch.nn.functional.pad(x, (0, 16 - dim % 16))
    blocks = x.reshape(x.shape[0], x.shape[1] // 16, 16)
    lanes = blocks[:, 0]
    for b in range(1, blocks.shape[1]):
        lanes = lanes + blocks[:, b]
    for width in (8, 4, 2, 1):
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return lanes


class RowSums:
    """What a rule sums over the columns of a row: its first and second sum, and w * w for max_norm.

    Attributes:
        columns: of a whole row.
        given: [n, 3] sums over all columns, to be used in place of those over the columns there are; or None.
        found: [n, 3], those over the columns there are.
    """

    def __init__(self, rows: int, columns: int, given: Tensor | None = None) -> None:
        self.columns, self.given = columns, given
        self.found = torch.zeros(rows, SUMS)

    def __call__(self, which: int, x: Tensor) -> Tensor:
        """[n, 1]: the sum that is to be used."""
        mine = lane_sum(x)
        self.found[:, which] = mine[:, 0]
        return mine if self.given is None else self.given[:, which : which + 1].to(x.dtype)

    def mean(self, which: int, x: Tensor) -> Tensor:
        """[n, 1]: the same by column."""
        return self(which, x) / self.columns

    def norm(self, which: int, x: Tensor) -> Tensor:
        """[n, 1]: Euclidean."""
        return self(which, x * x).sqrt()


def _number(x: float, like: Tensor) -> Tensor:
    return torch.tensor(x, dtype=like.dtype)


def _sgd(h: Hyper, flags: int, w: Tensor, state: Tensor, g: Tensor, row: RowSums) -> tuple[Tensor, Tensor]:
    lr, decay = _number(h[0], w), _number(h[1], w)
    return w - lr * (g + decay * w if h[1] else g), state


def _adagrad(h: Hyper, flags: int, w: Tensor, state: Tensor, g: Tensor, row: RowSums) -> tuple[Tensor, Tensor]:
    state = state + g * g
    return w - _guarded(_number(h[0], w) * g, state.sqrt() + _number(h[2], w)), state


def _guarded(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, and 0 where the denominator is 0 (eps = 0 and no gradient yet)."""
    return torch.where(denominator == 0, torch.zeros_like(numerator), numerator / denominator)


def _row_wise_adagrad(h: Hyper, flags: int, w: Tensor, state: Tensor, g: Tensor, row: RowSums) -> tuple[Tensor, Tensor]:
    lr, decay, eps, c = (_number(h[i], w) for i in (0, 1, 2, 12))
    mode = flags >> 1 & 3
    used = g + decay * w if mode == 1 else g
    state = state + row.mean(0, used * used)
    scaled = state if h[12] == 1.0 else state / c
    denominator = scaled.sqrt() + eps
    mul = _guarded(lr.expand_as(denominator), denominator)
    if mode == 1:
        w = (1 - mul * decay) * w - mul * g
    elif mode == 2:
        w = (1 - lr * decay) * w - mul * g
    else:
        w = w - mul * g
    if h[11] > 0:
        limit = _number(h[11], w)
        norm = row.norm(2, w)
        w = torch.where(norm > limit, w * (limit / norm), w)
    return w, state


def _adam_parts(
    h: Hyper, flags: int, w: Tensor, state: Tensor, g: Tensor, row: RowSums | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(mhat / (sqrt(vhat) + eps), weight decay factor, new state); ``row``: of the row-wise rule."""
    dim = w.shape[1]
    b1, b2, eps = (_number(h[i], w) for i in (3, 4, 2))
    m, v = state[:, :dim], state[:, dim : 2 * dim] if row is None else state[:, dim : dim + 1]
    square = g * g if row is None else row.mean(0, g * g)
    m = b1 * m + _number(1 - h[3], w) * g
    v = b2 * v + _number(1 - h[4], w) * square
    parts = [m, v]
    if flags & 8:
        t = state[:, -1:] + 1
        parts.append(t)
        steps = t.to(torch.float64)
        c1, c2 = (1 - torch.pow(h[3], steps)).to(w.dtype), (1 - torch.pow(h[4], steps)).to(w.dtype)
    else:
        c1, c2 = _number(1 - h[3] ** h[13], w), _number(1 - h[4] ** h[13], w)
    ratio = _guarded(m / c1, ((v / c2).sqrt() + eps).expand_as(m))
    return ratio, torch.cat(parts, 1), _number(h[1], w)


def _adam(h: Hyper, flags: int, w: Tensor, state: Tensor, g: Tensor, row: RowSums) -> tuple[Tensor, Tensor]:
    ratio, state, decay = _adam_parts(h, flags, w, state, g, None)
    return w - _number(h[0], w) * (ratio + decay * w), state


def _row_wise_adam(h: Hyper, flags: int, w: Tensor, state: Tensor, g: Tensor, row: RowSums) -> tuple[Tensor, Tensor]:
    ratio, state, decay = _adam_parts(h, flags, w, state, g, row)
    return w - _number(h[0], w) * (ratio + decay * w), state


def _lamb(h: Hyper, flags: int, w: Tensor, state: Tensor, g: Tensor, row: RowSums) -> tuple[Tensor, Tensor]:
    ratio, state, decay = _adam_parts(h, flags, w, state, g, None)
    r = ratio + decay * w
    norm_w, norm_r = row.norm(0, w), row.norm(1, r)
    trust = torch.where((norm_w == 0) | (norm_r == 0), torch.ones_like(norm_w), norm_w / norm_r)
    return w - _number(h[0], w) * trust * r, state


def _lars(h: Hyper, flags: int, w: Tensor, state: Tensor, g: Tensor, row: RowSums) -> tuple[Tensor, Tensor]:
    lr, decay, momentum, eta = (_number(h[i], w) for i in (0, 1, 5, 6))
    norm_w, norm_g = row.norm(0, w), row.norm(1, g)
    rate = lr * eta * norm_w / (norm_g + decay * norm_w)
    a = torch.where(norm_w == 0, lr, torch.where(norm_g + decay * norm_w == 0, torch.zeros_like(rate), rate))
    m = momentum * state + a * (g + decay * w)
    return w - m, m


def _ftrl(h: Hyper, flags: int, w: Tensor, state: Tensor, g: Tensor, row: RowSums) -> tuple[Tensor, Tensor]:
    dim = w.shape[1]
    alpha, beta, l1, l2 = (_number(h[i], w) for i in (7, 8, 9, 10))
    z, n = state[:, :dim], state[:, dim:]
    grown = n + g * g
    z = z + g - (grown.sqrt() - n.sqrt()) / alpha * w
    new = _guarded(-(z - z.sign() * l1), (beta + grown.sqrt()) / alpha + l2)
    return torch.where(z.abs() <= l1, torch.zeros_like(w), new), torch.cat([z, grown], 1)


_RULES: tuple[Callable[[Hyper, int, Tensor, Tensor, Tensor, RowSums], tuple[Tensor, Tensor]], ...] = (
    _sgd, _adagrad, _row_wise_adagrad, _adam, _row_wise_adam, _lamb, _lars, _ftrl,
)  # fmt: skip


def apply(
    rule: int, flags: int, hyper: Hyper, w: Tensor, state: Tensor, g: Tensor, row: RowSums | None = None
) -> tuple[Tensor, Tensor]:
    """New (weights, state) of [n, dim] rows after one step; neither argument is changed. ``row`` None: whole rows."""
    return _RULES[rule](hyper, flags, w, state, g, RowSums(*w.shape) if row is None else row)
