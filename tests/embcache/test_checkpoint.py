"""Checkpoints: what is stored, what comes back, what is refused, and what a crash or a full disk leaves."""

import errno
import json
import math
import os
from pathlib import Path

import pytest
import torch

import embcache as ec
from embcache import statefile
from embcache.checkpoint import MANIFEST, Checkpoints
from embcache.errors import CorruptStore, FormatVersion, SchemaMismatch, StorageFull
from embcache.statefile import equal_states, pack, unpack


def make_store(rows=100, dim=3, rule=None, dtype=torch.float32, seed=0, padding_idx=None):
    rule = rule or ec.optim.Adagrad(lr=0.1)
    tables = [
        ec.TableConfig("a", rows, dim, optimizer=rule, dtype=dtype, seed=seed, padding_idx=padding_idx),
        ec.TableConfig("b", 7, 2, optimizer=ec.optim.SGD(lr=0.1), seed=seed),
    ]
    return ec.EmbeddingStore(tables, backend="reference")


def train(store, ids_a, ids_b=()):
    values = torch.tensor([*ids_a, *ids_b], dtype=torch.int64)
    batch = ec.KeyedJaggedTensor(["a", "b"], values, lengths=torch.tensor([len(ids_a), len(ids_b)]))
    with store.stage(batch) as handle:
        out = store.lookup(handle)
        store.update(handle, {name: torch.ones_like(t) for name, t in out.items()})
    store.step()


def state(store):
    return unpack(*pack(store.state_dict()))


# packing ---------------------------------------------------------------------------------------------------------


def test_pack_keeps_every_plain_value_and_tensor_bit_for_bit():
    value = {
        "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 1e-320],
        "ints": (1, -(2**70)),
        3: {"nested": None, "flag": True},
        "$odd": "text",
        "tensors": [torch.arange(3, dtype=torch.int32), torch.tensor([math.nan, 1.0]).to(torch.bfloat16)],
        "scalar": torch.tensor(2.5),
        "strided": torch.arange(6).view(2, 3).t(),
        "empty": torch.empty(0, 4),
    }
    plain, tensors = pack(value)
    again = unpack(json.loads(json.dumps(plain, allow_nan=False)), statefile.load(statefile.save(tensors)))
    assert equal_states(value, again)
    assert type(again["ints"]) is tuple
    assert math.copysign(1, again["floats"][1]) == -1


def test_pack_shares_nothing_with_what_it_was_given():
    tensor = torch.zeros(2)
    _, tensors = pack([tensor])
    tensor += 1
    assert torch.equal(tensors["0"], torch.zeros(2))


def test_pack_refuses_what_only_pickle_could_save():
    with pytest.raises(TypeError, match="object cannot be saved"):
        pack({"x": object()})
    with pytest.raises(TypeError, match="keys"):
        pack({(1, 2): 3})


# rows ------------------------------------------------------------------------------------------------------------


