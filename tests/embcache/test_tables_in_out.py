"""Single tables out to numpy and Parquet and back, in blocks, and what is refused before the first row changes."""

import errno
import os
import resource
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import embcache as ec
from embcache import records, tablefile
from embcache.errors import BadConfig, CorruptStore, IdOutOfRange, SchemaMismatch, StorageFull
from embcache.tablefile import export_table, load_table

# the warning that a batch does not fit its cache: these caches are tiny on purpose
pytestmark = pytest.mark.filterwarnings("ignore:.*staged batches need:UserWarning")

EDGES = [0, 5, 2**40, 2**63 - 1, -(2**63), -2]  # ascending as unsigned numbers


class Rows:
    """A store as far as files of tables need one: rows in a dictionary."""

    def __init__(self, *tables):
        self.tables = list(tables)
        self.rows = [{} for _ in tables]
        self.front = SimpleNamespace(read_rows=self._read)
        self.largest = 0

    def index(self, name):
        return [table.name for table in self.tables].index(name)

    def _read(self, t, ids):
        table = self.tables[t]
        start = ec.init.rows(table.init, table.seed, table.name, ids, table.embedding_dim, table.num_embeddings)
        rows = records.join(table, start.to(table.dtype))
        for k, i in enumerate(ids.tolist()):
            if i in self.rows[t]:
                rows[k] = self.rows[t][i]
        return rows

    def raw_rows(self, t, block):
        ids = sorted(self.rows[t], key=lambda i: i % 2**64)
        for start in range(0, len(ids), block):
            some = torch.tensor(ids[start : start + block])
            yield some, self._read(t, some)

    def put_raw_rows(self, t, ids, rows):
        assert ids.unique().numel() == ids.numel()
        self.largest = max(self.largest, len(ids))
        self.rows[t].update(zip(ids.tolist(), rows.clone(), strict=True))

    def weight(self, name, ids):
        t = self.index(name)
        return records.weights(self.tables[t], self._read(t, torch.tensor(ids))).clone()

    def state(self, name, ids):
        t = self.index(name)
        return records.states(self.tables[t], self._read(t, torch.tensor(ids))).clone()


def table(rows=None, dim=3, **options):
    return ec.TableConfig("t", rows, dim, optimizer=ec.optim.Adagrad(initial_accumulator_value=0.5), **options)


def filled(config, ids, seed=0):
    store = Rows(config)
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(len(ids), config.embedding_dim, generator=draw).to(config.dtype)
    state = torch.rand(len(ids), config.state_floats, generator=draw)
    store.put_raw_rows(0, torch.tensor(ids), records.join(config, weight, state))
    return store


def same(a, b, ids, state=True):
    assert torch.equal(a.weight("t", ids).view(torch.uint8), b.weight("t", ids).view(torch.uint8))
    if state:
        assert torch.equal(a.state("t", ids), b.state("t", ids))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(tablefile, "BLOCK_BYTES", 128)


# round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_rows_through_parquet_with_state(tmp_path, dtype):
    config = table(dtype=dtype)
    store, other = filled(config, EDGES), Rows(config)
    assert export_table(store, "t", tmp_path / "t.parquet", state=True) == 6
    assert load_table(other, "t", tmp_path / "t.parquet") == 6
    same(store, other, EDGES)
    assert list(other.rows[0]) == EDGES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_rows_through_numpy_with_ids_beside(tmp_path, dtype):
    config = table(dtype=dtype)
    store, other = filled(config, EDGES), Rows(config)
    assert export_table(store, "t", tmp_path / "t.npy") == 6
    assert np.load(tmp_path / "t.ids.npy").tolist() == EDGES
    assert np.load(tmp_path / "t.npy").dtype == (np.float16 if dtype == torch.float16 else np.float32)
    assert load_table(other, "t", tmp_path / "t.npy") == 6
    same(store, other, EDGES, state=False)
    assert torch.equal(other.state("t", EDGES), torch.full((6, 3), 0.5))  # as new rows begin


