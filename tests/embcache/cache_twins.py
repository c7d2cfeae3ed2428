"""The same requests to a store with a cache and to one that holds all rows in memory: streams of ids, a training loop
with staging ahead, and the comparison of every bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import embcache as ec

ROWS = 240
FEATURES = ("a1", "a2", "b", "c")  # two that share a table, a mean, and one that is not pooled
EDGES = np.array([-(2**63), -(2**63) + 1, -(2**32), -1, 0, 1, 2**31, 2**32, 2**63 - 2, 2**63 - 1], np.int64)

RULES: list[ec.optim.Rule] = [
    ec.optim.SGD(lr=0.1, weight_decay=0.01),
    ec.optim.Adagrad(lr=0.1, initial_accumulator_value=0.3),
    ec.optim.RowWiseAdagrad(lr=0.1, weight_decay=0.05),
    ec.optim.RowWiseAdagrad(lr=0.1, max_norm=0.3),
    ec.optim.Adam(lr=0.1, weight_decay=0.1),
    ec.optim.Adam(lr=0.1, per_row_step=True),
    ec.optim.RowWiseAdam(lr=0.1),
    ec.optim.LAMB(lr=0.1, weight_decay=0.1),
    ec.optim.LARS(lr=0.5, eta=0.5, weight_decay=0.1),
    ec.optim.FTRL(lr=0.1, l1=0.01, l2=0.1, initial_accumulator_value=0.5),
]


def three_tables(
    rule: ec.optim.Rule | None = None, rows: int | None = ROWS, dtype: torch.dtype = torch.float32, **more: Any
) -> list[ec.TableConfig]:
    """Tables a (features a1 and a2, sum), b (mean) and c (not pooled) of different widths."""
    shared = {"optimizer": rule or ec.optim.Adagrad(lr=0.1), "dtype": dtype, "init": ec.init.Uniform(0.5), **more}
    return [
        ec.TableConfig("a", rows, 5, features=["a1", "a2"], **shared),
        ec.TableConfig("b", rows, 3, features=["b"], pooling="mean", **shared),
        ec.TableConfig("c", rows, 4, features=["c"], pooling="none", **shared),
    ]


# streams -------------------------------------------------------------------------------------------------------------


def jagged(ids: Sequence[np.ndarray], rng: np.random.Generator, bags: int = 5) -> ec.KeyedJaggedTensor:
    """One array of ids a feature, cut into ``bags`` bags at random places."""
    lengths = []
    for some in ids:
        cuts = np.sort(rng.integers(0, len(some) + 1, bags - 1))
        lengths.append(np.diff(np.concatenate([[0], cuts, [len(some)]])))
    values = torch.from_numpy(np.concatenate(ids).astype(np.int64))
    return ec.KeyedJaggedTensor(list(FEATURES), values, lengths=torch.from_numpy(np.concatenate(lengths)))


def zipf(rng: np.random.Generator, n: int, rows: int = ROWS, alpha: float = 1.05) -> np.ndarray:
    """Power law ids in [0, rows), frequent ones scattered."""
    gamma = 1.0 - alpha
    rank = ((rng.random(n) * (rows**gamma - 1.0) + 1.0) ** (1.0 / gamma)).astype(np.int64)
    return (np.minimum(rank, rows - 1) * 77) % rows


def stream(kind: str, steps: int, seed: int = 0, rows: int = ROWS, n: int = 14) -> Iterator[ec.KeyedJaggedTensor]:
    """``steps`` batches of about ``n`` ids a feature.

    zipf; drift (zipf whose hot rows move); hits (the same few rows always); misses (a cycle through all rows: what was
    used last is needed last); large (most rows of the table in each batch); reuse (nine of ten ids are of the batch
    before); fresh (one of ten); edge (any int64, extreme ones often); empty (batches without ids between others).
    """
    rng = np.random.default_rng(seed)
    before = [zipf(rng, n, rows) for _ in FEATURES]
    for step in range(steps):
        if kind == "hits":
            ids = [rng.integers(0, 6, n) for _ in FEATURES]
        elif kind == "misses":
            ids = [(step * n + np.arange(n)) % rows for _ in FEATURES]
        elif kind == "large":
            ids = [rng.permutation(rows)[: rows // 2] for _ in FEATURES]
        elif kind == "drift":
            ids = [(zipf(rng, n, rows) + 3 * step) % rows for _ in FEATURES]
        elif kind in ("reuse", "fresh"):
            share = 0.9 if kind == "reuse" else 0.1
            ids = [np.where(rng.random(n) < share, old, rng.integers(0, rows, n)) for old in before]
            before = ids
        elif kind == "edge":
            far = rng.integers(-(2**63), 2**63 - 1, n, dtype=np.int64)
            ids = [np.where(rng.random(n) < 0.6, rng.choice(EDGES, n), far) for _ in FEATURES]
        elif kind == "empty":
            ids = [zipf(rng, n * int(rng.integers(0, 2)), rows) for _ in FEATURES]
        else:
            ids = [zipf(rng, n, rows) for _ in FEATURES]
        yield jagged(ids, rng)


# training ------------------------------------------------------------------------------------------------------------


def gradient(step: int, name: str, out: Tensor) -> Tensor:
    """Depends on what was read, so that a wrong row makes everything after it wrong."""
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1000 * step + sum(map(ord, name))))
    return out.detach() * 0.5 + noise


def learn(store: ec.EmbeddingStore, handle: ec.Handle, step: int) -> dict[str, Tensor]:
    """Lookup and gradients of one staged batch."""
    out = store.lookup(handle)
    store.update(handle, {name: gradient(step, name, rows) for name, rows in out.items()})
    return out


def train(
    store: ec.EmbeddingStore, batches: Iterable[ec.KeyedJaggedTensor], ahead: int = 0, first: int = 0
) -> list[dict[str, Tensor]]:
    """One step a batch, ``ahead`` further batches being staged before it is looked up; the outputs."""
    waiting: deque[ec.Handle] = deque()
    outputs = []

    def one() -> None:
        with waiting.popleft() as handle:
            outputs.append(learn(store, handle, first + len(outputs)))
        store.step()

    for batch in batches:
        waiting.append(store.stage(batch, training=True))
        if len(waiting) > ahead:
            one()
    while waiting:
        one()
    return outputs


def evaluate(store: ec.EmbeddingStore, batch: ec.KeyedJaggedTensor) -> dict[str, Tensor]:
    """Outputs of a batch staged for reading only."""
    with store.stage(batch, training=False) as handle:
        return store.lookup(handle)


# comparison ----------------------------------------------------------------------------------------------------------


def same_outputs(mine: Sequence[dict[str, Tensor]], other: Sequence[dict[str, Tensor]]) -> None:
    """Two runs read the same bits at every step."""
    assert len(mine) == len(other)
    for step, (a, b) in enumerate(zip(mine, other, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), (step, name)


def used_bytes(table: ec.TableConfig, rows: Any) -> np.ndarray:
    """Weights and state of rows uint8 [n, row_bytes], without what only fills them up."""
    rows = np.asarray(rows)
    first, last = table.state_offset, table.state_offset + 4 * table.state_floats
    weights = rows[:, : table.embedding_dim * table.dtype.itemsize]
    return np.concatenate([weights, rows[:, first:last]], axis=1)


def rows_of(store: ec.EmbeddingStore, t: int, ids: Any) -> np.ndarray:
    """Weights and state of any ids as bytes."""
    ids = torch.as_tensor(np.asarray(ids, np.int64))
    return used_bytes(store.tables[t], store.front.read_rows(t, ids))


def written_of(store: ec.EmbeddingStore, t: int, block: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """(ids, bytes) of all written rows; they come in ascending unsigned order."""
    ids, rows = (
        [np.empty(0, np.int64)],
        [used_bytes(store.tables[t], np.empty((0, store.tables[t].row_bytes), np.uint8))],
    )
    for some, block_rows in store.front.written(t, block):
        assert 0 < len(some) <= block
        ids.append(np.asarray(some).copy())
        rows.append(used_bytes(store.tables[t], block_rows))
    every = np.concatenate(ids)
    assert bool((np.diff(every.view(np.uint64).astype(object)) > 0).all())
    return every, np.concatenate(rows)


def same_rows(a: ec.EmbeddingStore, b: ec.EmbeddingStore, ids: Any = None) -> None:
    """Weights and state of ``ids`` (None: all of bounded tables) and all written rows are equal."""
    for t, table in enumerate(a.tables):
        some = np.arange(table.num_embeddings) if ids is None else ids
        assert np.array_equal(rows_of(a, t, some), rows_of(b, t, some)), table.name
        (ids_a, rows_a), (ids_b, rows_b) = written_of(a, t), written_of(b, t)
        assert np.array_equal(ids_a, ids_b), table.name
        assert np.array_equal(rows_a, rows_b), table.name
        assert a.front.count_written(t) == len(ids_a) == b.front.count_written(t)
    assert a.steps == b.steps


def settled(store: ec.EmbeddingStore) -> dict[str, Any]:
    """Nothing is pinned and the counters add up; returns them."""
    assert store.front.pins() == 0
    stats: dict[str, Any] = store.front.stats()
    assert stats["hits"] + stats["misses"] == stats["unique_ids"]
    return stats
