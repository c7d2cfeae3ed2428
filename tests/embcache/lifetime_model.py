"""A store with admission, expiry and deletes beside a plain dict: rows as numpy arrays, counts exact."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import embcache as ec

DIM, LR = 3, np.float32(0.5)
EDGES = np.array([-(2**63), 2**63 - 1, -1, 0])


def table(name: str = "t", **options: Any) -> ec.TableConfig:
    """Unbounded, two features, plain SGD; gradients below are small whole numbers, so that every sum is exact."""
    rule = ec.optim.SGD(lr=float(LR))
    return ec.TableConfig(
        name, None, DIM, features=[f"{name}1", f"{name}2"], optimizer=rule, init=ec.init.Uniform(0.5), **options
    )


@dataclass
class Model:
    """What a table must hold: ``rows`` id -> [weights, step of the last update, updates]; ``seen`` id -> count."""

    table: ec.TableConfig
    rows: dict[int, list[Any]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    begin: dict[int, np.ndarray] = field(default_factory=dict)

    def initial(self, ids: np.ndarray) -> np.ndarray:
        t, keys = self.table, ids.tolist()
        new = [key for key in dict.fromkeys(keys) if key not in self.begin]
        if new:
            rows = ec.init.rows(t.init, t.seed, t.name, torch.tensor(new), DIM).numpy()
            self.begin.update(zip(new, rows, strict=True))
        return np.stack([self.begin[key] for key in keys])

    def read(self, ids: np.ndarray) -> np.ndarray:
        out = self.initial(ids)
        for i, key in enumerate(ids.tolist()):
            if key in self.rows:
                out[i] = self.rows[key][0]
        return out

    def step(self, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """(ids, gradient of each) of the micro-batches."""
        self.steps += 1
        ids = np.concatenate([b[0] for b in batches])
        grads = np.concatenate([b[1] for b in batches])
        known = set(self.rows)
        for key in ids.tolist():
            if key not in known:
                self.seen[key] = self.seen.get(key, 0) + 1
        self.initial(ids)
        least = 0 if self.table.admission is None else self.table.admission.min_count
        for key in dict.fromkeys(ids.tolist()):
            if key in self.rows or self.seen[key] >= least:
                row = self.rows.setdefault(key, [self.begin[key], 0, 0])
                row[0] = row[0] - LR * grads[ids == key].sum(0, dtype=np.float32)
                row[1], row[2] = self.steps, row[2] + 1
        self.sweep()

    def sweep(self) -> None:
        rule = self.table.expiry
        if rule is None or self.steps % rule.every:
            return
        for key, (_, last, updates) in list(self.rows.items()):
            idle = rule.idle is None or self.steps - last > rule.idle
            if idle and (rule.below is None or updates < rule.below):
                del self.rows[key]


def stream(seed: int, steps: int, ids: int = 30, rows: int = 90) -> Iterator[list[np.ndarray]]:
    """Per step, one or two micro-batches of ids: some often, most seldom, popularity moving, both ends of int64."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        out = []
        for _ in range(1 + step % 2):
            some = (rng.random(ids) ** 3 * rows).astype(np.int64) + step // 8 * 7
            some[rng.random(ids) < 0.05] = rng.choice(EDGES)
            out.append(some)
        yield out


def kjt(ids: np.ndarray, name: str = "t") -> ec.KeyedJaggedTensor:
    """The ids over both features, a bag each."""
    return ec.KeyedJaggedTensor(
        [f"{name}1", f"{name}2"], torch.from_numpy(ids), lengths=torch.ones(len(ids), dtype=torch.int64)
    )


class Pair:
    """A store and its model through the same life; ``depth`` batches are staged ahead."""

    def __init__(self, store: ec.EmbeddingStore, model: Model, depth: int = 0, seed: int = 0) -> None:
        self.store, self.model, self.depth = store, model, depth
        self.rng = np.random.default_rng(seed)

    def train(self, steps: Iterator[list[np.ndarray]]) -> None:
        ahead: deque[list[tuple[np.ndarray, Any]]] = deque()
        for ids in steps:
            ahead.append([(some, self.store.stage(kjt(some))) for some in ids])
            if len(ahead) > self.depth:
                self.step(ahead.popleft())
        while ahead:
            self.step(ahead.popleft())

    def step(self, parts: Sequence[tuple[np.ndarray, Any]]) -> None:
        done = []
        for ids, handle in parts:
            out = self.store.lookup(handle)
            assert np.array_equal(torch.cat([out["t1"], out["t2"]]).numpy(), self.model.read(ids))
            grads = self.rng.integers(-3, 4, (len(ids), DIM)).astype(np.float32)
            half = len(ids) // 2
            self.store.update(handle, {"t1": torch.from_numpy(grads[:half]), "t2": torch.from_numpy(grads[half:])})
            done.append((ids, grads))
        self.store.step()
        for _, handle in parts:
            handle.release()
        self.model.step(done)

    def delete(self, ids: np.ndarray) -> None:
        self.store.delete("t", torch.from_numpy(ids))
        for key in ids.tolist():
            self.model.rows.pop(key, None)

    def check(self) -> None:
        """Every row, its step and count, whoever reads; nothing else is written."""
        rows, store = self.model.rows, self.store
        found = [torch.cat(parts) for parts in zip(*store.written_rows("t", 16), strict=True)]
        ids = np.sort(np.array(list(rows), dtype=np.int64).view(np.uint64)).view(np.int64)
        assert store.count_written("t") == len(ids)
        if len(ids):
            assert np.array_equal(found[0].numpy(), ids)
            assert np.array_equal(found[1].numpy(), self.model.read(ids))
        else:
            assert not found
        asked = np.concatenate([EDGES, np.arange(-3, 200)])
        assert np.array_equal(store.read_rows("t", torch.from_numpy(asked))[0].numpy(), self.model.read(asked))
        if self.model.table.meta_bytes:
            for keys, block in store.raw_rows(0, 16):
                at = self.model.table.meta_offset // 4
                metas = block.view(torch.int32)[:, at : at + 2].tolist()
                assert metas == [rows[key][1:] for key in keys.tolist()]
        assert store.front.pins() == 0
