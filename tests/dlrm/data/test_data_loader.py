"""The loader: batch t of epoch e is a function of (seed, e, t), for every rank, world size and prefetch."""

import threading
import time
from itertools import chain

import numpy as np
import pytest
import torch
from data_logs import bag_csv

from dlrm.data import (
    Categorical,
    ClickBatch,
    ColumnCache,
    Dense,
    Label,
    Loader,
    Schema,
    SyntheticConfig,
    SyntheticLog,
    preprocess,
    with_splits,
)
from dlrm.data.order import epoch_order

ROWS = 103
SCHEMA = Schema(Label("y"), (Dense("a"), Dense("b")), (Categorical("u"), Categorical("v"), Categorical("w")))


def numbered(rows: int = ROWS, dtype=np.int32) -> ColumnCache:
    """Row i holds label i, dense (i, i + .5) and ids (i, 1000 + i, 2000 + i)."""
    i = np.arange(rows)
    dense = np.stack([i, i + 0.5], 1).astype(np.float32)
    ids = np.stack([i, 1000 + i, 2000 + i], 1).astype(dtype)
    splits = {"train": range(0, rows), "test": np.arange(rows)[::-3].copy(), "none": range(0, 0)}
    return ColumnCache(SCHEMA, dense, i.astype(np.float32), ids, splits, dict.fromkeys(SCHEMA.features, 4000))


def rows_of(batch: ClickBatch) -> list[int]:
    """The rows of a batch, after checking that all its parts speak of the same."""
    rows, n = batch.labels.long(), len(batch)
    assert torch.equal(batch.dense, torch.stack([rows.float(), rows + 0.5], 1))
    assert batch.sparse.keys() == ["u", "v", "w"]
    assert torch.equal(batch.sparse.values().view(3, n), torch.stack([rows, rows + 1000, rows + 2000]))
    assert batch.sparse.lengths().tolist() == [1] * (3 * n)
    return rows.tolist()


def epoch(loader: Loader) -> list[list[int]]:
    return [rows_of(b) for b in loader]


@pytest.mark.parametrize("shuffle", [False, True, "blocks"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_row_once_an_epoch_and_order_by_seed_and_epoch(shuffle, drop_last) -> None:
    cache = numbered()
    loader = Loader(cache, "train", 10, shuffle=shuffle, seed=3, drop_last=drop_last)
    assert len(loader) == (10 if drop_last else 11)
    first, second = epoch(loader), epoch(loader)
    for batches in (first, second):
        flat = list(chain.from_iterable(batches))
        assert len(batches) == len(loader)
        assert len(set(flat)) == len(flat) == (100 if drop_last else ROWS)
    assert (first == second) == (not shuffle)
    if shuffle:
        assert epoch(Loader(cache, "train", 10, shuffle=shuffle, seed=4)) != first
    again = Loader(cache, "train", 10, shuffle=shuffle, seed=3, drop_last=drop_last)
    assert (epoch(again), epoch(again)) == (first, second)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 16])
def test_shares_of_all_ranks_make_the_global_batch(world_size) -> None:
    cache = numbered()
    whole = epoch(Loader(cache, "train", 10, shuffle=True, seed=1))
    shares = [epoch(Loader(cache, "train", 10, shuffle=True, seed=1, rank=r, world_size=world_size))
              for r in range(world_size)]  # fmt: skip
    assert [list(chain.from_iterable(s[t] for s in shares)) for t in range(len(whole))] == whole
    sizes = [len(s[0]) for s in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("prefetch", [0, 1, 3, 50])
@pytest.mark.parametrize("workers", [1, 3])
def test_prefetch_and_workers_change_nothing(prefetch, workers) -> None:
    cache = numbered()
    want = epoch(Loader(cache, "test", 4, shuffle=True, seed=9))
    assert epoch(Loader(cache, "test", 4, shuffle=True, seed=9, prefetch=prefetch, workers=workers)) == want


@pytest.mark.parametrize("prefetch", [0, 4])
def test_any_position_is_a_start(prefetch) -> None:
    cache = numbered()
    loader = Loader(cache, "train", 10, shuffle=True, seed=2, prefetch=prefetch)
    epochs = [epoch(loader) for _ in range(3)]
    for e, t in ((0, 0), (2, 5), (1, 10), (0, 11)):
        loader.set_position(e, t)
        assert epoch(loader) == epochs[e][t:]
        assert epoch(loader) == fresh_epoch(cache, e + 1)
    assert rows_of(loader.get(1, 3)) == epochs[1][3]
    for bad in ((-1, 0), (0, -1), (0, 12)):
        with pytest.raises(ValueError, match="position"):
            loader.set_position(*bad)


def fresh_epoch(cache: ColumnCache, e: int) -> list[list[int]]:
    loader = Loader(cache, "train", 10, shuffle=True, seed=2)
    loader.set_position(e, 0)
    return epoch(loader)


def test_empty_splits_and_more_ranks_than_rows() -> None:
    cache = numbered()
    assert epoch(Loader(cache, "none", 10)) == []
    batch = next(iter(Loader(with_splits(cache, one=range(5, 6)), "one", 10, rank=0, world_size=2)))
    assert (len(batch), batch.sparse.stride(), batch.dense.shape) == (0, 0, (0, 2))
    assert batch.sparse.keys() == ["u", "v", "w"]


def test_wrong_arguments_are_named() -> None:
    cache = numbered()
    with pytest.raises(KeyError, match="no split 'dev'; there are train, test, none"):
        Loader(cache, "dev", 10)
    for arguments, message in (
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 1, "rank": 2, "world_size": 2}, r"rank 2 outside \[0, 2\)"),
        ({"batch_size": 1, "shuffle": "some"}, "shuffle: expected one of none, rows, blocks, found 'some'"),
    ):
        with pytest.raises(ValueError, match=message):
            Loader(cache, "train", **arguments)


