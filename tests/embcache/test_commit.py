"""Stores on disk: commit, reopening, going back, what a failed commit leaves, and what travels in state dicts."""

import copy
import errno
import pickle
import threading

import pytest
import torch

import embcache as ec
from embcache import statefile
from embcache.checkpoint import Checkpoints
from embcache.errors import BadConfig, NotSupported, SchemaMismatch, StorageFull

ROWS = 60


def tables(rule=None, dim=3, seed=0, rows=ROWS):
    return [
        ec.TableConfig("a", rows, dim, optimizer=rule or ec.optim.Adagrad(lr=0.1), seed=seed),
        ec.TableConfig("b", None, 2, optimizer=ec.optim.SGD(lr=0.1), seed=seed),
    ]


def on_disk(path, cache=5, **how):
    return ec.EmbeddingStore(tables(**how), [ec.tiers.Ram(rows=cache), ec.tiers.Lmdb(path)])


def in_memory(**how):
    return ec.EmbeddingStore(tables(**how))


def train(store, step):
    rng = torch.Generator().manual_seed(step)
    a = torch.randint(0, ROWS, (12,), generator=rng)
    b = torch.randint(-(2**62), 2**62, (3,), generator=rng) % 7 - 3
    batch = ec.KeyedJaggedTensor(["a", "b"], torch.cat([a, b]), lengths=torch.tensor([12, 3]))
    with store.stage(batch) as handle:
        out = store.lookup(handle)
        store.update(handle, {name: torch.sin(t + step) for name, t in out.items()})
    store.step()


def contents(store):
    out = []
    for name in store.names:
        blocks = list(store.written_rows(name, 7))
        out += [torch.cat([block[i] for block in blocks]) if blocks else torch.empty(0) for i in range(3)]
    return [*out, torch.tensor(store.steps)]


def same(one, other):
    return all(torch.equal(x, y) for x, y in zip(contents(one), contents(other), strict=True))


def test_a_reopened_store_is_the_last_commit_and_trains_on_to_the_same_bits(tmp_path):
    plain, store = in_memory(), on_disk(tmp_path)
    assert (store.generation, store.recovered_from) == (0, None)
    for step in range(6):
        train(plain, step)
        train(store, step)
        if step == 3:
            assert store.commit({"step": step}) == 1
            committed = contents(store)
    store.close()
    store = on_disk(tmp_path)
    assert (store.generation, store.recovered_from) == (1, 1)
    assert all(torch.equal(x, y) for x, y in zip(contents(store), committed, strict=True))
    for step in (4, 5):
        train(store, step)
    assert same(store, plain)
    assert store.restore() == {"step": 3}
    assert all(torch.equal(x, y) for x, y in zip(contents(store), committed, strict=True))
    store.close()


def test_the_best_generation_stays_readable_while_training_goes_on(tmp_path):
    store, plain = on_disk(tmp_path), in_memory()
    states = []
    for step in range(12):
        train(store, step)
        train(plain, step)
        store.commit({"step": step}, keep="best" if step == 2 else None)
        states.append(contents(store))
    assert store.restore("best") == {"step": 2}
    assert all(torch.equal(x, y) for x, y in zip(contents(store), states[2], strict=True))
    assert store.restore() == {"step": 11}
    assert same(store, plain)
    store.restore("best")
    train(store, 3)
    assert all(torch.equal(x, y) for x, y in zip(contents(store), states[3], strict=True))
    number = store.commit()
    store.close()
    with on_disk(tmp_path) as store:
        assert store.generation == number
        assert all(torch.equal(x, y) for x, y in zip(contents(store), states[3], strict=True))


def test_a_commit_in_the_background_is_what_the_rows_were_when_it_began(tmp_path):
    store = on_disk(tmp_path)
    for step in range(8):
        train(store, step)
        number = store.commit({"step": step}, wait=False)
        before = contents(store)
    train(store, 99)
    store.close()
    with on_disk(tmp_path) as store:
        assert store.generation == number == 8
        assert all(torch.equal(x, y) for x, y in zip(contents(store), before, strict=True))
    assert not [t for t in threading.enumerate() if t.name.startswith("embcache")]


@pytest.mark.parametrize("wait", [True, False])
def test_a_commit_that_fails_leaves_the_last_generation_and_can_be_tried_again(tmp_path, monkeypatch, wait):
    store, plain = on_disk(tmp_path), in_memory()
    for s in (store, plain):
        train(s, 0)
    store.commit()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    for s in (store, plain):
        train(s, 1)
    monkeypatch.setattr(statefile.os, "fsync", full)
    if not wait:
        store.commit(wait=False)
    fails = store.commit if wait else store.checkpoints.wait
    with pytest.raises(StorageFull):
        fails()
    monkeypatch.undo()
    assert store.generation == Checkpoints(tmp_path).latest.number == 1
    for s in (store, plain):
        train(s, 2)
    assert store.commit(wait=wait) == 2
    store.close()
    with on_disk(tmp_path) as store:
        assert same(store, plain)


