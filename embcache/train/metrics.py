"""Metrics of click-through models, exact where the usual implementations are not.

Every function takes one-dimensional torch tensors, numpy arrays or lists of equal length. Ties share their average
rank, so a constant predictor has AUC 0.5 whatever the order of its rows; log loss is in nats; normalised entropy (NE)
is the log loss over the entropy of the base rate (He et al., "Practical Lessons from Predicting Clicks on Ads at
Facebook", ADKDD 2014).
Ranking metrics for sequence models live in ``embcache.train.ranking``.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embcache.errors import NonFiniteScore

__all__ = ["BinaryMetrics", "CalibrationBin", "GroupAuc", "auc", "gauc", "log_loss", "normalized_entropy"]

Vector = Any  # a tensor, an array or a list of numbers

_COARSEST = 16  # low bits of a float32 score that a full histogram may drop: what stays is a bfloat16


class UndefinedMetricWarning(UserWarning):
    """A metric has no value on this data (one class only, no samples) and is NaN."""


def auc(labels: Vector, scores: Vector, weights: Vector | None = None) -> float:
    """Area under the ROC curve, exact, ties at their average rank.

    Args: labels [n] of 0 and 1; scores [n], any monotone score, kept in the precision given; weights [n] >= 0.
    Returns: P(score of a positive > score of a negative) + P(equal) / 2; NaN with a warning when one class is missing.

    >>> auc([0, 1, 1, 0], [0.1, 0.4, 0.35, 0.8])
    0.5
    >>> auc([1, 1, 0, 0, 0], [0.3, 0.3, 0.3, 0.3, 0.3])
    0.5
    """
    y, w = _labels_and_weights(labels, weights)
    s = _checked_scores(scores, len(y))
    order = np.argsort(s, kind="stable")
    starts = _run_starts(s[order])
    positive, negative = _sums_by_class(y[order], w[order], starts)
    return _auc_of_sorted(positive, negative)


def log_loss(labels: Vector, logits: Vector, weights: Vector | None = None) -> float:
    """Mean binary cross-entropy of ``sigmoid(logits)`` in nats, computed from the logits without overflow.

    >>> round(log_loss([1, 0], [0.0, 0.0]), 6)
    0.693147
    >>> log_loss([1, 0], [1000.0, -1000.0])
    0.0
    """
    y, w = _labels_and_weights(labels, weights)
    total = float(w.sum())
    if total == 0:
        return _undefined("log loss", "there are no samples")
    return float((_losses(y, _checked_scores(logits, len(y))) * w).sum()) / total


def normalized_entropy(labels: Vector, logits: Vector, weights: Vector | None = None) -> float:
    """Log loss over the entropy of the base rate: 1 is what predicting the base rate scores, lower is better.

    >>> round(normalized_entropy([1, 0, 0, 0], [-1.0986123] * 4), 6)
    1.0
    """
    y, w = _labels_and_weights(labels, weights)
    if not len(y):
        return _undefined("NE", "there are no samples")
    return _ratio_to_entropy(log_loss(labels, logits, weights), float((w * y).sum()), float(w.sum()))


def gauc(labels: Vector, scores: Vector, groups: Vector, weights: Vector | None = None) -> float:
    """AUC within each group (a user, a session), averaged with the group's impressions (summed weights).

    Groups of one class have no AUC and are left out (Zhu et al., "Optimized Cost per Click in Taobao", KDD 2017).

    >>> gauc([1, 0, 0, 1, 1, 1], [0.9, 0.1, 0.8, 0.3, 0.5, 0.1], [7, 7, 3, 3, 3, 5])
    0.4
    """
    meter = GroupAuc()
    meter.update(labels, scores, groups, weights)
    return meter.compute()


@dataclass(frozen=True)
class CalibrationBin:
    """Samples of similar predictions: their summed weight, mean prediction and observed rate of positives."""

    weight: float
    predicted: float
    observed: float


class BinaryMetrics:
    """Streaming AUC, NE, log loss and calibration of a click model, from logits.

    Exact (at float32, the precision of the logits) while at most ``capacity`` distinct logits were seen: equal logits
    share one entry of 20 bytes. Beyond that the logits lose low bits, one at a time and never below bfloat16, and
    ``auc_error`` bounds what that can have changed. So memory is bounded whatever the number of samples.

    >>> meter = BinaryMetrics()
    >>> meter.update(torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 0.0]))
    >>> meter.compute()["auc"]
    1.0
    """

    def __init__(self, capacity: int = 1 << 22) -> None:
        self._histogram = _Histogram(capacity, grouped=False)
        self._loss = 0.0
        self._predicted = 0.0
        self._samples = 0

    def update(self, logits: Vector, labels: Vector, weights: Vector | None = None) -> None:
        """Add a batch: logits [n], labels [n] of 0 and 1, weights [n] >= 0 (1 by default)."""
        y, w = _labels_and_weights(labels, weights)
        x = _checked_scores(logits, len(y)).astype(np.float32)
        self._loss += float((_losses(y, x) * w).sum())
        self._predicted += float((_sigmoid(x) * w).sum())
        self._samples += len(y)
        self._histogram.add(x, y, w)

    def merge(self, other: BinaryMetrics) -> None:
        """Add what another accumulator (another rank, another part of the data) has seen."""
        self._loss += other._loss
        self._predicted += other._predicted
        self._samples += other._samples
        self._histogram.merge(other._histogram)

    def to_bytes(self) -> bytes:
        """All it has seen, for ``from_bytes`` on another rank."""
        numbers = np.array([self._loss, self._predicted, self._samples], np.float64)
        return numbers.tobytes() + self._histogram.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> BinaryMetrics:
        """The accumulator that ``to_bytes`` was asked of."""
        loss, predicted, samples = np.frombuffer(data, np.float64, 3).tolist()
        histogram = _Histogram.from_bytes(data[24:], grouped=False)
        meter = cls(histogram.capacity)
        meter._loss, meter._predicted, meter._samples, meter._histogram = loss, predicted, int(samples), histogram
        return meter

    @property
    def samples(self) -> int:
        """Samples seen."""
        return self._samples

    @property
    def auc_error(self) -> float:
        """Largest possible distance of ``auc`` from the exact one; 0 while no logit was rounded."""
        _, _, positive, negative = self._histogram.sorted()
        pairs = float(positive.sum()) * float(negative.sum())
        return float((positive * negative).sum()) / (2 * pairs) if self._histogram.shift and pairs else 0.0

    def compute(self) -> dict[str, float]:
        """``auc``, ``ne``, ``logloss`` and ``calibration`` (predicted over observed positives); NaN where undefined."""
        _, _, positive, negative = self._histogram.sorted()
        positives, total = float(positive.sum()), float(positive.sum() + negative.sum())
        if total == 0:
            nan = _undefined("every metric", "there are no samples")
            return {"auc": nan, "ne": nan, "logloss": nan, "calibration": nan}
        loss = self._loss / total
        return {
            "auc": _auc_of_sorted(positive, negative),
            "ne": _ratio_to_entropy(loss, positives, total),
            "logloss": loss,
            "calibration": self._predicted / positives if positives else math.nan,
        }

    def calibration_bins(self, bins: int = 20) -> list[CalibrationBin]:
        """At most ``bins`` bins of about equal weight, in order of the prediction."""
        _, keys, positive, negative = self._histogram.sorted()
        weight = positive + negative
        if not weight.sum():
            return []
        predicted = _sigmoid(_scores_of(keys, self._histogram.shift)) * weight
        # A distinct logit goes whole into the bin in which the middle of its weight lies.
        middle = (np.cumsum(weight) - weight / 2) / weight.sum()
        starts = _run_starts(np.minimum((middle * bins).astype(np.int64), bins - 1))
        sums = [np.add.reduceat(a, starts) for a in (weight, predicted, positive)]
        return [CalibrationBin(w, p / w, y / w) for w, p, y in zip(*(s.tolist() for s in sums), strict=True) if w > 0]


class GroupAuc:
    """Streaming GAUC: (group, score) pairs of 28 bytes; exact up to ``capacity`` distinct ones, then coarser.

    >>> meter = GroupAuc()
    >>> meter.update([1, 0], [0.9, 0.1], [4, 4])
    >>> meter.compute()
    1.0
    """

    def __init__(self, capacity: int = 1 << 24) -> None:
        self._histogram = _Histogram(capacity, grouped=True)

    def update(self, labels: Vector, scores: Vector, groups: Vector, weights: Vector | None = None) -> None:
        """Add a batch: labels [n] of 0 and 1, scores [n] (kept as float32), groups int64 [n], weights [n] >= 0."""
        y, w = _labels_and_weights(labels, weights)
        g = np.asarray(_to_numpy(groups))
        if g.shape != y.shape or not np.issubdtype(g.dtype, np.integer):
            raise ValueError(f"groups must be {len(y)} integers, got {g.dtype} of shape {g.shape}")
        self._histogram.add(_checked_scores(scores, len(y)).astype(np.float32), y, w, g.astype(np.int64))

    def merge(self, other: GroupAuc) -> None:
        """Add what another accumulator has seen."""
        self._histogram.merge(other._histogram)

    def to_bytes(self) -> bytes:
        """All it has seen, for ``from_bytes`` on another rank."""
        return self._histogram.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> GroupAuc:
        """The accumulator that ``to_bytes`` was asked of."""
        histogram = _Histogram.from_bytes(data, grouped=True)
        meter = cls(histogram.capacity)
        meter._histogram = histogram
        return meter

    def compute(self) -> float:
        """The weighted mean of the groups' AUCs; NaN with a warning when no group has both classes."""
        groups, _, positive, negative = self._histogram.sorted()
        if not len(groups):
            return _undefined("GAUC", "there are no samples")
        starts = _run_starts(groups)
        p, n = np.add.reduceat(positive, starts), np.add.reduceat(negative, starts)
        # Negatives below an entry within its group: the running sum less what ran up before the group began.
        below = np.cumsum(negative) - negative
        below -= np.repeat(below[starts], np.diff(np.append(starts, len(groups))))
        won = np.add.reduceat(positive * (below + negative / 2), starts)
        both = (p > 0) & (n > 0)
        if not both.any():
            return _undefined("GAUC", "no group has both classes")
        return float(np.average(won[both] / (p * n)[both], weights=(p + n)[both]))