def test_all_rows_of_a_bounded_table_are_one_array(tmp_path):
    store, other = filled(table(20), [3, 7, 19]), Rows(table(20))
    assert export_table(store, "t", tmp_path / "t.npy") == 20
    assert not (tmp_path / "t.ids.npy").exists()
    whole = np.load(tmp_path / "t.npy")
    assert np.array_equal(whole, store.weight("t", range(20)).numpy())
    assert load_table(other, "t", tmp_path / "t.npy") == 20
    same(store, other, list(range(20)), state=False)
    assert load_table(other, "t", torch.from_numpy(whole)) == 20


def test_all_rows_to_parquet_and_written_rows_to_numpy(tmp_path):
    store = filled(table(20), [3, 7])
    assert export_table(store, "t", tmp_path / "t.parquet", rows="all") == 20
    assert pq.read_table(tmp_path / "t.parquet").column_names == ["id", "weight"]
    assert export_table(store, "t", tmp_path / "t.npy", rows="written") == 2
    assert export_table(store, "t", tmp_path / "t.npy") == 20
    assert not (tmp_path / "t.ids.npy").exists()  # of the export before


def test_no_rows_at_all(tmp_path):
    store, other = Rows(table()), Rows(table())
    for name in ("t.npy", "t.parquet"):
        assert export_table(store, "t", tmp_path / name) == 0
        assert load_table(other, "t", tmp_path / name) == 0
    assert np.load(tmp_path / "t.npy").shape == (0, 3)


def test_a_folder_of_parquet_files(tmp_path):
    export_table(filled(table(), [1, 2]), "t", tmp_path / "a.parquet")
    export_table(filled(table(), [3, 2], seed=1), "t", tmp_path / "b.parquet")
    other = Rows(table())
    assert load_table(other, "t", tmp_path) == 4
    assert torch.equal(other.weight("t", [2]), filled(table(), [3, 2], seed=1).weight("t", [2]))


def test_files_of_other_tools(tmp_path):
    lists = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]  # of any length and float64, as data frames write them
    pq.write_table(pa.table({"other": ["x", "y"], "weight": lists, "id": [9, -9]}), tmp_path / "p.parquet")
    store = Rows(table())
    assert load_table(store, "t", tmp_path / "p.parquet") == 2
    assert store.weight("t", [-9, 9]).tolist() == [[4.0, 5.0, 6.0], [1.0, 2.0, 3.0]]


def test_arrays_of_any_float_type_and_byte_order_with_ids():
    rows = np.arange(6).reshape(2, 3)
    for dtype in ("<f8", ">f4", "<f2"):
        store = Rows(table())
        assert load_table(store, "t", rows.astype(dtype), ids=np.array([4, 5], dtype=np.int32)) == 2
        assert store.weight("t", [4, 5]).tolist() == rows.tolist()
    store = Rows(table())
    load_table(store, "t", torch.from_numpy(rows).double(), ids=torch.tensor([4, 5]))
    load_table(store, "t", np.asfortranarray(rows.astype("f4"))[::-1], ids=[6, 7])
    assert store.weight("t", [4, 5, 7, 6]).tolist() == rows.tolist() * 2


def test_the_last_row_of_an_id_counts(tmp_path):
    rows = np.arange(300, dtype=np.float32).reshape(100, 3)
    ids = np.arange(100) % 7
    store = Rows(table())
    load_table(store, "t", rows, ids=ids)
    assert store.weight("t", range(7)).tolist() == [rows[np.flatnonzero(ids == i)[-1]].tolist() for i in range(7)]


