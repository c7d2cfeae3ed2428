"""Kernels of the synthetic log: one row is a pure function of (model, row number)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dlrm.data.hashing import GOLDEN, bits_for, feistel, mix64
from embcache.kernels.jit import I64, U64, inline, kernel

MISSING_DENSE = np.int64(-(2**62))
_S11, _S16, _S32, _S48 = np.uint64(11), np.uint64(16), np.uint64(32), np.uint64(48)
_LOW16, _LOW32 = np.uint64(0xFFFF), np.uint64(0xFFFFFFFF)
_M1, _M2 = np.uint64(0x85EBCA6B), np.uint64(0xC2B2AE35)
_H13 = np.uint64(13)


class Model(NamedTuple):
    """The planted model as arrays. F tables, D dense columns, P interacting pairs of rank K."""

    key: np.ndarray  # uint64 [3]: rows, effects, tokens
    drift: float  # share of a table's ids that the popularity order moves by, a row
    cards: np.ndarray  # int64 [F]
    reach: np.ndarray  # float64 [F] (n + 1)**gamma - 1, gamma = 1 - alpha; log(n + 1) where gamma is 0
    power: np.ndarray  # float64 [F] 1 / gamma; 0 where gamma is 0
    missing: np.ndarray  # float64 [F]
    effect: np.ndarray  # float64 [F] weight of an id's own effect
    pairs: np.ndarray  # int64 [P, 2]
    pair_effect: np.ndarray  # float64 [P] weight of the dot product, 1 / sqrt(K) included
    rank: int
    dense_mean: np.ndarray  # float64 [D] of log1p
    dense_std: np.ndarray  # float64 [D]
    dense_missing: np.ndarray  # float64 [D]
    slope: np.ndarray  # float64 [D]
    curve: np.ndarray  # float64 [D]


@inline
def _uniform(h: U64) -> float:
    return np.float64(h >> _S11) * (1.0 / 9007199254740992.0)


@inline
def _bell(h: U64) -> float:
    # Sum of four uniforms: bell-shaped, unit variance, bounded, integer arithmetic up to the last product.
    total = (h & _LOW16) + ((h >> _S16) & _LOW16) + ((h >> _S32) & _LOW16) + (h >> _S48)
    return (np.float64(total) - 131070.0) * (1.0 / 37837.2)


@inline
def _popular(u: float, n: I64, reach: float, power: float) -> I64:
    # Inverse of the continuous power law; the published formula on [1, n + 1) so that all n ids occur.
    x = np.exp(u * reach) if power == 0.0 else (u * reach + 1.0) ** power
    return min(max(np.int64(x) - 1, 0), n - 1)


@inline
def _latent(key: U64, table: I64, place: I64, k: I64) -> float:
    # Factor k of an id: bell-shaped, unit variance. Factor 0 is also the direction of the id's own effect.
    own = mix64(key ^ (np.uint64(table + 1) << _S32)) + np.uint64(place + 2) * GOLDEN
    return _bell(mix64(own ^ (np.uint64(k) << _S48)))


@kernel
def draw_rows(model: Model, rows: np.ndarray, dense: np.ndarray, ids: np.ndarray, raw: np.ndarray) -> None:
    """Fill dense int64 ``[n, D]`` (MISSING_DENSE where absent), ids int64 ``[n, F]`` (-1 where absent), raw float64
    ``[n]``: the planted score before scale and bias."""
    cards, missing, effect, pairs, drift = model.cards, model.missing, model.effect, model.pairs, model.drift
    mean, std, absent, slope, curve = (
        model.dense_mean, model.dense_std, model.dense_missing, model.slope, model.curve)  # fmt: skip
    reach, power, pair_effect, rank = model.reach, model.power, model.pair_effect, model.rank
    tables, columns, row_key, effect_key = cards.shape[0], mean.shape[0], model.key[0], model.key[1]
    for i in range(rows.shape[0]):
        base = mix64(row_key + np.uint64(rows[i]) * GOLDEN)
        score = 0.0
        for f in range(tables):
            h = mix64(base + np.uint64(f + 1) * GOLDEN)
            if missing[f] > 0.0 and _uniform(mix64(h ^ GOLDEN)) < missing[f]:
                place = np.int64(-1)
            else:
                place = _popular(_uniform(h), cards[f], reach[f], power[f])
                if drift > 0.0:
                    place = (place + np.int64(rows[i] * drift * cards[f])) % cards[f]
            ids[i, f] = place
            score += effect[f] * _latent(effect_key, f, place, 0)
        for p in range(pairs.shape[0]):
            left, right, dot = pairs[p, 0], pairs[p, 1], 0.0
            for k in range(rank):
                dot += _latent(effect_key, left, ids[i, left], k) * _latent(effect_key, right, ids[i, right], k)
            score += pair_effect[p] * dot
        for d in range(columns):
            h = mix64(base + np.uint64(tables + d + 1) * GOLDEN)
            x = np.int64(0)
            if absent[d] > 0.0 and _uniform(mix64(h ^ GOLDEN)) < absent[d]:
                dense[i, d] = MISSING_DENSE
            else:
                x = np.int64(np.exp(mean[d] + std[d] * _bell(h)))
                dense[i, d] = x
            z = min(max((np.log1p(np.float64(x)) - mean[d]) / std[d], -2.5), 2.5)
            score += slope[d] * z + curve[d] * (z * z - 1.0)
        raw[i] = score


@kernel
def draw_labels(
    model: Model, rows: np.ndarray, raw: np.ndarray, scale: float, bias: float, labels: np.ndarray, p: np.ndarray
) -> None:
    """Turn raw scores into click probabilities (float64) and drawn labels (float32)."""
    for i in range(rows.shape[0]):
        p[i] = 1.0 / (1.0 + np.exp(-(scale * raw[i] + bias)))
        labels[i] = 1.0 if _uniform(mix64(mix64(model.key[0] + np.uint64(rows[i]) * GOLDEN))) < p[i] else 0.0


@kernel
def scatter_ids(model: Model, ids: np.ndarray, out: np.ndarray) -> None:
    """Feature-major table rows ``[F, n]``: 0 missing, else 1 + a fixed permutation of the id."""
    for f in range(ids.shape[1]):
        bits, key = bits_for(model.cards[f]), mix64(model.key[2] + np.uint64(f + 1) * GOLDEN)
        for i in range(ids.shape[0]):
            if ids[i, f] < 0:
                out[f, i] = 0
            elif model.cards[f] == 1:
                out[f, i] = 1
            else:
                out[f, i] = 1 + np.int64(feistel(np.uint64(ids[i, f]), np.uint64(model.cards[f]), bits, key))


@inline
def _token(key: U64, f: I64, n: I64, place: I64) -> U64:
    # Bijective, so that distinct ids never share a token: 32 bits as in Criteo Kaggle where they suffice, else 64.
    salt = mix64(key + np.uint64(f + 1) * GOLDEN)
    if n > np.int64(4294967296):
        return mix64(np.uint64(place) + salt)
    x = (np.uint64(place) + salt) & _LOW32
    x = ((x ^ (x >> _S16)) * _M1) & _LOW32
    x = ((x ^ (x >> _H13)) * _M2) & _LOW32
    return x ^ (x >> _S16)


@kernel
def format_rows(model: Model, labels: np.ndarray, dense: np.ndarray, ids: np.ndarray, out: np.ndarray) -> int:
    """Write tab-separated lines into uint8 ``out``; returns the bytes written."""
    at = 0
    for i in range(labels.shape[0]):
        out[at] = 49 if labels[i] > 0.5 else 48
        at += 1
        for d in range(dense.shape[1]):
            out[at] = 9
            at += 1
            if dense[i, d] != MISSING_DENSE:
                at = _write_integer(out, at, dense[i, d])
        for f in range(ids.shape[1]):
            out[at] = 9
            at += 1
            if ids[i, f] >= 0:
                digits = 8 if model.cards[f] <= np.int64(4294967296) else 16
                value = _token(model.key[2], f, model.cards[f], ids[i, f])
                for k in range(digits):
                    nibble = np.int64((value >> np.uint64(4 * (digits - 1 - k))) & np.uint64(15))
                    out[at + k] = nibble + (48 if nibble < 10 else 87)
                at += digits
        out[at] = 10
        at += 1
    return at


@inline
def _write_integer(out: np.ndarray, at: I64, x: I64) -> I64:
    if x < 0:
        out[at] = 45
        at, x = at + 1, -x
    digits, rest = 1, x // 10
    while rest > 0:
        digits, rest = digits + 1, rest // 10
    for k in range(digits):
        out[at + digits - 1 - k] = 48 + x % 10
        x //= 10
    return at + digits