class _Histogram:
    """Weight of positives and negatives per distinct (group,) score, sorted; scores lose low bits when it is full."""

    def __init__(self, capacity: int, grouped: bool) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.shift = 0  # low bits of the ordered float32 pattern dropped so far
        self._grouped = grouped
        self._pending = 0
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, scores: np.ndarray, y: np.ndarray, w: np.ndarray, groups: np.ndarray | None = None) -> None:
        group = np.zeros(len(y) if self._grouped else 0, np.int64) if groups is None else groups
        self._parts.append((group, _ordered_keys(scores) >> np.uint32(self.shift), w * y, w * (1 - y)))
        self._pending += len(y)
        if self._pending > max(self.capacity // 2, 1 << 16):
            self._compact()

    def merge(self, other: _Histogram) -> None:
        self._coarsen(max(self.shift, other.shift) - self.shift)
        group, keys, positive, negative = other.sorted()
        self._parts.append((group, keys >> np.uint32(self.shift - other.shift), positive, negative))
        self._compact()

    def to_bytes(self) -> bytes:
        columns = self.sorted()
        head = np.array([self.capacity, self.shift, len(columns[1])], np.int64)
        return b"".join([head.tobytes(), *(column.tobytes() for column in columns)])

    @classmethod
    def from_bytes(cls, data: bytes, grouped: bool) -> _Histogram:
        capacity, shift, n = np.frombuffer(data, np.int64, 3).tolist()
        histogram, columns, place = cls(capacity, grouped), [], 24
        for kind, length in ((np.int64, n if grouped else 0), (np.uint32, n), (np.float64, n), (np.float64, n)):
            columns.append(np.frombuffer(data, kind, length, place))
            place += columns[-1].nbytes
        histogram.shift, histogram._parts = shift, [(columns[0], columns[1], columns[2], columns[3])]
        return histogram

    def sorted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(groups, keys, weight of positives, weight of negatives), by group then score; no groups when ungrouped."""
        self._compact()
        return self._parts[0]

    def _compact(self) -> None:
        if self._pending or len(self._parts) != 1:
            self._parts = [_joined(self._parts, self._grouped)]
            self._pending = 0
        while len(self._parts[0][1]) > self.capacity and self.shift < _COARSEST:
            self._coarsen(1)
        if self._grouped and len(self._parts[0][1]) > self.capacity:
            raise ValueError(f"more than {self.capacity} pairs of group and bfloat16 score: raise the capacity")

    def _coarsen(self, bits: int) -> None:
        if bits <= 0:
            return
        self.shift += bits
        shifted = [(g, k >> np.uint32(bits), p, n) for g, k, p, n in self._parts]
        self._parts = [_joined(shifted, self._grouped)]


Part = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _joined(parts: list[Part], grouped: bool) -> Part:
    """Concatenate, sort by (group, key) and add up equal ones."""
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.uint32), np.empty(0), np.empty(0)
    group, keys, positive, negative = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((keys, group)) if grouped else np.argsort(keys, kind="stable")
    keys = keys[order]
    if grouped:
        group = group[order]
        starts = np.flatnonzero(np.append(True, (keys[1:] != keys[:-1]) | (group[1:] != group[:-1]))[: len(keys)])
        group = group[starts]
    else:
        starts = _run_starts(keys)
    if not len(starts):
        return group, keys, positive, negative
    sums = (np.add.reduceat(a[order], starts) for a in (positive, negative))
    return group, keys[starts], next(sums), next(sums)


def _ordered_keys(scores: np.ndarray) -> np.ndarray:
    """uint32 that sort as the float32 scores do; -0.0 equals +0.0."""
    bits = (scores + np.float32(0)).view(np.uint32)
    return np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(0x80000000))


def _scores_of(keys: np.ndarray, shift: int) -> np.ndarray:
    """The float32 scores of ordered keys (the middle of what a shifted key covers)."""
    full = (keys << np.uint32(shift)) | np.uint32((1 << shift) >> 1)
    return np.where(full >> np.uint32(31), full & np.uint32(0x7FFFFFFF), ~full).view(np.float32)


def _run_starts(values: np.ndarray) -> np.ndarray:
    """Position of the first of each run of equal values."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])


def _sums_by_class(y: np.ndarray, w: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(starts):
        return np.empty(0), np.empty(0)
    return np.add.reduceat(w * y, starts), np.add.reduceat(w * (1 - y), starts)


def _auc_of_sorted(positive: np.ndarray, negative: np.ndarray) -> float:
    """AUC from the weight of each class at each distinct score, in ascending order."""
    p, n = float(positive.sum()), float(negative.sum())
    if p == 0 or n == 0:
        return _undefined("AUC", f"all labels are {0 if p == 0 else 1}" if p or n else "there are no samples")
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / (p * n))


def _losses(y: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """softplus(-x) of positives, softplus(x) of negatives, in float64; exact limits for infinite logits."""
    return np.logaddexp(0.0, np.where(y > 0, -1.0, 1.0) * logits.astype(np.float64))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x.astype(np.float64)))


