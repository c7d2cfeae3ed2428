"""Batches whose ids are dropped or mapped before they are looked up: padding, and ids out of range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import embcache as ec

pytestmark = pytest.mark.filterwarnings("ignore:table .* staged batches need")  # small caches are the point


def bags(*ids: list[int], weights: torch.Tensor | None = None) -> ec.KeyedJaggedTensor:
    values = torch.tensor([i for bag in ids for i in bag], dtype=torch.int64)
    return ec.KeyedJaggedTensor(["t"], values, weights, lengths=torch.tensor([len(bag) for bag in ids]))


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_ids_mapped_to_the_padding_row_are_padding(tmp_path: Path, backend: str, pooling: str) -> None:
    table = ec.TableConfig(
        "t", 10, 4, pooling=pooling, out_of_range="map", padding_idx=0, optimizer=ec.optim.Adam(lr=0.1)
    )
    chains: list[list[Any]] = [
        [ec.tiers.Ram()],
        [ec.tiers.Ram(rows=2), ec.tiers.Ram()],
        [ec.tiers.Ram(rows=2), ec.tiers.Lmdb(tmp_path / "store")],
    ]
    seen = []
    for tiers in chains:
        store = ec.EmbeddingStore([table], tiers, backend=backend)
        make = ec.EmbeddingCollection if pooling == "none" else ec.EmbeddingBagCollection
        module: Any = make([table], store=store)
        optimizer = ec.optim.SparseOptimizer(store)
        outputs = []
        for ids in ([[1, -1], [77]], [[2, 3, 4], [5, 6, 77]]):
            out = module(bags(*ids))
            values = out["t"].values() if pooling == "none" else out.values()
            (values.sin() + values).sum().backward()
            optimizer.step()
            outputs.append(values.detach())
        if pooling != "none":  # torch.nn leaves padding out of the bag
            assert torch.equal(outputs[0][0], table_row(table, 1))
            assert not outputs[0][1].any()
        assert store.stats()["tables"]["t"]["mapped"] == 3
        seen.append((torch.cat(outputs), *store.read_rows("t", torch.arange(10))))
        assert not seen[-1][1][0].any()  # its row stays as it began
        store.close()
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def table_row(table: ec.TableConfig, id: int) -> torch.Tensor:
    return ec.EmbeddingStore([table]).weight("t")[id]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("bad", [3, 77], ids=["padding", "out of range"])
@pytest.mark.parametrize("change", ["ids", "weights"])
def test_what_is_changed_in_place_after_staging_ahead_is_staged_anew(depth: int, bad: int, change: str) -> None:
    table = ec.TableConfig("t", 10, 4, out_of_range="drop", padding_idx=3)
    store = ec.EmbeddingStore([table], [ec.tiers.Ram(rows=9), ec.tiers.Ram()])
    module = ec.EmbeddingBagCollection([table], is_weighted=True, store=store)
    loader = [bags([1, bad], [2], weights=torch.ones(3)) for _ in range(3)]
    for batch in store.lookahead(loader, depth=depth, training=False):
        if change == "ids":
            batch.values()[1] = 4  # a loader's augmentation, say
        else:
            batch.weights()[0] = 0.5
        with torch.no_grad():
            rows = store.read_rows("t", torch.arange(10))[0]
            first = rows[1] + rows[4] if change == "ids" else 0.5 * rows[1]
            assert torch.equal(module(batch).values(), torch.stack([first, rows[2]]))
