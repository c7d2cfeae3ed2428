"""A parsed chunk of rows, and its ids as codes into a dictionary of the chunk's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dlrm.data.hashing import mix64
from dlrm.data.schema import Schema
from embcache.kernels.jit import I64, U64, inline, kernel

PARTS = 32  # a chunk's dictionary lies in this many parts by the top bits of the key's hash
PART_SHIFT = np.uint64(59)
_TOP = np.uint64(64)


class BadCell(NamedTuple):
    """A malformed row: line within the chunk (from 0), column (from 1, 0 = the line), what was expected and found."""

    line: int
    column: int
    expected: str
    found: str


@dataclass
class Parsed:
    """Rows of a chunk. S single-id columns, K bag columns, n rows.

    ``labels`` float32 ``[n]``; ``dense`` float32 ``[n, D]``; ``keys`` int64 and ``missing`` bool ``[S, n]``;
    ``times`` int64 ``[n]`` seconds (or empty); a list of int64 sizes ``[n]`` and one of keys for the bags;
    ``lines`` read, ``n_bad`` malformed ones and reports on the first of them.
    """

    labels: np.ndarray
    dense: np.ndarray
    keys: np.ndarray
    missing: np.ndarray
    times: np.ndarray
    bag_sizes: list[np.ndarray]
    bag_keys: list[np.ndarray]
    lines: int
    n_bad: int
    bad: list[BadCell]

    @property
    def rows(self) -> int:
        """Good rows."""
        return int(self.labels.shape[0])

    def with_time_features(self, schema: Schema) -> Parsed:
        """Append the features made of the time (UTC): hour of the day 0..23, weekday 0 = Monday, sine and cosine."""
        if schema.time is None or not (schema.time.categorical or schema.time.dense):
            return self
        hour, weekday = self.times // 3600 % 24, (self.times // 86400 + 3) % 7
        angle = hour * (2 * np.pi / 24)
        made = {"hour_of_day": hour, "weekday": weekday}
        dense = {"hour_sin": np.sin(angle), "hour_cos": np.cos(angle)}
        extra = len(schema.time.categorical)
        keys = np.vstack([self.keys, *(made[n][None] for n in schema.time.categorical)])
        missing = np.vstack([self.missing, np.zeros((extra, self.rows), np.bool_)])
        columns = [self.dense, *(dense[n][:, None].astype(np.float32) for n in schema.time.dense)]
        return Parsed(self.labels, np.hstack(columns), keys, missing, self.times, self.bag_sizes, self.bag_keys,
                      self.lines, self.n_bad, self.bad)  # fmt: skip


@dataclass
class Coded:
    """A chunk's ids as codes: ``codes`` int32 ``[n, S]`` (-1 missing) and ``bag_codes`` index ``dictionaries``, one
    int64 array a feature (schema order), whose parts begin at ``parts`` int64 ``[F, PARTS + 1]``."""

    codes: np.ndarray
    bag_codes: list[np.ndarray]
    dictionaries: list[np.ndarray]
    parts: np.ndarray = field(repr=False)


def encode(parsed: Parsed, schema: Schema) -> Coded:
    """Replace each feature's keys by codes into the chunk's distinct keys."""
    codes = np.empty((parsed.rows, parsed.keys.shape[0]), np.int32)
    most = max([parsed.rows, *(k.shape[0] for k in parsed.bag_keys)])
    slots = np.empty(max(1024, 1 << (2 * most).bit_length()), np.int32)
    unique, parts = np.empty(most, np.int64), np.zeros((len(schema.features), PARTS + 1), np.int64)
    no_gaps = np.zeros(0, np.bool_)
    bag_codes: list[np.ndarray] = []
    dictionaries, single = [], 0
    for f, bag in enumerate(schema.bags):
        if bag:
            keys, gaps = parsed.bag_keys[len(bag_codes)], no_gaps
            out = np.empty(keys.shape[0], np.int32)
            bag_codes.append(out)
        else:
            keys, gaps, out = parsed.keys[single], parsed.missing[single], codes[:, single]
            single += 1
        count = _encode(keys, gaps, out, slots, unique)
        dictionary = np.empty(count, np.int64)
        _arrange(unique[:count], dictionary, parts[f], out)
        dictionaries.append(dictionary)
    return Coded(codes, bag_codes, dictionaries, parts)


@inline
def _find(slots: np.ndarray, bits: U64, unique: np.ndarray, key: I64) -> I64:
    # Slot that holds the key, or the empty one (-1) where it belongs.
    mask = (np.int64(1) << np.int64(bits)) - 1
    at = np.int64(mix64(np.uint64(key)) >> (_TOP - bits))
    while slots[at] >= 0 and unique[slots[at]] != key:
        at = (at + 1) & mask
    return at


@kernel
def _encode(keys: np.ndarray, gaps: np.ndarray, codes: np.ndarray, slots: np.ndarray, unique: np.ndarray) -> int:
    # Open addressing that starts small (few distinct ids stay in cache) and doubles at half load.
    bits, count, gappy = np.uint64(8), 0, gaps.shape[0] > 0
    slots[:256] = -1
    for i in range(keys.shape[0]):
        if gappy and gaps[i]:
            codes[i] = -1
            continue
        at = _find(slots, bits, unique, keys[i])
        if slots[at] < 0:
            slots[at] = count
            unique[count] = keys[i]
            count += 1
            codes[i] = count - 1
            if 2 * count > np.int64(1) << np.int64(bits):
                bits += np.uint64(1)
                slots[: np.int64(1) << np.int64(bits)] = -1
                for u in range(count):
                    slots[_find(slots, bits, unique, unique[u])] = u
        else:
            codes[i] = slots[at]
    return count


@kernel
def _arrange(unique: np.ndarray, out: np.ndarray, parts: np.ndarray, codes: np.ndarray) -> None:
    # Order the dictionary by part (a counting sort), and renumber the codes.
    n = unique.shape[0]
    for u in range(n):
        parts[np.int64(mix64(np.uint64(unique[u])) >> PART_SHIFT) + 1] += 1
    for k in range(PARTS):
        parts[k + 1] += parts[k]
    place, moved = parts[:PARTS].copy(), np.empty(n, np.int32)
    for u in range(n):
        p: I64 = np.int64(mix64(np.uint64(unique[u])) >> PART_SHIFT)
        moved[u] = place[p]
        out[place[p]] = unique[u]
        place[p] += 1
    for i in range(codes.shape[0]):
        if codes[i] >= 0:
            codes[i] = moved[codes[i]]