def _ratio_to_entropy(loss: float, positives: float, total: float) -> float:
    rate = positives / total if total else 0.0
    if rate in (0.0, 1.0):
        return _undefined("NE", f"all labels are {int(rate)}, so the base rate has no entropy")
    return loss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def _labels_and_weights(labels: Vector, weights: Vector | None) -> tuple[np.ndarray, np.ndarray]:
    y = np.asarray(_to_numpy(labels), np.float64)
    if y.ndim != 1:
        raise ValueError(f"labels must have one dimension, got shape {y.shape}")
    wrong = np.flatnonzero((y != 0) & (y != 1))
    if len(wrong):
        raise ValueError(f"labels[{wrong[0]}] = {y[wrong[0]]}, expected 0 or 1")
    if weights is None:
        return y, np.ones_like(y)
    w = np.asarray(_to_numpy(weights), np.float64)
    if w.shape != y.shape:
        raise ValueError(f"{len(y)} labels but weights of shape {w.shape}")
    wrong = np.flatnonzero(~((w >= 0) & np.isfinite(w)))
    if len(wrong):
        raise ValueError(f"weights[{wrong[0]}] = {w[wrong[0]]}, expected a finite number >= 0")
    return y, w


def _checked_scores(scores: Vector, n: int) -> np.ndarray:
    s = np.asarray(_to_numpy(scores))
    if s.shape != (n,):
        raise ValueError(f"{n} labels but scores of shape {s.shape}")
    if not np.issubdtype(s.dtype, np.floating):
        s = s.astype(np.float64)
    wrong = np.flatnonzero(np.isnan(s))
    if len(wrong):
        raise NonFiniteScore(f"scores[{wrong[0]}] is nan: the model has diverged, or its input is not a number")
    return s


def _to_numpy(values: Vector) -> Any:
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()


def _undefined(metric: str, reason: str) -> float:
    warnings.warn(f"{metric} is undefined: {reason}", UndefinedMetricWarning, stacklevel=3)
    return math.nan