def test_pending_gradients_are_refused(tmp_path):
    with on_disk(tmp_path) as store:
        batch = ec.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
        with store.stage(batch) as handle:
            store.update(handle, {"a": torch.ones(1, 3), "b": torch.ones(1, 2)})
        with pytest.raises(RuntimeError, match=r"save after step\(\)"):
            store.commit()
        store.step()
        assert store.commit() == 1


def test_other_tables_are_refused_before_anything_is_written(tmp_path):
    with on_disk(tmp_path) as store:
        train(store, 0)
        store.commit()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.json")}
    for change in ({"rule": ec.optim.Adam(lr=0.1)}, {"dim": 4}, {"seed": 1}, {"rows": ROWS + 1}):
        with pytest.raises(SchemaMismatch, match="declared"):
            on_disk(tmp_path, **change)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*.json")}
    with on_disk(tmp_path, rule=ec.optim.Adagrad(lr=0.5)) as store:  # a rate may change
        assert store.generation == 1


def test_a_store_is_reopened_from_its_folder_alone_also_beside_its_writer(tmp_path):
    store = on_disk(tmp_path)
    train(store, 0)
    store.commit()
    reader = ec.EmbeddingStore.open(tmp_path, readonly=True, rows=4)
    assert same(store, reader)
    assert reader.tables == store.tables
    train(store, 1)
    assert reader.refresh() == 1
    store.commit()
    assert reader.refresh() == 2
    assert same(store, reader)
    with pytest.raises(NotSupported, match="read-only"):
        train(reader, 2)
    with pytest.raises(NotSupported, match="read-only"):
        reader.commit()
    reader.close()
    store.close()
    with ec.EmbeddingStore.open(tmp_path, rows=4) as store:
        assert store.generation == 2
    with pytest.raises(FileNotFoundError):
        ec.EmbeddingStore.open(tmp_path / "nothing")


def test_state_dicts_name_path_and_generation_and_fail_loudly(tmp_path):
    kind = lambda path: ec.EmbeddingBagCollection(tables(), tiers=[ec.tiers.Ram(rows=4), ec.tiers.Lmdb(path)])  # noqa: E731
    model = kind(tmp_path / "a")
    train(model.store, 0)
    model.store.commit()
    saved = model.state_dict()
    assert saved == {"store": {"path": str(tmp_path / "a"), "generation": 1}}
    first = contents(model.store)
    train(model.store, 1)
    model.store.commit()
    model.load_state_dict(saved)
    assert all(torch.equal(x, y) for x, y in zip(contents(model.store), first, strict=True))
    other = kind(tmp_path / "b")
    with pytest.raises(RuntimeError, match="lives in"):
        other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})
    saved["store"]["generation"] = 77
    with pytest.raises(RuntimeError, match="no checkpoint 77"):
        model.load_state_dict(saved)
    model.store.close()
    other.store.close()


def test_a_copy_is_refused_and_a_pickle_carries_the_path(tmp_path):
    with on_disk(tmp_path) as store:
        train(store, 0)
        store.commit()
        with pytest.raises(NotSupported, match="read-only"):
            copy.deepcopy(store)
        again = pickle.loads(pickle.dumps(store))
        assert same(again, store)
        assert again.durable.readonly
        again.close()


def test_hashed_stores_in_memory_are_copied_pickled_and_saved(tmp_path):
    for tiers in ([ec.tiers.Ram()], [ec.tiers.Ram(rows=4), ec.tiers.Ram()]):
        store = ec.EmbeddingStore(tables(), tiers)
        for step in range(3):
            train(store, step)
        copied, pickled = copy.deepcopy(store), pickle.loads(pickle.dumps(store))
        fresh = ec.EmbeddingStore(tables(), [tier.fresh() for tier in tiers])
        Checkpoints(tmp_path / str(len(tiers))).save({}, [store])
        Checkpoints(tmp_path / str(len(tiers))).load([fresh])
        for other in (copied, pickled, fresh):
            assert same(store, other)
        train(store, 3)
        train(copied, 3)
        assert same(store, copied)
        assert not same(store, pickled)
        with pytest.raises(NotSupported, match="Checkpoints"):
            store.commit()


def test_a_store_on_disk_is_saved_in_its_own_folder_alone(tmp_path):
    with on_disk(tmp_path / "a") as one, on_disk(tmp_path / "b") as two:
        with pytest.raises(BadConfig, match="own folder"):
            Checkpoints(tmp_path / "c").save({}, [one])
        train(one, 0)
        Checkpoints(tmp_path / "a").save({"dense": torch.ones(2)}, [one, in_memory()])
        assert one.generation == 1
        assert two.generation == 0
