"""Exports: what is written, what comes back, what is refused."""

import errno
import json
import resource
import shutil
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import embcache as ec
from embcache import columns, records
from embcache.errors import BadConfig, CorruptStore, FormatVersion, SchemaMismatch, StorageFull, WrongParent
from embcache.kernels.buckets import bucket_of, bucket_order
from embcache.transfer.importing import read_deleted, read_rows
from embcache.transfer.manifest import MANIFEST, Manifest, State, check_chain, verify
from embcache.transfer.writer import ExportWriter

EDGES = [0, 1, -1, 7, 2**31, 2**63 - 1, -(2**63)]


def random_rows(table, ids, seed=0):
    """Whole rows that hold finite weights, state, and step and count where the table keeps them."""
    draw = torch.Generator().manual_seed(seed)
    n = len(ids)
    weight = torch.randn(n, table.embedding_dim, generator=draw).to(table.dtype)
    state = torch.rand(n, table.state_floats, generator=draw)
    meta = torch.randint(0, 2**31 - 1, (n, 2), generator=draw, dtype=torch.int32) if table.meta_bytes else None
    return records.join(table, weight, state, meta)


def sorted_ids(ids):
    return torch.from_numpy(np.sort(np.array(ids, dtype=np.int64).view(np.uint64)).view(np.int64))


# buckets ---------------------------------------------------------------------------------------------------------


def test_buckets_never_change():
    keys = np.array(EDGES)
    assert bucket_of(keys).tolist() == [56, 36, 57, 24, 9, 10, 18]
    assert bucket_of(keys, 1000).tolist() == [883, 566, 893, 389, 145, 165, 281]
    assert bucket_of(keys, 1).tolist() == [0] * 7
    assert bucket_of(keys[:0]).tolist() == []


def test_buckets_are_those_of_the_formula():
    mask = (1 << 64) - 1
    keys = np.concatenate([np.array(EDGES), np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200)])
    for n in (1, 3, 64, 65536):
        expected = []
        for key in keys.tolist():
            x = (key + 0x9E3779B97F4A7C15) & mask
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
            expected.append((((x ^ (x >> 31)) >> 32) * n) >> 32)
        assert bucket_of(keys, n).tolist() == expected


def test_buckets_are_even_and_nested():
    keys = np.arange(100_000)
    counts = np.bincount(bucket_of(keys), minlength=64)
    assert counts.min() > 0.9 * counts.mean()
    assert counts.max() < 1.1 * counts.mean()
    assert np.array_equal(bucket_of(keys, 128) // 2, bucket_of(keys, 64))


def test_bucket_order_groups_and_keeps_the_order_inside():
    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 1000)
    order, starts = bucket_order(keys, 5)
    numbers = bucket_of(keys, 5)
    for b in range(5):
        assert np.array_equal(order[starts[b] : starts[b + 1]], np.flatnonzero(numbers == b))


@pytest.mark.parametrize("buckets", [0, -1, 65537])
def test_a_number_of_buckets_that_cannot_be(buckets):
    with pytest.raises(ValueError, match=r"must be in \[1, 65536\]"):
        bucket_of(np.arange(3), buckets)


# columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [ec.optim.SGD(), ec.optim.RowWiseAdagrad(), ec.optim.Adam(per_row_step=True)])
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_rows_survive_columns_bit_for_bit(dtype, rule, dim):
    table = ec.TableConfig("t", None, dim, optimizer=rule, dtype=dtype)
    ids = sorted_ids(EDGES)
    rows = random_rows(table, ids)
    found, again = columns.from_arrow(table, columns.to_arrow(table, ids, rows))
    assert torch.equal(found, ids)
    assert torch.equal(again, rows)


def test_columns_read_as_numbers_in_any_tool(tmp_path):
    table = ec.TableConfig("t", None, 2, optimizer=ec.optim.Adagrad(), dtype=torch.bfloat16)
    rows = records.join(table, torch.tensor([[1.5, -2.0]]).bfloat16(), torch.tensor([[0.25, 0.5]]))
    pq.write_table(columns.to_arrow(table, torch.tensor([-7]), rows), tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet").to_pylist() == [
        {"id": -7, "weight": [1.5, -2.0], "state": [0.25, 0.5]}
    ]