def test_ids_keep_their_width() -> None:
    assert next(iter(Loader(numbered(), "train", 5))).sparse.values().dtype == torch.int32
    assert next(iter(Loader(numbered(dtype=np.int64), "train", 5))).sparse.values().dtype == torch.int64


def test_bags_come_out_as_they_went_in(tmp_path) -> None:
    path, schema, bags = bag_csv(tmp_path)
    cache = preprocess(path, tmp_path / "c", schema, "raw")
    loader = Loader(cache, "train", 64, shuffle=True, seed=5)
    seen = 0
    for t, batch in enumerate(loader):
        parts = batch.sparse.to_dict()
        order = loader.get(0, t)
        assert torch.equal(order.sparse.values(), batch.sparse.values())
        assert parts["who"].lengths().tolist() == [1] * len(batch)
        for i, row in enumerate(epoch_order("rows", 5, 0, 450, t * 64, t * 64 + len(batch))):
            a, b = parts["items"].offsets()[i : i + 2].tolist()
            assert [str(x) for x in parts["items"].values()[a:b].tolist()] == bags[row]
            assert batch.labels[i] == cache.labels[row]
            assert parts["item"].values()[i] == cache.ids[row, 1]
            seen += 1
    assert seen == 450


class Broken:
    """A source whose seventh row cannot be read."""

    def __init__(self) -> None:
        self.cache, self.threads = numbered(), set()
        self.splits = self.cache.splits

    def gather(self, rows: np.ndarray) -> ClickBatch:
        self.threads.add(threading.current_thread().name)
        if 7 in rows:
            raise OSError("row 7 is on a bad block")
        return self.cache.gather(rows)


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_workers_error_reaches_the_consumer_at_its_batch(prefetch) -> None:
    batches = iter(Loader(Broken(), "train", 2, prefetch=prefetch))
    assert [rows_of(next(batches)) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(OSError, match="row 7 is on a bad block"):
        next(batches)
    assert gone()


def gone() -> bool:
    """Whether no loader thread is left, waiting a moment for the last to end."""
    for _ in range(100):
        if not [t for t in threading.enumerate() if t.name.startswith("dlrm-loader")]:
            return True
        time.sleep(0.01)
    return False


def test_leaving_early_leaves_no_thread() -> None:
    loader = Loader(numbered(), "train", 2, prefetch=8, workers=2)
    for _ in loader:
        break
    assert gone()

    def fails() -> None:
        for _ in loader:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fails()
    assert gone()
    iterator = iter(loader)
    next(iterator)
    del iterator
    assert gone()
    list(loader)
    assert gone()


def test_the_generator_is_a_source_too() -> None:
    log = SyntheticLog(SyntheticConfig(rows=1000, tables=(50, 7), n_dense=3, valid=0.1))
    loader = Loader(log, "train", 64, shuffle=True, seed=1)
    batches = list(loader)
    assert sum(len(b) for b in batches) == 800
    again = loader.get(0, 5)
    assert torch.equal(again.dense, batches[5].dense)
    assert torch.equal(again.sparse.values(), batches[5].sparse.values())
    assert int(again.sparse["C2"].values().max()) <= 7
    assert {n: len(r) for n, r in log.splits.items()} == {"train": 800, "valid": 100, "test": 100}


def test_batches_move_with_to() -> None:
    batch = next(iter(Loader(numbered(), "train", 5)))
    moved = batch.to("meta")
    assert moved.dense.is_meta
    assert moved.sparse.values().is_meta
    assert len(moved) == 5