def test_blocks_are_bounded_and_a_mapped_array_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(tablefile, "BLOCK_BYTES", 1 << 20)
    config = ec.TableConfig("t", 200_000, 64)
    np.lib.format.open_memmap(tmp_path / "t.npy", "w+", "<f4", (200_000, 64)).flush()
    store = Rows(config)
    store.put_raw_rows = lambda t, ids, rows: setattr(store, "largest", max(store.largest, len(ids)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mapped = np.load(tmp_path / "t.npy", mmap_mode="r")
    assert load_table(store, "t", mapped, ids=np.arange(200_000)) == 200_000
    assert store.largest == 4096
    private = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert private < 80 << 10  # KiB: the pages of the map, and little else


# what is refused -------------------------------------------------------------------------------------------------


def refuses(error, match, config, source, **options):
    store = Rows(config)
    with pytest.raises(error, match=match):
        load_table(store, "t", source, **options)
    assert store.rows == [{}]


def test_sources_that_do_not_fit():
    rows = torch.ones(4, 3)
    refuses(SchemaMismatch, r"saved '\[4, 2\] of torch.float32', declared '\[n, 3\] of floats'", table(4), rows[:, :2])
    refuses(SchemaMismatch, "of torch.int64", table(4), rows.long())
    refuses(SchemaMismatch, r"\[12\]", table(4), rows.reshape(-1))
    refuses(SchemaMismatch, "of bool", table(4), rows.numpy().astype(bool))
    refuses(BadConfig, "4 rows without ids; this table needs ids, or all 5 rows", table(5), rows)
    refuses(BadConfig, "without ids; this table needs ids$", table(), rows)
    refuses(SchemaMismatch, r"ids of the array: saved '\[3\] of int64'", table(), rows, ids=[1, 2, 3])
    refuses(SchemaMismatch, "of float64", table(), rows, ids=[1.0, 2, 3, 4])
    refuses(IdOutOfRange, r"ids of the array.*values\[2\] = 5, valid range \[0, 5\)", table(5), rows, ids=[0, 1, 5, 2])
    refuses(IdOutOfRange, "= -1", table(5), rows, ids=[0, 1, 2, -1])


def test_a_bad_id_far_into_a_source_is_found_before_the_first_row_changes(tmp_path):
    rows, ids = np.ones((1000, 3), np.float32), np.arange(1000)
    ids[900] = 1000
    refuses(IdOutOfRange, r"values\[900\] = 1000", table(1000), rows, ids=ids)
    pq.write_table(pa.table({"id": ids, "weight": list(rows)}), tmp_path / "t.parquet", row_group_size=10)
    refuses(IdOutOfRange, r"values\[900\] = 1000", table(1000), tmp_path / "t.parquet")
    export_table(filled(table(), [1, 2, 3, 1000]), "t", tmp_path / "u.parquet")
    refuses(IdOutOfRange, r"values\[3\] = 1000", table(1000), tmp_path / "u.parquet")


def test_a_bad_row_far_into_a_file_is_found_before_the_first_row_changes(tmp_path):
    weights = [[1.0, 2.0, 3.0]] * 1000
    weights[900] = [1.0, None, 3.0]
    pq.write_table(pa.table({"id": range(1000), "weight": weights}), tmp_path / "t.parquet")
    refuses(SchemaMismatch, "column 'weight' of table 't': saved 'nulls'", table(), tmp_path / "t.parquet")


def test_files_that_are_none(tmp_path):
    (tmp_path / "t.npy").write_bytes(b"nothing of the kind")
    (tmp_path / "t.parquet").write_bytes(b"nothing of the kind")
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    refuses(CorruptStore, r"t\.npy is not a numpy array", table(), tmp_path / "t.npy")
    refuses(CorruptStore, r"o\.npy is not a numpy array", table(), tmp_path / "o.npy")  # pickle is never read
    refuses(CorruptStore, r"t\.parquet", table(), tmp_path / "t.parquet")
    refuses(BadConfig, "must be .npy", table(), tmp_path / "empty")
    refuses(BadConfig, "must be .npy", table(), tmp_path / "t.csv")
    refuses(FileNotFoundError, r"u\.parquet", table(), tmp_path / "u.parquet")
    refuses(FileNotFoundError, r"u\.npy", table(), tmp_path / "u.npy")
    refuses(BadConfig, "name their ids themselves", table(), tmp_path / "t.parquet", ids=[1])


def test_exports_that_cannot_be(tmp_path):
    store = filled(table(), EDGES)
    for path, options, message in [
        ("t.csv", {}, "must end in .parquet"),
        ("t.npy", {"state": True}, "weights only"),
        ("t.npy", {"rows": "all"}, "has no bound"),
        ("t.npy", {"rows": "some"}, "must be 'written' or 'all'"),
    ]:
        with pytest.raises(BadConfig, match=message):
            export_table(store, "t", tmp_path / path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_leaves_the_file_before(tmp_path, monkeypatch):
    store = filled(table(), EDGES)
    export_table(store, "t", tmp_path / "t.npy")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tablefile._Array, "append", full)
    with pytest.raises(StorageFull, match="no room"):
        export_table(store, "t", tmp_path / "t.npy")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# modules from pretrained rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensor", "array", "map", "path"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_modules_from_pretrained_rows(tmp_path, kind, where):
    rows = torch.randn(50, 4)
    np.save(tmp_path / "rows.npy", rows.numpy())
    source = {
        "tensor": rows,
        "array": rows.numpy(),
        "map": np.load(tmp_path / "rows.npy", mmap_mode="r"),
        "path": tmp_path / "rows.npy",
    }[kind]
    tiers = None if where == "memory" else [ec.tiers.Ram(rows=5), ec.tiers.Lmdb(tmp_path / "store")]
    ours = ec.EmbeddingBag.from_pretrained(source, mode="sum", padding_idx=3, tiers=tiers, backend="reference")
    theirs = torch.nn.EmbeddingBag.from_pretrained(rows, mode="sum", padding_idx=3)
    ids = torch.tensor([[1, 2, 3], [49, 0, 1], [3, 3, 3]])
    assert torch.equal(ours(ids), theirs(ids))
    assert ours(ids).requires_grad is False


def test_pretrained_rows_over_disk_train_and_stay(tmp_path):
    rows = torch.randn(50, 4)
    tiers = [ec.tiers.Ram(rows=5), ec.tiers.Lmdb(tmp_path / "store")]
    options = {"optimizer": ec.optim.Adagrad(lr=0.1), "seed": 1, "backend": "reference"}
    ours = ec.Embedding.from_pretrained(rows, freeze=False, tiers=tiers, **options)
    twin = ec.Embedding.from_pretrained(rows, freeze=False, **options)
    for emb in (ours, twin):
        optimizer = ec.optim.SparseOptimizer(emb)
        for step in range(5):
            emb(torch.arange(step, 50, 3)).square().sum().backward()
            optimizer.step()
    assert torch.equal(ours(torch.arange(50)), twin(torch.arange(50)))
    ours.store.commit()
    ours.store.close()
    reopened = [ec.tiers.Ram(rows=5), ec.tiers.Lmdb(tmp_path / "store")]
    with pytest.raises(BadConfig, match="already holds generation 1 of it"):
        ec.Embedding.from_pretrained(rows, tiers=reopened, **options)
    again = ec.Embedding(50, 4, tiers=[ec.tiers.Ram(rows=5), ec.tiers.Lmdb(tmp_path / "store")], **options)
    assert torch.equal(again(torch.arange(50)), twin(torch.arange(50)))


def test_pretrained_rows_of_another_shape(tmp_path):
    with pytest.raises(BadConfig, match=r"must be \[rows, dim\]"):
        ec.EmbeddingBag.from_pretrained(torch.randn(50))
    with pytest.raises(SchemaMismatch, match=r"saved \[50, 4\], declared \[50, 5\]"):
        ec.EmbeddingBag(50, 5, _weight=torch.randn(50, 4))
    with pytest.raises(FileNotFoundError):
        ec.Embedding.from_pretrained(tmp_path / "nothing.npy")
    half = ec.Embedding.from_pretrained(np.ones((3, 2), np.float16))
    assert (half.table.dtype, half.weight.dtype) == (torch.float16, torch.float16)
    assert ec.Embedding.from_pretrained(np.ones((3, 2))).table.dtype == torch.float32