def test_only_written_rows_come_out_in_blocks_and_order():
    store = make_store()
    assert list(store.written_rows("a", 10)) == []
    train(store, [5, 99, 5, 0, 17])
    blocks = list(store.written_rows("a", 3))
    assert [b[0].tolist() for b in blocks] == [[0, 5, 17], [99]]
    assert store.count_written("a") == 4
    assert store.count_written("b") == 0
    ids = torch.cat([b[0] for b in blocks])
    assert torch.equal(torch.cat([b[1] for b in blocks]), store.weight("a")[ids])
    assert torch.equal(torch.cat([b[2] for b in blocks]), store.state("a")[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reset_gives_the_initial_rows_back(dtype):
    store, fresh = make_store(dtype=dtype, padding_idx=3), make_store(dtype=dtype, padding_idx=3)
    train(store, [1, 2, 99], [4])
    store.begin_restore(None)
    store.steps[:] = [0, 0]
    assert equal_states(state(store), state(fresh))


def test_loading_rows_marks_them_written():
    store, other = make_store(), make_store()
    train(store, [8, 15, 16], [6])
    for name in "ab":
        for ids, weight, rows in store.written_rows(name, 2):
            other.load_rows(name, ids, weight, rows)
    other.steps[:] = store.steps
    assert equal_states(state(store), state(other))


# generations -----------------------------------------------------------------------------------------------------


RULES = [ec.optim.SGD(lr=0.1), ec.optim.RowWiseAdagrad(lr=0.1), ec.optim.Adam(lr=0.1), ec.optim.FTRL(lr=0.1)]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_round_trip_into_a_fresh_and_into_a_used_store(tmp_path, rule, dtype):
    store = make_store(rule=rule, dtype=dtype)
    for _ in range(3):
        train(store, [5, 99, 5, 0], [1])
    Checkpoints(tmp_path).save({"dense": torch.arange(4.0), "step": 3}, [store])
    used = make_store(rule=rule, dtype=dtype)
    train(used, [7, 8, 9], [2])
    for other in (make_store(rule=rule, dtype=dtype), used):
        loaded = Checkpoints(tmp_path).load([other])
        assert equal_states(loaded, {"dense": torch.arange(4.0), "step": 3})
        assert equal_states(state(store), state(other))
        train(other, [5, 1], [3])
    train(store, [5, 1], [3])
    assert equal_states(state(store), state(used))


def test_tables_come_in_bounded_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("embcache.checkpoint.PART_BYTES", 200)
    store = make_store(rows=1000)
    train(store, list(range(0, 1000, 3)))
    Checkpoints(tmp_path).save({}, [store])
    parts = sorted((tmp_path / "generation-00000001").glob("rows-*"))
    assert len(parts) > 30
    assert all(p.stat().st_size < 1000 for p in parts)
    other = make_store(rows=1000)
    Checkpoints(tmp_path).load([other])
    assert equal_states(state(store), state(other))


def test_nothing_written_costs_nothing(tmp_path):
    Checkpoints(tmp_path).save({}, [make_store(rows=100_000)])
    assert not list(tmp_path.rglob("rows-*"))


def test_newest_and_best_are_kept(tmp_path):
    saved = Checkpoints(tmp_path, keep=2)
    for step, best in ((1, True), (2, False), (3, False), (4, False)):
        saved.save({"step": step}, notes={"step": step}, best=best)
    assert [g.notes["step"] for g in saved.generations] == [1, 3, 4]
    again = Checkpoints(tmp_path)
    assert (again.latest.number, again.best.number) == (4, 1)
    assert again.load(which="best") == {"step": 1}
    assert again.load() == {"step": 4}
    again.save({"step": 5}, notes={"step": 5}, best=True)
    assert [g.notes["step"] for g in again.generations] == [4, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["generation-00000004", "generation-00000005", MANIFEST]


def test_an_empty_folder_holds_no_checkpoint(tmp_path):
    saved = Checkpoints(tmp_path / "absent")
    assert saved.latest is None
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        saved.load()


def test_pending_gradients_are_refused(tmp_path):
    store = make_store()
    batch = ec.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with store.stage(batch) as handle:
        store.update(handle, {"a": torch.ones(1, 3), "b": torch.ones(1, 2)})
    with pytest.raises(RuntimeError, match=r"save after step\(\)"):
        Checkpoints(tmp_path).save({}, [store])


# crashes and damage ----------------------------------------------------------------------------------------------


class Crash(BaseException):
    """Stands for the end of the process: nothing after it runs (no cleanup either, see below)."""


def crash_points():
    """Names of the steps of a save, as they call into the system."""
    return [
        "mkdir",
        "rows",
        "state.safetensors",
        "extra.safetensors",
        "state.json",
        "manifest.json.tmp",
        "replace",
        "sweep",
    ]


@pytest.mark.parametrize("point", crash_points())
def test_a_crash_at_any_point_leaves_the_last_generation_whole(tmp_path, monkeypatch, point):
    store = make_store()
    train(store, [1, 2], [3])
    before = state(store)
    Checkpoints(tmp_path, keep=1).save({"step": 1}, [store])
    train(store, [1, 50], [4])
    after = state(store)
    monkeypatch.setattr("embcache.checkpoint.shutil.rmtree", lambda *a, **k: None)  # a dead process sweeps nothing
    write, replace = statefile.write_file, os.replace

    def dying_write(folder, name, data):
        if name.startswith(point):
            (folder / name).write_bytes(data[: len(data) // 2])  # torn
            raise Crash
        return write(folder, name, data)

    def dying_replace(a, b):
        if point == "replace":
            raise Crash
        replace(a, b)

    monkeypatch.setattr(statefile, "write_file", dying_write)
    monkeypatch.setattr(statefile.os, "replace", dying_replace)
    saved = Checkpoints(tmp_path, keep=1)
    if point == "mkdir":
        (tmp_path / "generation-00000002").mkdir()  # died right after making it
    elif point == "sweep":
        saved.save({"step": 2}, [store])  # committed, but the old generation was not removed
    else:
        with pytest.raises(Crash):
            saved.save({"step": 2}, [store])
    monkeypatch.undo()

    committed = point == "sweep"
    reopened, other = Checkpoints(tmp_path, keep=1), make_store()
    assert reopened.load([other]) == {"step": 2 if committed else 1}
    assert equal_states(state(other), after if committed else before)
    reopened.save({"step": 3}, [store])
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".tmp") == [
        f"generation-{3 if committed else 2:08d}",
        MANIFEST,
    ]
    assert Checkpoints(tmp_path).load([other]) == {"step": 3}


def test_a_full_disk_is_named_and_a_retry_works(tmp_path, monkeypatch):
    store, saved = make_store(), Checkpoints(tmp_path)
    saved.save({"step": 1}, [store])
    train(store, [1])

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(statefile.os, "fsync", full)
    with pytest.raises(StorageFull, match=r"no room for \d+ bytes at .*generation-00000002"):
        saved.save({"step": 2}, [store])
    monkeypatch.undo()
    assert Checkpoints(tmp_path).load([make_store()]) == {"step": 1}
    assert not (tmp_path / "generation-00000002").exists()
    saved.save({"step": 2}, [store])
    assert Checkpoints(tmp_path).load([make_store()]) == {"step": 2}


def damage(path, how):
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "torn":
        path.write_bytes(data[:-3])
    elif how == "one bit":
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    else:
        path.write_bytes(b"something else")


@pytest.mark.parametrize("how", ["missing", "torn", "one bit", "foreign"])
@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "extra.safetensors", "rows-00000.safetensors"])
def test_a_damaged_file_is_refused_before_a_row_changes(tmp_path, name, how):
    store = make_store()
    train(store, [1, 2], [3])
    Checkpoints(tmp_path).save({"w": torch.ones(3)}, [store])
    damage(tmp_path / "generation-00000001" / name, how)
    other = make_store()
    train(other, [4])
    before = state(other)
    with pytest.raises(CorruptStore, match=name):
        Checkpoints(tmp_path).load([other])
    assert equal_states(before, state(other))


@pytest.mark.parametrize("how", ["torn", "one bit", "foreign"])
def test_a_damaged_manifest_is_refused(tmp_path, how):
    Checkpoints(tmp_path).save({})
    damage(tmp_path / MANIFEST, how)
    with pytest.raises(CorruptStore, match=MANIFEST):
        Checkpoints(tmp_path)


def test_foreign_and_newer_manifests_are_told_apart(tmp_path):
    (tmp_path / MANIFEST).write_text('{"format": "other"}')
    with pytest.raises(CorruptStore, match="not a checkpoint of this library"):
        Checkpoints(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": "embcache-checkpoint", "version": 99}')
    with pytest.raises(FormatVersion, match="version 99, this version reads up to 2"):
        Checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 4}, ["'embedding_dim': 3", "'embedding_dim': 4"]),
        ({"rule": ec.optim.Adam(lr=0.1)}, ["'optimizer': 'Adagrad'", "'optimizer': 'Adam'"]),
        ({"dtype": torch.float16}, ["torch.float32", "torch.float16"]),
        ({"seed": 5}, ["'seed': 0", "'seed': 5"]),
        ({"rows": 200}, ["'num_embeddings': 100", "'num_embeddings': 200"]),
    ],
    ids=["dim", "optimizer", "dtype", "seed", "rows"],
)
def test_other_tables_are_refused_listing_both(tmp_path, change, words):
    Checkpoints(tmp_path).save({}, [make_store()])
    with pytest.raises(SchemaMismatch) as error:
        Checkpoints(tmp_path).load([make_store(**change)])
    assert all(word in str(error.value) for word in words)


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "generation-old").mkdir()
    Checkpoints(tmp_path).save({})
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "generation-old").exists()


def test_no_pickle_anywhere():
    for part in ("checkpoint.py", "statefile.py"):
        source = (Path(statefile.__file__).parent / part).read_text()
        assert "import pickle" not in source
        assert "torch.load" not in source
        assert "torch.save" not in source