def test_columns_of_another_kind_are_refused():
    table = ec.TableConfig("t", None, 2, optimizer=ec.optim.Adagrad())
    good = {"id": [1], "weight": [[1.0, 2.0]], "state": [[0.0, 0.0]]}
    bad = {
        "no 'weight'": {"id": [1]},
        "int weights": {**good, "weight": [[1, 2]]},
        "wide": {**good, "weight": [[1.0, 2.0, 3.0]]},
        "ragged": {"id": [1, 2], "weight": [[1.0], [1.0, 2.0, 3.0]]},
        "null list": {"id": [1, 2], "weight": [[1.0, 2.0], None]},
        "null float": {"id": [1], "weight": [[1.0, None]]},
        "null id": {**good, "id": pa.array([None], pa.int64())},
        "float id": {**good, "id": [1.0]},
        "narrow state": {**good, "state": [[0.0]]},
    }
    for what, data in bad.items():
        with pytest.raises(SchemaMismatch, match="of table 't'"):
            pytest.fail(f"{what} was read as {columns.from_arrow(table, pa.table(data))}")
    ids, rows = columns.from_arrow(table, pa.table(good))  # lists of any kind, floats of any width
    assert records.weights(table, rows).tolist() == [[1.0, 2.0]]
    assert ids.tolist() == [1]


# files -----------------------------------------------------------------------------------------------------------

TABLES = [
    ec.TableConfig("wide / ö", None, 5, optimizer=ec.optim.Adagrad()),
    ec.TableConfig("empty", 10, 2),
    ec.TableConfig("half", 1000, 3, dtype=torch.float16),
]
HERE = State("a1", 3, 77)


def blocks(ids, rows, size):
    for start in range(0, max(1, len(ids)), size):
        yield ids[start : start + size], rows[start : start + size]


def contents():
    draw = np.random.default_rng(3)
    many = sorted_ids(np.unique(np.concatenate([EDGES, draw.integers(-(2**63), 2**63 - 1, 3000)])))
    ids = [many, sorted_ids([]), torch.arange(0, 1000, 3)]
    return [(i, random_rows(t, i)) for t, i in zip(TABLES, ids, strict=True)]


def write(folder, parent=None, deleted=(), **options):
    with ExportWriter(folder, **options) as out:
        for t, (table, (ids, rows)) in enumerate(zip(TABLES, contents(), strict=True)):
            out.table(table, 10 + t, blocks(ids, rows, 256), deleted if t == 0 else ())
        return out.finish(HERE, parent)


def read(folder, manifest, t):
    part = manifest.tables[t]
    parts = [
        block
        for file in part.files
        if not file.deleted
        for block in read_rows(folder, part.table, file, manifest.buckets)
    ]
    return torch.cat([ids for ids, _ in parts]), torch.cat([rows for _, rows in parts])


@pytest.mark.parametrize("options", [{}, {"buckets": 1}, {"buckets": 7, "memory": 1}])
def test_an_export_holds_every_row_under_its_key(tmp_path, options):
    written = write(tmp_path / "x", **options)
    manifest = verify(tmp_path / "x")
    assert manifest == written
    assert (manifest.kind, manifest.state, [t.step for t in manifest.tables]) == ("full", HERE, [10, 11, 12])
    assert [t.table for t in manifest.tables] == TABLES
    for t, (ids, rows) in enumerate(contents()):
        assert manifest.tables[t].rows == len(ids)
        if not len(ids):
            assert manifest.tables[t].files == ()
            continue
        found, again = read(tmp_path / "x", manifest, t)
        order, at = found.sort().indices, ids.sort().indices
        assert torch.equal(found[order], ids[at])
        assert torch.equal(again[order], rows[at])


