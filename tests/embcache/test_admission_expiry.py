"""Admission, expiry and delete: a function of the batches alone, against a plain dict, whatever the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lifetime_model import DIM, EDGES, Model, Pair, kjt, stream, table

import embcache as ec
from embcache.cache.admission import AdmissionFilter
from embcache.cache.expiry import ExpiryClock

pytestmark = pytest.mark.filterwarnings("ignore:table .* staged batches need")
Ram = ec.tiers.Ram
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "admission": {"admission": ec.Admission(3)},
    "idle": {"expiry": ec.Expiry(idle=3, every=4)},
    "rare": {"expiry": ec.Expiry(below=3, every=5)},
    "idle and rare": {"expiry": ec.Expiry(idle=2, below=4, every=3)},
    "all": {"admission": ec.Admission(2), "expiry": ec.Expiry(idle=5, below=6, every=2)},
}
CHAINS: dict[str, Any] = {
    "hashed": lambda: [Ram()],
    "one row": lambda: [Ram(rows=1), Ram()],
    "lru": lambda: [Ram(rows=17, policy="lru"), Ram()],
    "lookahead": lambda: [Ram(rows=40, policy="lookahead"), Ram()],
    "all resident": lambda: [Ram(rows=5000), Ram()],
    "three tiers": lambda: [Ram(rows=9), Ram(rows=25, policy="lfu_decay"), Ram()],
}


@pytest.mark.parametrize(
    ("chain", "depth"),
    [("hashed", 3), ("one row", 0), ("lru", 0), ("lru", 3), ("lookahead", 2), ("all resident", 0), ("three tiers", 3)],
)
@pytest.mark.parametrize("options", OPTIONS)
def test_like_a_dict(options: str, chain: str, depth: int) -> None:
    config = table(**OPTIONS[options])
    pair = Pair(ec.EmbeddingStore([config], CHAINS[chain]()), Model(config), depth)
    pair.train(stream(1, 20))
    pair.check()
    pair.delete(np.concatenate([EDGES, np.arange(0, 60, 3), [10**9]]))
    pair.check()
    pair.train(stream(2, 16))
    pair.check()
    if options == "all":
        assert 0 < len(pair.model.rows) < len(pair.model.seen)


@pytest.mark.parametrize("chain", ["hashed", "lru"])
def test_deletes_and_sweeps_reach_rows_that_are_pinned(chain: str) -> None:
    config = table(admission=ec.Admission(2), expiry=ec.Expiry(idle=1, every=1))
    pair = Pair(ec.EmbeddingStore([config], CHAINS[chain]()), Model(config))
    pair.train(iter([[np.arange(20)], [np.arange(20)]]))
    assert len(pair.model.rows) == 20
    with pair.store.stage(kjt(np.arange(20))) as handle:
        pair.delete(np.arange(0, 20, 2))
        assert np.array_equal(torch.cat(list(pair.store.lookup(handle).values())), pair.model.read(np.arange(20)))
        pair.train(iter([[np.arange(100, 120)]] * 4))  # the other ten are over
        assert sorted(pair.model.rows) == list(range(100, 120))
        assert np.array_equal(torch.cat(list(pair.store.lookup(handle).values())), pair.model.read(np.arange(20)))
    pair.check()


def test_reading_and_staging_count_nothing() -> None:
    config = table(admission=ec.Admission(3))
    pair = Pair(ec.EmbeddingStore([config], [Ram(rows=8), Ram()]), Model(config))
    ids = np.arange(40)
    for _ in range(4):
        for training in (True, False):
            with pair.store.stage(kjt(ids), training=training) as handle:
                pair.store.lookup(handle)
    assert not pair.store.front.extra_state()["t.admission"].any()
    with pair.store.stage(kjt(ids)) as handle:  # gathered, then dropped
        pair.store.update(handle, {"t1": torch.ones(20, DIM), "t2": torch.ones(20, DIM)})
        pair.store.discard()
    pair.train(iter([[ids], [ids]]))
    pair.check()
    assert not pair.model.rows
    pair.train(iter([[ids]]))
    pair.check()
    assert len(pair.model.rows) == 40


def test_frozen_tables_stand_still() -> None:
    config = table(admission=ec.Admission(2), expiry=ec.Expiry(idle=1, every=2))
    other = ec.TableConfig("o", None, DIM, optimizer=ec.optim.SGD(lr=0.5))
    store = ec.EmbeddingStore([config, other], [Ram(rows=4), Ram()])

    def step(ids: list[int]) -> None:
        batch = ec.KeyedJaggedTensor(["t1", "o"], torch.tensor([*ids, 7]), lengths=torch.tensor([len(ids), 1]))
        with store.stage(batch, features=("t1", "o")) as handle:
            store.update(handle, {"t1": torch.ones(1, DIM), "o": torch.ones(1, DIM)})
        store.step()

    step([1, 1, 2])
    assert store.count_written("t") == 1
    store.freeze("t")
    for _ in range(5):
        step([2, 3])
    assert store.count_written("t") == 1
    assert store.steps == [1, 6]
    store.freeze("t", frozen=False)
    step([2])  # its second: 3 was not counted
    assert [k for ids, _, _ in store.written_rows("t") for k in ids.tolist()] == [1, 2]
    step([3])
    step([3])
    step([9])  # step 4: a sweep
    assert [k for ids, _, _ in store.written_rows("t") for k in ids.tolist()] == [3]


def test_expired_and_refused_rows_give_their_memory_back() -> None:
    config = table(admission=ec.Admission(2), expiry=ec.Expiry(idle=2, every=4))
    store = ec.EmbeddingStore([config], [Ram()])
    pair = Pair(store, Model(config))
    pair.train([np.arange(50 * k, 50 * k + 50)] for k in range(12))
    assert store.front.stats()["resident"] <= 100  # seen once each: only what the last batches staged
    pair.train([np.arange(50 * k, 50 * k + 50)] for k in range(12))
    assert store.front.stats()["resident"] <= 4 * 50 + 100
    pair.check()


@pytest.mark.parametrize("options", ["admission", "all"])
def test_commit_reopen_and_go_back(tmp_path: Path, options: str) -> None:
    config = table(**OPTIONS[options])

    def opened() -> ec.EmbeddingStore:
        return ec.EmbeddingStore([config], [Ram(rows=20), ec.tiers.Lmdb(tmp_path / "store")])

    with opened() as store:
        pair = Pair(store, Model(config))
        pair.train(stream(3, 21))
        store.commit()
        saved = {key: list(row) for key, row in pair.model.rows.items()}, dict(pair.model.seen), pair.model.steps
        pair.train(stream(4, 9))
        pair.check()
        store.restore("latest")
        pair.model.rows, pair.model.seen, pair.model.steps = (
            {key: list(row) for key, row in saved[0].items()},
            dict(saved[1]),
            saved[2],
        )
        pair.check()
        pair.train(stream(5, 9))  # lost with the process
    with opened() as store:
        pair = Pair(store, Model(config, *saved))
        pair.check()
        pair.train(stream(6, 21))
        pair.check()


def test_a_store_in_memory_is_saved_with_its_counts() -> None:
    config = table(**OPTIONS["all"])
    pair = Pair(ec.EmbeddingStore([config]), Model(config))
    pair.train(stream(7, 15))
    other = ec.EmbeddingStore([config])
    other.load_state_dict(pair.store.state_dict())
    pair = Pair(other, pair.model)
    pair.check()
    pair.train(stream(8, 15))
    pair.check()


def test_what_is_over_below_can_be_purged_and_does_not_come_back_with_a_reset(tmp_path: Path) -> None:
    config = table(expiry=ec.Expiry(idle=2, every=3))
    for last in (Ram(), ec.tiers.Lmdb(tmp_path / "store")):
        store = ec.EmbeddingStore([config], [Ram(rows=6), last])
        pair = Pair(store, Model(config))
        pair.train(stream(11, 20))
        stored = store.front.below[-1].count(0)
        assert stored > len(pair.model.rows)
        purged = store.front.purge()
        assert purged > 0
        assert store.front.below[-1].count(0) == stored - purged
        assert store.front.purge() == 0
        pair.check()
        pair.train(stream(12, 11))
        pair.check()
        store.front.reset(0)
        assert store.front.below[-1].count(0) == 0
        assert store.count_written("t") == 0
        asked = np.arange(100)
        assert np.array_equal(store.read_rows("t", torch.from_numpy(asked))[0], pair.model.initial(asked))
        store.close()


def test_a_bounded_table_with_options_is_the_same() -> None:
    shared: dict[str, Any] = {
        "features": ["t1", "t2"],
        "optimizer": ec.optim.SGD(lr=0.5),
        "init": ec.init.Uniform(0.5),
        "admission": ec.Admission(3),
        "expiry": ec.Expiry(idle=3, every=4),
    }
    config = ec.TableConfig("t", 300, DIM, **shared)
    pair = Pair(ec.EmbeddingStore([config]), Model(config))
    assert not pair.store.front.direct(0)
    pair.train([np.clip(some, 0, 299) for some in ids] for ids in stream(9, 30))
    rows = pair.model.rows
    assert pair.store.count_written("t") == len(rows)
    asked = np.arange(300)
    assert np.array_equal(pair.store.read_rows("t", torch.from_numpy(asked))[0], pair.model.read(asked))


def test_refused_rows_of_a_table_with_max_norm_keep_their_bits() -> None:
    outs = []
    for tiers in ([Ram()], [Ram(rows=1), Ram()]):
        config = ec.TableConfig(
            "t", None, DIM, features=["t1", "t2"], max_norm=0.3, admission=ec.Admission(3), init=ec.init.Uniform(0.5)
        )
        store = ec.EmbeddingStore([config], tiers)
        for ids in stream(10, 12):
            with store.stage(kjt(ids[0])) as handle:
                out = store.lookup(handle)
                outs.append(torch.cat(list(out.values())))
                store.update(handle, {name: value.round() for name, value in out.items()})
            store.step()
        outs += [torch.cat(parts) for parts in zip(*store.written_rows("t"), strict=True)]
    half = len(outs) // 2
    assert all(torch.equal(a, b) for a, b in zip(outs[:half], outs[half:], strict=True))


# parts ---------------------------------------------------------------------------------------------------------------


def test_the_filter_never_counts_too_little_and_ignores_order() -> None:
    rng = np.random.default_rng(0)
    for min_count, cells in ((1, 64), (7, 4096), (300, 1 << 16), (5, 1)):
        ids = rng.integers(-(2**63), 2**63 - 1, 500)
        counts = rng.integers(1, min_count + 2, 500)
        one, two = (AdmissionFilter(ec.Admission(min_count, cells)) for _ in range(2))
        one.count(ids, counts)
        for k in rng.permutation(500):
            for part in np.array_split(np.ones(counts[k], dtype=np.int64), 2):
                two.count(ids[k : k + 1], np.array([part.sum()]))
        assert np.array_equal(one.cells, two.cells)
        assert one.admitted(ids[counts >= min_count]).all()
        assert one.cells.dtype == (np.uint8 if min_count <= 255 else np.int32)
    alone = AdmissionFilter(ec.Admission(3))
    alone.count(ids, np.full(500, 2))
    assert not alone.admitted(ids).any()
    alone.count(ids[:1], np.array([1]))
    assert alone.admitted(ids).tolist() == [True] + [False] * 499


def test_the_places_of_an_id_in_the_filter_never_change() -> None:
    known = AdmissionFilter(ec.Admission(9, cells=64 * 1000))
    known.count(np.array([42]), np.array([5]))
    bucket, places = np.nonzero(known.cells)
    assert (bucket.tolist(), places.tolist()) == ([47] * 4, [231, 530, 663, 880])


def test_rows_from_outside_begin_at_the_present_step() -> None:
    config = table(expiry=ec.Expiry(idle=2, below=3, every=1))
    clock = ExpiryClock(config)
    clock.now = 40
    rows = np.zeros((2, config.row_bytes), dtype=np.uint8)
    clock.metas(rows)[1] = 7, 2
    assert clock.metas(clock.adopt(rows)).tolist() == [[40, 3], [7, 2]]
    assert clock.metas(rows).tolist() == [[0, 0], [7, 2]]

    store = ec.EmbeddingStore([table(expiry=ec.Expiry(idle=2, every=1))], [Ram(rows=2), Ram()])
    pair = Pair(store, Model(store.tables[0]))
    pair.train([np.arange(4)] for _ in range(5))
    store.load_rows("t", torch.tensor([100]), torch.ones(1, DIM))
    pair.train([np.arange(4)] for _ in range(2))
    assert store.read_rows("t", torch.tensor([100]))[0].tolist() == [[1.0] * DIM]
    pair.train([np.arange(4)] for _ in range(1))
    assert np.array_equal(store.read_rows("t", torch.tensor([100]))[0], pair.model.initial(np.array([100])))


def test_saved_state_of_other_tables_is_refused() -> None:
    store = ec.EmbeddingStore([table(admission=ec.Admission(2, cells=128))])
    with pytest.raises(ec.errors.SchemaMismatch, match="admission"):
        store.front.load_extra_state({"t.admission": torch.zeros(64, 3, dtype=torch.uint8)})
    with pytest.raises(ec.errors.SchemaMismatch):
        store.front.load_extra_state({"t.expiry": torch.zeros(2, dtype=torch.int64)})
    store.front.load_extra_state({"t.admission": torch.ones(64, 2, dtype=torch.uint8)})
    assert bool((store.front.extra_state()["t.admission"] == 1).all())
    store.front.load_extra_state({})
    assert not store.front.extra_state()["t.admission"].any()


def test_options_are_checked_and_leave_other_layouts_alone() -> None:
    for bad in (0, -1, 1.5, True, 2**31):
        with pytest.raises(ec.errors.BadConfig, match="min_count"):
            ec.Admission(bad)  # type: ignore[arg-type]
    with pytest.raises(ec.errors.BadConfig, match="cells"):
        ec.Admission(1, cells=0)
    with pytest.raises(ec.errors.BadConfig, match="at least one"):
        ec.Expiry()
    for name, value in (("idle", -1), ("below", 0), ("every", 0), ("every", None)):
        with pytest.raises(ec.errors.BadConfig, match=name):
            ec.Expiry(**{"idle": 1, name: value})
    with pytest.raises(ec.errors.BadConfig, match="expiry = 3"):
        table(expiry=3)
    plain, counted, mortal = table(), table(admission=ec.Admission(2)), table(expiry=ec.Expiry(idle=1))
    assert plain.row_bytes == counted.row_bytes == 12
    assert (plain.meta_bytes, mortal.meta_bytes, mortal.meta_offset) == (0, 8, 12)
    assert mortal.row_bytes >= 20
    assert "admission" not in plain.schema()
    assert counted.schema()["admission"] == "Admission(min_count=2, cells=4194304)"
