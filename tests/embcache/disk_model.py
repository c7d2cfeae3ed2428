"""A dictionary that does what a durable tier does, and comparisons with one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from embcache.config import TableConfig
from embcache.tiers.base import DurableTier

# rows of 64, 12, 3,072 (a page of their own in LMDB) and 256 bytes
TABLES = [TableConfig(name, None, dim) for name, dim in (("a", 16), ("b", 3), ("c", 768), ("d", 64))]
EDGES = np.array([-(2**63), 2**63 - 1, 0, -1, 1], dtype=np.int64)


def ordered(keys: Any) -> np.ndarray:
    """Distinct int64 keys, ascending as unsigned numbers."""
    return np.unique(np.asarray(keys, dtype=np.int64).view(np.uint64)).view(np.int64)


class Model:
    """What the rows should be: table -> key -> row."""

    def __init__(self) -> None:
        self.rows: list[dict[int, np.ndarray]] = [{} for _ in TABLES]

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def write(self, tier: DurableTier, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        tier.write(table, keys, rows)
        self.rows[table].update(zip(keys.tolist(), rows.copy(), strict=True))

    def delete(self, tier: DurableTier, table: int, keys: np.ndarray) -> None:
        tier.delete(table, keys)
        for key in keys.tolist():
            self.rows[table].pop(key, None)

    def check(self, tier: DurableTier, block: int = 37) -> None:
        """Every way of reading gives these rows, bit for bit."""
        for t, table in enumerate(TABLES):
            want = self.rows[t]
            keys = ordered(list(want))
            rows = np.stack([want[k] for k in keys.tolist()]) if want else np.zeros((0, table.row_bytes), np.uint8)
            assert tier.count(t) == len(want)
            blocks = list(tier.scan(t, block))
            assert all(0 < len(k) <= block for k, _ in blocks)
            got = np.concatenate([k for k, _ in blocks]) if blocks else np.zeros(0, np.int64)
            assert np.array_equal(got, keys)
            assert not blocks or np.array_equal(np.concatenate([r for _, r in blocks]), rows)
            asked = ordered(np.concatenate([keys, EDGES, np.arange(7_000_000, 7_000_050)]))
            out = np.full((len(asked), table.row_bytes), 7, np.uint8)
            found = tier.read(t, asked, out)
            assert found.tolist() == [k in want for k in asked.tolist()]
            assert np.array_equal(out[found], rows)
            assert (out[~found] == 7).all()


def unfiltered(tier: Any) -> list[int]:
    """Keys of the base that an Lmdb tier's filter would hide, if it has one: there must be none."""
    hidden = []
    with tier._snapshot() as snapshot:
        for t in range(len(tier._row_bytes)):
            keys = np.empty(snapshot.count(t), np.int64)
            assert snapshot.walk(t, 0, keys, None) == len(keys)
            state = np.zeros(len(keys), np.uint8)
            assert tier._merger.presence.screen(t, keys, state) == (state == 0).sum()
            hidden += keys[state != 0].tolist()
    return hidden


def play(tier: DurableTier, model: Model, rng: np.random.Generator, size: int = 60) -> None:
    """Random writes and deletions in every table."""
    for t, table in enumerate(TABLES):
        for _ in range(2):
            keys = ordered(np.concatenate([rng.integers(-200, 200, size), rng.choice(EDGES, 2)]))
            model.write(tier, t, keys, rng.integers(0, 256, (len(keys), table.row_bytes), dtype=np.uint8))
            model.delete(tier, t, ordered(rng.integers(-200, 200, 9)))