def test_ids_of_a_file_ascend_as_unsigned_numbers_and_are_of_its_bucket(tmp_path):
    manifest = write(tmp_path, memory=4096)
    for file in manifest.tables[0].files:
        ids = pq.read_table(tmp_path / file.name).column("id").to_numpy()
        assert len(ids) == file.rows
        assert (np.diff(ids.view(np.uint64).astype(object)) > 0).all()
        assert set(bucket_of(ids).tolist()) == {file.bucket}


def test_deleted_ids_lie_beside_the_rows(tmp_path):
    gone = [torch.tensor([5, 9]), torch.tensor([-3])]
    manifest = write(tmp_path, parent=State("a1", 2, 5), deleted=gone)
    assert (manifest.kind, manifest.tables[0].deleted) == ("delta", 3)
    files = [f for f in manifest.tables[0].files if f.deleted]
    found = [i for f in files for ids in read_deleted(tmp_path, TABLES[0], f, 64) for i in ids.tolist()]
    assert sorted(found) == [-3, 5, 9]


def test_the_same_rows_give_the_same_files(tmp_path):
    assert write(tmp_path / "a") == write(tmp_path / "b")


def test_memory_is_bounded_whatever_the_size(tmp_path):
    table = ec.TableConfig("t", None, 64)
    held = []

    def stream():
        draw = torch.Generator().manual_seed(0)
        for k in range(40):
            ids = torch.arange(k * 4096, (k + 1) * 4096)
            yield ids, torch.randint(0, 127, (4096, table.row_bytes), generator=draw, dtype=torch.uint8)
            held.append(pa.total_allocated_bytes())

    with ExportWriter(tmp_path, memory=1 << 20) as out:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out.table(table, 0, stream())
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        out.finish(HERE)
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.parquet")) > 40 << 20
    assert grown < 20 << 10  # KiB
    assert max(held) < 8 << 20


def test_a_folder_in_use_is_refused_and_an_interrupted_export_is_cleared(tmp_path):
    write(tmp_path / "x")
    with pytest.raises(BadConfig, match="already holds an export"):
        write(tmp_path / "x")
    (tmp_path / "x" / MANIFEST).unlink()
    (tmp_path / "x" / "table-0007").mkdir()
    write(tmp_path / "x")
    assert verify(tmp_path / "x").state == HERE
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "thesis.txt").write_text("mine")
    with pytest.raises(BadConfig, match=r"it holds 'thesis\.txt'"):
        write(tmp_path / "y")
    assert (tmp_path / "y" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("buckets", [0, 513, 2.0])
def test_buckets_of_an_export_are_few(tmp_path, buckets):
    with pytest.raises(BadConfig, match=r"integer in \[1, 512\]"):
        ExportWriter(tmp_path, buckets=buckets)


def test_an_error_in_the_source_leaves_no_export_and_no_files(tmp_path):
    def breaks():
        yield contents()[0]
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"), ExportWriter(tmp_path / "x") as out:
        out.table(TABLES[0], 0, breaks())
    assert list((tmp_path / "x").iterdir()) == []
    with pytest.raises(FileNotFoundError, match="holds no export"):
        Manifest.read(tmp_path / "x")


def test_a_full_disk_is_named_and_the_same_export_works_later(tmp_path, monkeypatch):
    from embcache.transfer import writer

    def full(self, data):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(writer._Sink, "write", full)
        with pytest.raises(StorageFull, match="no room"):
            write(tmp_path / "x")
    assert verify(write(tmp_path / "x") and tmp_path / "x").tables[0].rows == len(contents()[0][0])


# what is refused -------------------------------------------------------------------------------------------------


def rewrite(folder, change):
    """Alter the table of contents the way somebody would who knows its checksum."""
    body = json.loads((folder / MANIFEST).read_text())
    body.pop("check")
    change(body)
    check = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (folder / MANIFEST).write_text(json.dumps({**body, "check": check}))


def test_an_altered_cut_or_missing_file_is_named(tmp_path):
    manifest = write(tmp_path / "good")
    name = manifest.tables[0].files[5].name
    for k, damage in enumerate(
        [
            lambda p: p.write_bytes(p.read_bytes()[:-1]),
            lambda p: p.write_bytes(p.read_bytes()[:100] + b"\x01" + p.read_bytes()[101:]),
            lambda p: p.unlink(),
        ]
    ):
        copy = tmp_path / str(k)
        shutil.copytree(tmp_path / "good", copy)
        damage(copy / name)
        with pytest.raises(CorruptStore, match=name):
            verify(copy)
    verify(tmp_path / "good")


def test_an_altered_table_of_contents_is_refused(tmp_path):
    write(tmp_path)
    path = tmp_path / MANIFEST
    good = path.read_text()
    path.write_text(good.replace('"generation": 3', '"generation": 4'))
    with pytest.raises(CorruptStore, match="checksum does not match"):
        Manifest.read(tmp_path)
    for text, message in (("[", "is not JSON"), ("[]", "not an export"), ('{"format": "x"}', "not an export")):
        path.write_text(text)
        with pytest.raises(CorruptStore, match=message):
            Manifest.read(tmp_path)


def test_a_newer_export_is_refused(tmp_path):
    write(tmp_path)
    rewrite(tmp_path, lambda body: body.update(version=9))
    with pytest.raises(FormatVersion, match="format version 9"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["tables"][0]["files"][0].update(name="../../etc/passwd"), "names a file"),
        (lambda b: b["tables"][0]["files"][0].update(name="/etc/passwd"), "names a file"),
        (lambda b: b["tables"][0]["files"][0].pop("crc32"), "lacks what an export has"),
        (lambda b: b.pop("tables"), "lacks what an export has"),
        (lambda b: b.update(tables=3), "lacks what an export has"),
        (lambda b: b.update(buckets=0), "buckets = 0"),
        (lambda b: b.update(buckets="many"), "lacks what an export has"),
        (lambda b: b.update(state=None), "lacks what an export has"),
        (lambda b: b["tables"][0]["table"].update(embedding_dim=-1), "embedding_dim = -1"),
        (lambda b: b.update(extra={"file": "x", "bytes": 1, "crc32": 1}), "names a file 'x'"),
    ],
)
def test_a_forged_table_of_contents_is_refused(tmp_path, change, message):
    write(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CorruptStore, match=message):
        Manifest.read(tmp_path)


