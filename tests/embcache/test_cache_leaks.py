"""Ten thousand small steps of training and of evaluation leave memory, pins and threads as they were."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec

pytestmark = pytest.mark.filterwarnings("ignore:table .* staged batches need")  # small caches are the point

BATCHES = 50


def resident_bytes() -> int:
    """Anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def batches(rows: int, seed: int = 0) -> list[ec.KeyedJaggedTensor]:
    rng = np.random.default_rng(seed)
    lengths = torch.ones(16, dtype=torch.int64)
    return [
        ec.KeyedJaggedTensor(["a", "b"], torch.from_numpy(rng.zipf(1.3, 16) % rows), lengths=lengths)
        for _ in range(BATCHES)
    ]


def store_of(tiers: list[Any], rows: int = 300) -> ec.EmbeddingStore:
    tables = [
        ec.TableConfig("a", rows, 8, optimizer=ec.optim.Adagrad(lr=0.1)),
        ec.TableConfig("b", None, 4, pooling="none", optimizer=ec.optim.SGD(lr=0.1)),
    ]
    return ec.EmbeddingStore(tables, tiers)


def train(store: ec.EmbeddingStore, data: list[ec.KeyedJaggedTensor], steps: int) -> None:
    grads = {"a": torch.ones(8, 8), "b": torch.ones(8, 4)}
    for i in range(steps):
        with store.stage(data[i % BATCHES], training=True) as handle:
            store.lookup(handle)
            store.update(handle, grads)
        store.step()


def evaluate(store: ec.EmbeddingStore, data: list[ec.KeyedJaggedTensor], steps: int) -> None:
    for i in range(steps):
        store.lookup(store.stage(data[i % BATCHES], training=False))  # released by nobody but the collector


def forget(store: ec.EmbeddingStore, data: list[ec.KeyedJaggedTensor], steps: int) -> None:
    for i in range(steps):
        store.lookup(store.stage(data[i % BATCHES], training=True))  # a forward whose backward never comes


def ahead(store: ec.EmbeddingStore, data: list[ec.KeyedJaggedTensor], steps: int) -> None:
    for start in range(0, steps, 10 * BATCHES):
        for i, batch in enumerate(store.lookahead(data * 10, depth="auto")):
            store.lookup(batch.staged)
            if start % (20 * BATCHES) and i == 3 * BATCHES:
                break  # leaves without reading on


def growth(work: Callable[[int], None], steps: int) -> int:
    """Bytes that ``steps`` calls add, after as many as fill what is filled once."""
    work(steps // 5)
    gc.collect()
    before = resident_bytes()
    work(steps)
    gc.collect()
    return resident_bytes() - before


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize(("what", "steps"), [(train, 3000), (evaluate, 5000), (forget, 1000), (ahead, 1000)])
def test_ten_thousand_steps_do_not_grow(tmp_path: Path, what: Callable[..., None], steps: int) -> None:
    store = store_of([ec.tiers.Ram(rows=20), ec.tiers.Lmdb(tmp_path / "store")])
    data = batches(300)
    threads = threading.active_count()
    assert growth(lambda n: what(store, data, n), steps) < 4 << 20
    assert store.front.pins() == 0
    assert threading.active_count() == threads
    store.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from Linux's /proc")
def test_stores_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    data = batches(300)
    files = len(os.listdir("/proc/self/fd"))

    def work(n: int) -> None:
        for i in range(n):
            store = store_of([ec.tiers.Ram(rows=20), ec.tiers.Ram(rows=30), ec.tiers.Lmdb(tmp_path / "store")])
            train(store, data, 3)
            if i % 3 == 0:
                store.commit({"i": i}, wait=bool(i % 2))
            store.close()

    assert growth(work, 60) < 4 << 20
    assert len(os.listdir("/proc/self/fd")) <= files + 1  # one descriptor of LMDB's file stays, see the tier
