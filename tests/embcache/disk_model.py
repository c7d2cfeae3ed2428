"""A dictionary that does what a durable tier does, and comparisons with one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from embcache.config import TableConfig
from embcache.tiers.base import DurableTier, Moved

# rows of 64, 12, 3,072 (a page of their own in LMDB) and 256 bytes
TABLES = [TableConfig(name, None, dim) for name, dim in (("a", 16), ("b", 3), ("c", 768), ("d", 64))]
EDGES = np.array([-(2**63), 2**63 - 1, 0, -1, 1], dtype=np.int64)


def ordered(keys: Any) -> np.ndarray:
    """Distinct int64 keys, ascending as unsigned numbers."""
    return np.unique(np.asarray(keys, dtype=np.int64).view(np.uint64)).view(np.int64)


def moved(table: int, keys: np.ndarray, rng: np.random.Generator) -> Moved:
    """Places for these keys in an arena of random bytes."""
    slab = rng.integers(0, 256, (len(keys) + 5, TABLES[table].row_bytes), dtype=np.uint8)
    slots = rng.permutation(len(slab))[: len(keys)].astype(np.int32)
    return Moved(table, keys, slab, slots, np.zeros(len(keys), np.bool_))


class Nothing:
    """A tier for a model that plays alone."""

    def write(self, *_: Any) -> None:
        return

    delete = write_from = write


class Model:
    """What the rows should be: table -> key -> row."""

    def __init__(self) -> None:
        self.rows: list[dict[int, np.ndarray]] = [{} for _ in TABLES]

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def write(self, tier: DurableTier, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        tier.write(table, keys, rows)
        self.rows[table].update(zip(keys.tolist(), rows.copy(), strict=True))

    def write_from(self, tier: DurableTier, parts: list[Moved]) -> None:
        tier.write_from(parts)
        for part in parts:
            self.rows[part.table].update(zip(part.keys.tolist(), part.slab[part.slots], strict=True))

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
        self.check_slots(tier)

    def check_slots(self, tier: DurableTier) -> None:
        """Rows of all tables in one call, in any order."""
        rng = np.random.default_rng(len(self.rows[0]))
        asked = [rng.permutation(ordered([*rows, 7_000_000, *EDGES[:2]])) for rows in self.rows]
        parts = [moved(t, asked[t], rng) for t in (3, 1, 0, 2)]
        before = [part.slab.copy() for part in parts]
        tier.read_into(parts)
        for part, want in zip(parts, before, strict=True):
            here = self.rows[part.table]
            assert part.found.tolist() == [k in here for k in part.keys.tolist()]
            for key, slot in zip(part.keys.tolist(), part.slots.tolist(), strict=True):
                want[slot] = here.get(key, want[slot])
            assert np.array_equal(part.slab, want)


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
    model.write_from(tier, [moved(t, rng.permutation(300)[:size] - 150, rng) for t in rng.permutation(len(TABLES))])