def test_rows_outside_their_table_or_bucket_are_refused(tmp_path):
    manifest = write(tmp_path)
    part = manifest.tables[2]
    first, second = part.files[:2]
    with pytest.raises(CorruptStore, match=f"ids of another bucket than {second.bucket}"):
        list(read_rows(tmp_path, part.table, _renamed(second, first.name), 64))
    small = ec.TableConfig("half", 10, 3, dtype=torch.float16)
    with pytest.raises(CorruptStore, match=r"ids outside \[0, 10\)"):
        list(read_rows(tmp_path, small, first, 64))
    (tmp_path / "x.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(CorruptStore, match=r"x\.parquet"):
        list(read_rows(tmp_path, part.table, _renamed(first, "x.parquet"), 64))


def _renamed(file, name):
    return type(file)(**{**vars(file), "name": name})


def _manifest(generation, parent=None, check=0):
    return Manifest(State("a1", generation, check), parent, 64, ())


def test_a_chain_continues_step_by_step():
    full, d1, d2 = _manifest(1), _manifest(4, State("a1", 1, 0)), _manifest(9, State("a1", 4, 0))
    names = [Path("full"), Path("d1"), Path("d2")]
    check_chain(names, [full, d1, d2], None)
    check_chain(names[1:], [d1, d2], State("a1", 1, 0))
    check_chain(names, [d1, full, d1], State("a1", 1, 0))
    for chain, found in [
        ([full, d2], None),
        ([d1], None),
        ([d1], State("a1", 2, 0)),
        ([d1], State("other", 1, 0)),
        ([d1], State("a1", 1, 5)),
        ([d2, d1], State("a1", 4, 0)),
        ([d1, d1], State("a1", 1, 0)),
    ]:
        with pytest.raises(WrongParent, match="import the exports in order"):
            check_chain(names[: len(chain)], chain, found)
