"""Exports of real stores: full ones, chains of deltas, and what must not be mixed."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import embcache as ec
from embcache.errors import (
    BadConfig,
    CorruptStore,
    NotSupported,
    SchemaMismatch,
    StorageFull,
    WrongParent,
)
from embcache.tiers import Lmdb, Ram
from embcache.transfer import export_store, import_exports, verify
from embcache.transfer.manifest import Manifest

# the warning that a batch does not fit its cache: these caches are tiny on purpose
pytestmark = pytest.mark.filterwarnings("ignore:.*staged batches need:UserWarning")


def tables(**changes):
    wide = {"optimizer": ec.optim.Adam(lr=0.1), **changes}
    return [
        ec.TableConfig("wide", None, 3, **wide),
        ec.TableConfig("half", 50, 2, dtype=torch.bfloat16, optimizer=ec.optim.RowWiseAdagrad(lr=0.1)),
    ]


def in_memory(**changes):
    return ec.EmbeddingStore(tables(**changes), backend="reference")


def on_disk(path, rows=8, **changes):
    return ec.EmbeddingStore(tables(**changes), [Ram(rows=rows), Lmdb(path)], backend="reference")


def train(store, steps, seed=0):
    """Steps over few ids, so that rows come back often."""
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        wide = draw.integers(-20, 20, 12) * 2**58
        half = draw.integers(0, 50, 6)
        values = torch.from_numpy(np.concatenate([wide, half]))
        batch = ec.KeyedJaggedTensor(["wide", "half"], values, lengths=torch.tensor([6, 6, 3, 3]))
        with store.stage(batch) as handle:
            out = store.lookup(handle)
            store.update(handle, {name: torch.cos(t * 3) for name, t in out.items()})
        store.step()


def contents(store):
    """Every written row by table and id, and the step counts."""
    rows = [
        {
            i: bytes(row.numpy())
            for ids, block in store.raw_rows(t, 7)
            for i, row in zip(ids.tolist(), block, strict=True)
        }
        for t in range(2)
    ]
    return rows, list(store.steps)


# full ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["memory", "disk"])
@pytest.mark.parametrize("target", ["memory", "disk"])
def test_a_full_export_gives_the_same_store(tmp_path, source, target):
    store = in_memory() if source == "memory" else on_disk(tmp_path / "a")
    train(store, 20)
    if source == "disk":
        store.commit()
    manifest = export_store(store, tmp_path / "x")
    assert verify(tmp_path / "x") == manifest
    other = in_memory() if target == "memory" else on_disk(tmp_path / "b")
    train(other, 3, seed=9)  # replaced, rows that only it has too
    other.load_rows("wide", torch.tensor([4711]), torch.ones(1, 3))
    assert import_exports(other, tmp_path / "x") == manifest.state
    assert contents(other) == contents(store)
    train(store, 5, seed=1)
    train(other, 5, seed=1)
    assert contents(other) == contents(store)


def test_an_import_is_committed(tmp_path):
    store, other = in_memory(), on_disk(tmp_path / "b")
    train(store, 5)
    state = export_store(store, tmp_path / "x").state
    import_exports(other, tmp_path / "x")
    other.close()
    again = ec.EmbeddingStore.open(tmp_path / "b", rows=8, backend="reference")
    assert contents(again) == contents(store)
    assert again.checkpoints.latest.notes == {"imported": vars(state)}


def test_a_reader_exports_beside_the_writer(tmp_path):
    store = on_disk(tmp_path / "a")
    train(store, 5)
    store.commit()
    expected = contents(store)
    train(store, 5, seed=1)  # not committed
    reader = ec.EmbeddingStore.open(tmp_path / "a", readonly=True, rows=8, backend="reference")
    manifest = export_store(reader, tmp_path / "x")
    assert manifest.state.generation == 1
    other = in_memory()
    import_exports(other, tmp_path / "x")
    assert contents(other) == expected


def test_an_export_names_the_state_it_holds(tmp_path):
    store = on_disk(tmp_path / "a")
    with pytest.raises(BadConfig, match=r"call commit\(\) first"):
        export_store(store, tmp_path / "x")
    train(store, 1)
    with pytest.raises(BadConfig, match=r"call commit\(\) first"):
        export_store(store, tmp_path / "x")
    store.commit()
    train(store, 1)
    with pytest.raises(BadConfig, match=r"call commit\(\) first"):
        export_store(store, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    store.commit()
    state = export_store(store, tmp_path / "x").state
    assert (state.lineage, state.generation) == (store.lineage, 2)


def test_gradients_that_wait_are_refused(tmp_path):
    store, other = in_memory(), in_memory()
    export_store(other, tmp_path / "x")
    batch = ec.KeyedJaggedTensor(["wide", "half"], torch.tensor([1]), lengths=torch.tensor([1, 0]))
    handle = store.stage(batch)
    store.update(handle, {name: torch.ones_like(t) for name, t in store.lookup(handle).items()})
    with pytest.raises(BadConfig, match="waiting for step"):
        export_store(store, tmp_path / "y")
    with pytest.raises(BadConfig, match="waiting for step"):
        import_exports(store, tmp_path / "x")
    disk = on_disk(tmp_path / "a")
    with disk.stage(batch), pytest.raises(BadConfig, match="1 rows are pinned"):
        import_exports(disk, tmp_path / "x")
    import_exports(disk, tmp_path / "x")


def test_an_export_waits_for_a_commit_in_the_background(tmp_path):
    store = on_disk(tmp_path / "a")
    train(store, 3)
    store.commit(wait=False)
    assert export_store(store, tmp_path / "x").state.generation == 1


def test_a_copy_that_was_trained_differently_is_no_parent(tmp_path):
    store = on_disk(tmp_path / "a")
    train(store, 2)
    store.commit()
    store.close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    stores = [on_disk(tmp_path / name) for name in ("a", "b")]
    for k, each in enumerate(stores):  # as many steps from the same state: only the data differ
        train(each, 1, seed=k)
        each.commit()
        export_store(each, tmp_path / f"x{k}")
    with pytest.raises(BadConfig, match="does not continue"):
        export_store(stores[1], tmp_path / "y", since=tmp_path / "x0")
    train(stores[1], 1)
    stores[1].commit()
    export_store(stores[1], tmp_path / "y", since=tmp_path / "x1")
    replica = in_memory()
    import_exports(replica, tmp_path / "x0")
    with pytest.raises(WrongParent):
        import_exports(replica, tmp_path / "y")


# chains ----------------------------------------------------------------------------------------------------------


def change(store, k):
    """Something different each time: training, rows loaded, rows deleted, rows deleted and trained again, a merge."""
    train(store, 2, seed=k)
    if k % 2:
        store.delete("wide", torch.tensor([2**58, -3 * 2**58, 12345]))
        store.delete("half", torch.arange(k, 50, 7))
    if k % 3 == 0:
        store.load_rows("wide", torch.tensor([-(2**63), 2**63 - 1, k]), torch.full((3, 3), float(k)))
    if k % 4 == 1:
        train(store, 1, seed=k)
    store.commit()
    if k % 5 == 2:
        store.durable.merge()


def test_a_chain_of_deltas_replays_to_the_full_export(tmp_path):
    store, replica, late = on_disk(tmp_path / "a"), on_disk(tmp_path / "b"), in_memory()
    change(store, 0)
    export_store(store, tmp_path / "0", buckets=4)
    import_exports(replica, tmp_path / "0")
    links = ["0"]
    for k in range(1, 12):
        change(store, k)
        if k % 3 == 0:  # deltas over several generations, and over one
            continue
        manifest = export_store(store, tmp_path / str(k), since=tmp_path / links[-1], buckets=4)
        assert manifest.kind == "delta"
        links.append(str(k))
        import_exports(replica, tmp_path / str(k))
        assert contents(replica) == contents(store)
    import_exports(late, *(tmp_path / link for link in links))
    assert contents(late) == contents(store)
    whole = export_store(store, tmp_path / "whole", buckets=4)
    copy = export_store(replica, tmp_path / "copy", buckets=4)
    assert [t.files for t in copy.tables] == [t.files for t in whole.tables]  # checksums too
    assert sum(t.deleted for k in links for t in Manifest.read(tmp_path / k).tables) > 0


OPS = st.lists(
    st.tuples(st.sampled_from(["train", "load", "delete", "commit", "export", "merge", "reopen"]), st.integers(0, 9)),
    min_size=5,
    max_size=25,
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(OPS)
def test_any_history_replays(ops):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, replica, links = on_disk(folder / "a", rows=4), in_memory(), []
        for op, k in [*ops, ("export", 0)]:
            ids = torch.tensor([k * 2**58, -k, k])
            if op == "train":
                train(store, 1, seed=k)
            elif op == "load":
                store.load_rows("wide", ids.unique(), torch.full((len(ids.unique()), 3), float(k)))
            elif op == "delete":
                store.delete("wide", ids)
                store.delete("half", torch.tensor([k]))
            elif op == "reopen":
                store.commit()
                store.close()
                store = on_disk(folder / "a", rows=4)
            elif op == "merge":
                store.commit()
                store.durable.merge()
            elif op == "commit" or op == "export":
                store.commit()
            if op == "export":
                links.append(folder / f"x{len(links)}")
                export_store(store, links[-1], since=links[-2] if len(links) > 1 else None, buckets=2)
        import_exports(replica, *links)
        assert contents(replica) == contents(store)
        store.close()


def test_a_delta_holds_what_changed_and_no_more(tmp_path):
    store = on_disk(tmp_path / "a")
    train(store, 20)
    store.commit()
    before = export_store(store, tmp_path / "0")
    store.load_rows("wide", torch.tensor([5]), torch.ones(1, 3))
    store.delete("wide", torch.tensor([2**58]))
    store.commit()
    delta = export_store(store, tmp_path / "1", since=1)
    assert delta.parent == before.state
    assert [(t.rows, t.deleted) for t in delta.tables] == [(1, 1), (0, 0)]
    nothing = export_store(store, tmp_path / "2", since=tmp_path / "1")
    assert [(t.rows, t.deleted) for t in nothing.tables] == [(0, 0), (0, 0)]
    replica = in_memory()
    import_exports(replica, tmp_path / "0", tmp_path / "1", tmp_path / "2")
    assert contents(replica) == contents(store)


def test_a_store_follows_by_deltas_of_its_own_past(tmp_path):
    store = on_disk(tmp_path / "a")
    change(store, 0)
    change(store, 1)
    export_store(store, tmp_path / "1", since=1)
    expected = contents(store)
    store.restore(1)
    import_exports(store, tmp_path / "1")
    assert contents(store) == expected


def chain_of_three(folder):
    store = on_disk(folder / "a")
    change(store, 0)
    export_store(store, folder / "full")
    change(store, 1)
    export_store(store, folder / "one", since=folder / "full")
    change(store, 2)
    export_store(store, folder / "two", since=folder / "one")
    return store


def test_gaps_and_wrong_parents_are_refused_before_anything_changes(tmp_path):
    chain_of_three(tmp_path)
    full, one, two = (tmp_path / name for name in ("full", "one", "two"))
    for target in (in_memory(), on_disk(tmp_path / "b")):
        train(target, 2)
        for wrong in ([one], [two], [full, two], [full, two, one], [full, one, one], [one, full]):
            before = contents(target)
            with pytest.raises(WrongParent, match="import the exports in order"):
                import_exports(target, *wrong)
            assert contents(target) == before
        import_exports(target, full)
        with pytest.raises(WrongParent, match=r"two continues generation 2 of \w+, but what is here is generation 1"):
            import_exports(target, two)
        import_exports(target, one)
        with pytest.raises(WrongParent):
            import_exports(target, one)  # it was applied already
        train(target, 1)
        with pytest.raises(WrongParent, match="no imported or exported state"):
            import_exports(target, two)
        import_exports(target, full, one, two)


def test_training_after_an_import_breaks_the_chain_on_disk_too(tmp_path):
    chain_of_three(tmp_path)
    target = on_disk(tmp_path / "b")
    import_exports(target, tmp_path / "full")
    train(target, 1)
    target.commit()
    with pytest.raises(WrongParent, match=f"what is here is generation 2 of {target.lineage}"):
        import_exports(target, tmp_path / "one")


def test_a_history_that_was_left_is_no_parent(tmp_path):
    store = on_disk(tmp_path / "a")
    for k in range(3):
        change(store, k)
    export_store(store, tmp_path / "3")
    store.restore(2)
    change(store, 7)  # generation 4 continues 2
    with pytest.raises(BadConfig, match="no longer known: export in full"):
        export_store(store, tmp_path / "4", since=tmp_path / "3")
    assert not (tmp_path / "4").exists()
    export_store(store, tmp_path / "full")
    replica = in_memory()
    import_exports(replica, tmp_path / "full")
    assert contents(replica) == contents(store)


def test_since_something_that_is_not_there(tmp_path):
    store, other = on_disk(tmp_path / "a"), on_disk(tmp_path / "b")
    change(store, 0)
    change(other, 0)
    export_store(other, tmp_path / "x")
    with pytest.raises(BadConfig, match="name an export of this store"):
        export_store(store, tmp_path / "y", since=tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        export_store(store, tmp_path / "y", since=7)
    with pytest.raises(FileNotFoundError, match="holds no export"):
        export_store(store, tmp_path / "y", since=tmp_path / "nothing")
    with pytest.raises(NotSupported, match="in memory"):
        export_store(in_memory(), tmp_path / "y", since=tmp_path / "x")
    assert not (tmp_path / "y").exists()


# what is refused, and what stays ---------------------------------------------------------------------------------


def test_other_tables_are_refused(tmp_path):
    store = in_memory()
    train(store, 2)
    export_store(store, tmp_path / "x")
    other = in_memory(seed=5)
    with pytest.raises(SchemaMismatch, match=r"tables of .*x: saved \[{'name': 'wide', 'seed': 0}\]"):
        import_exports(other, tmp_path / "x")
    import_exports(in_memory(optimizer=ec.optim.Adam(lr=7.0)), tmp_path / "x")  # the rate may differ


def test_damage_anywhere_in_a_chain_is_found_before_the_first_row_changes(tmp_path):
    chain_of_three(tmp_path)
    last = Manifest.read(tmp_path / "two").tables[0].files[-1].name
    data = bytearray((tmp_path / "two" / last).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "two" / last).write_bytes(data)
    target = on_disk(tmp_path / "b")
    train(target, 2)
    target.commit()
    before = contents(target)
    with pytest.raises(CorruptStore, match=last):
        import_exports(target, *(tmp_path / name for name in ("full", "one", "two")))
    assert contents(target) == before
    assert (target.generation, target.unsaved) == (1, False)


def test_a_full_disk_in_the_middle_leaves_the_generation_before(tmp_path, monkeypatch):
    chain_of_three(tmp_path)
    target = on_disk(tmp_path / "b")
    train(target, 2)
    target.commit()
    before, written, real = contents(target), [], target.durable.write

    def full(t, keys, rows):
        written.append(len(keys))
        if len(written) > 5:
            raise StorageFull(4096, 0, "here")
        real(t, keys, rows)

    with monkeypatch.context() as patch:
        patch.setattr(target.durable, "write", full)
        with pytest.raises(StorageFull):
            import_exports(target, tmp_path / "full", tmp_path / "one")
    assert sum(written[:5]) > 0
    assert contents(target) == before
    import_exports(target, tmp_path / "full", tmp_path / "one")
    target.close()
    assert ec.EmbeddingStore.open(tmp_path / "b", rows=8, backend="reference").generation == 2


KILLED = """
import os, sys
import embcache as ec
store = ec.EmbeddingStore.open(sys.argv[1], rows=8, backend="reference")
real, calls = store.durable.write, []
def write(*block):
    real(*block)
    calls.append(1)
    if len(calls) == 5:
        os._exit(9)
store.durable.write = write
ec.transfer.import_exports(store, *sys.argv[2:])
"""


def test_a_process_that_dies_in_an_import_leaves_the_generation_before(tmp_path):
    chain_of_three(tmp_path)
    target = on_disk(tmp_path / "b")
    train(target, 2)
    target.commit()
    target.durable.merge()
    before = contents(target)
    target.close()
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "b", tmp_path / "full", tmp_path / "one"])
    assert done.returncode == 9
    again = on_disk(tmp_path / "b")
    assert contents(again) == before
    assert list(again.durable.verify()) == []
    import_exports(again, tmp_path / "full", tmp_path / "one")


def test_a_store_opened_for_reading_takes_no_import(tmp_path):
    chain_of_three(tmp_path)
    reader = ec.EmbeddingStore.open(tmp_path / "a", readonly=True, rows=8, backend="reference")
    with pytest.raises(NotSupported, match="read-only"):
        import_exports(reader, tmp_path / "full")
    with pytest.raises(BadConfig, match="no export was named"):
        import_exports(reader)


def test_one_table_through_files(tmp_path):
    store = on_disk(tmp_path / "a")
    train(store, 10)
    store.export_table("wide", tmp_path / "wide.parquet", state=True)
    store.export_table("half", tmp_path / "half.npy")
    other = on_disk(tmp_path / "b")
    other.load_table("wide", tmp_path / "wide.parquet")
    other.load_table("half", tmp_path / "half.npy")
    assert contents(other)[0][0] == contents(store)[0][0]
    ids = torch.arange(50)
    assert torch.equal(other.read_rows("half", ids)[0], store.read_rows("half", ids)[0])


# admission and expiry --------------------------------------------------------------------------------------------


def fading(path=None):
    options = {"admission": ec.Admission(2, cells=64), "expiry": ec.Expiry(idle=3, every=2)}
    table = ec.TableConfig("t", None, 2, optimizer=ec.optim.Adagrad(lr=0.1), **options)
    return ec.EmbeddingStore([table], None if path is None else [Ram(rows=4), Lmdb(path)], backend="reference")


def touch(store, steps, seed):
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        batch = ec.KeyedJaggedTensor(["t"], torch.from_numpy(draw.integers(0, 30, 8)), lengths=torch.tensor([8]))
        with store.stage(batch) as handle:
            store.update(handle, {"t": torch.cos(3 * store.lookup(handle)["t"])})
        store.step()


def rows_of(store):
    return {int(i): bytes(r.numpy()) for ids, rows in store.raw_rows(0, 7) for i, r in zip(ids, rows, strict=True)}


@pytest.mark.parametrize("target", ["memory", "disk"])
def test_counts_clocks_and_expired_rows_go_along(tmp_path, target):
    store, replica = fading(tmp_path / "a"), fading(tmp_path / "b" if target == "disk" else None)
    touch(store, 10, 0)
    store.commit()
    export_store(store, tmp_path / "0")
    import_exports(replica, tmp_path / "0")
    gone = 0
    for k in range(1, 5):
        touch(store, 7, k)
        store.commit()
        delta = export_store(store, tmp_path / str(k), since=tmp_path / str(k - 1))
        gone += delta.tables[0].deleted
        import_exports(replica, tmp_path / str(k))
        assert rows_of(replica) == rows_of(store)
        assert torch.equal(replica.extra_state()["t.admission"], store.extra_state()["t.admission"])
    assert gone > 0
    touch(store, 9, 9)  # both go on alike: who is admitted, and who is over
    touch(replica, 9, 9)
    assert rows_of(replica) == rows_of(store)
