"""Preprocessing against an oracle in plain Python; equal bytes whatever the packing, chunks, threads or budget."""

import gzip
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_logs import (
    bag_csv,
    dense_oracle,
    finished,
    ids_oracle,
    read_columns,
    same_but_inputs,
    small_log,
    vocabulary_oracle,
)

from dlrm.data import (
    Categorical,
    ColumnCache,
    Dense,
    IdSpec,
    Label,
    Limits,
    ResumeMismatch,
    Schema,
    SplitSpec,
    Time,
    preprocess,
)
from dlrm.data.hashing import mix_python
from dlrm.data.splits import last_ranges

SMALL_CHUNKS = Limits(chunk_bytes=7_000)


@pytest.mark.parametrize("min_count", [1, 3])
def test_vocabulary_ids_dense_and_labels_equal_the_oracle(tmp_path, min_count) -> None:
    path, schema = small_log(tmp_path)
    cache = preprocess(path, tmp_path / "c", schema, f"vocab:{min_count}", "last:0.1,0.2", limits=SMALL_CHUNKS)
    columns = read_columns(path, schema)
    assert cache.splits == last_ranges(4000, 0.1, 0.2)
    assert np.array_equal(cache.labels, np.array(columns["label"], np.float32))
    for k, d in enumerate(schema.dense):
        assert np.array_equal(cache.dense[:, k], dense_oracle(columns[d.column]))
    for k, name in enumerate(schema.features):
        rows = vocabulary_oracle(columns[name], cache.splits["train"], min_count)
        assert cache.num_embeddings[name] == len(rows) + 2
        assert np.array_equal(cache.ids[:, k], ids_oracle(columns[name], rows))
        assert cache.vocabularies[name].view(np.uint64).tolist() == [int(t, 16) for t in rows]
    assert cache.ids.dtype == np.int32
    assert cache.info["rows"] == 4000
    assert cache.info["click_rate"] == cache.labels.mean(dtype=np.float64)


def test_hashed_and_raw_ids(tmp_path) -> None:
    path, schema = small_log(tmp_path)
    columns = read_columns(path, schema)
    hashed = preprocess(path, tmp_path / "h", schema, IdSpec("hash", size=100, sizes={"C2": 7}))
    raw = preprocess(path, tmp_path / "r", schema, "raw")
    for k, name in enumerate(schema.features):
        size = 7 if name == "C2" else 100
        want = [1 + mix_python(int(t, 16)) % (size - 1) if t else 0 for t in columns[name]]
        assert hashed.ids[:, k].tolist() == want
        assert hashed.num_embeddings[name] == size
        assert raw.ids[:, k].tolist() == [int(t, 16) if t else -(2**63) for t in columns[name]]
        assert raw.num_embeddings[name] is None
    assert (hashed.ids.dtype, raw.ids.dtype) == (np.int32, np.int64)
    with pytest.raises(ValueError, match="no size for table 'C1'"):
        preprocess(path, tmp_path / "x", schema, IdSpec("hash", sizes={"C2": 7}))


@pytest.mark.parametrize("ids", ["vocab:2", "hash:50", "raw"])
def test_bytes_do_not_depend_on_chunks_threads_or_memory(tmp_path, ids) -> None:
    path, schema = small_log(tmp_path)
    limits = (
        Limits(),
        Limits(threads=1, chunk_bytes=4000, memory_bytes=1),
        Limits(threads=3, chunk_bytes=9001, memory_bytes=1 << 14),
    )
    files = []
    for k, limit in enumerate(limits):
        preprocess(path, tmp_path / str(k), schema, ids, "random:0.1,0.2,5", limits=limit)
        files.append(finished(tmp_path / str(k)))
    assert files[0] == files[1] == files[2]


def test_gzip_and_parquet_give_what_plain_text_gives(tmp_path) -> None:
    path, schema = small_log(tmp_path)
    preprocess(path, tmp_path / "plain", schema, "vocab:2", limits=SMALL_CHUNKS)
    data = path.read_bytes()
    with (tmp_path / "two_members").open("wb") as f:  # told apart by content, not by name
        f.write(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))
    preprocess(tmp_path / "two_members", tmp_path / "gz", schema, "vocab:2", limits=Limits(chunk_bytes=20_000))
    same_but_inputs(tmp_path / "plain", tmp_path / "gz")
    columns = read_columns(path, schema)
    texts = {n: pa.array([t or None for t in v]) for n, v in columns.items()}
    numbers = {**texts, "label": pa.array(columns["label"]).cast(pa.int8())}
    for d in schema.dense:
        numbers[d.column] = pa.array([int(t) if t else None for t in columns[d.column]], pa.int64())
    numbers["C1"] = pa.array([int(t, 16) if t else None for t in columns["C1"]], pa.uint64())
    numbers["C2"] = texts["C2"].dictionary_encode()
    numbers["C3"] = texts["C3"].cast(pa.large_string())
    for name, table in (("texts", texts), ("numbers", numbers)):
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet", row_group_size=700)
        preprocess(tmp_path / f"{name}.parquet", tmp_path / name, schema, "vocab:2", limits=SMALL_CHUNKS)
        same_but_inputs(tmp_path / "plain", tmp_path / name)


def test_several_files_are_one_log_and_files_may_be_splits(tmp_path) -> None:
    path, schema = small_log(tmp_path)
    preprocess(path, tmp_path / "one", schema, "vocab:2", "last:0.25")
    lines = path.read_bytes().splitlines(keepends=True)
    parts = [tmp_path / f"part_{k}" for k in range(3)]
    for part, (a, b) in zip(parts, ((0, 1000), (1000, 3000), (3000, 4000)), strict=True):
        part.write_bytes(b"".join(lines[a:b]).removesuffix(b"\n"))  # a file need not end in a newline
    preprocess(parts, tmp_path / "many", schema, "vocab:2", "last:0.25", limits=SMALL_CHUNKS)
    same_but_inputs(tmp_path / "one", tmp_path / "many")
    given = preprocess({"test": parts[2], "train": parts[:2]}, tmp_path / "given", schema, "vocab:2", "files")
    assert given.splits == {"train": range(0, 3000), "test": range(3000, 4000)}
    same_but_inputs(tmp_path / "one", tmp_path / "given")
    with pytest.raises(ValueError, match="go together"):
        preprocess({"train": path}, tmp_path / "x", schema, "vocab:2", "last:0.1")


def test_random_splits_are_a_function_of_row_number_and_seed(tmp_path) -> None:
    path, schema = small_log(tmp_path)
    spec = SplitSpec("random", 0.1, 0.2, seed=5)
    cache = preprocess(path, tmp_path / "a", schema, "hash:50", spec, limits=SMALL_CHUNKS)
    parts = {n: set(np.asarray(r).tolist()) for n, r in cache.splits.items()}
    assert set.union(*parts.values()) == set(range(4000))
    assert sum(len(p) for p in parts.values()) == 4000
    assert abs(len(parts["test"]) - 800) < 100
    assert abs(len(parts["valid"]) - 400) < 80
    half = tmp_path / "half.tsv"
    half.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2000]))
    first = preprocess(half, tmp_path / "b", schema, "hash:50", spec)
    assert {n: set(np.asarray(r).tolist()) for n, r in first.splits.items()} == {
        n: {x for x in p if x < 2000} for n, p in parts.items()
    }
    other = preprocess(path, tmp_path / "c", schema, "hash:50", "random:0.1,0.2,6")
    assert set(np.asarray(other.splits["test"]).tolist()) != parts["test"]


def test_bags_quotes_shared_tables_and_missing_markers(tmp_path) -> None:
    path, schema, bags = bag_csv(tmp_path)
    cache = preprocess(path, tmp_path / "c", schema, "vocab:4", "last:0.2", limits=Limits(chunk_bytes=700))
    with path.open() as f:
        lines = [line.rstrip("\n") for line in f][1:]
    items = [line.split(",")[-3] for line in lines]
    # One vocabulary for the bag and the single id: counts of both columns together, training rows only.
    both = [x for i, (bag, item) in enumerate(zip(bags, items, strict=True)) if i < 400 for x in (*bag, item)]
    rows = vocabulary_oracle(both, range(len(both)), 4, base=10)
    values, offsets = cache.bags["items"]
    got = [values[offsets[i] : offsets[i + 1]].tolist() for i in range(500)]
    assert got == [[rows.get(x, 0) for x in bag] for bag in bags]
    assert cache.ids[:, 1].tolist() == [rows.get(x, 0) for x in items]
    assert cache.num_embeddings["items"] == cache.num_embeddings["item"] == len(rows) + 2
    prices = [line.split(",")[0] for line in lines]
    assert np.array_equal(cache.dense[:, 0], np.array([float(p) if p not in ("", "NA") else 0 for p in prices], "f4"))
    # A quoted text and the same text unquoted would be one id; here all that matters is that the comma did not split.
    assert cache.num_embeddings["who"] > 10
    lists = pa.table(
        {
            "price": pa.array([float(p) if p not in ("", "NA") else None for p in prices]),
            "who": [line.split(",", 1)[1].rsplit(",", 4)[0].strip('"') for line in lines],
            "items": pa.array([[int(x) for x in bag] or None for bag in bags], pa.list_(pa.int64())),
            "item": [int(x) for x in items],
            "clicked": [line.split(",")[-2] == "1" for line in lines],
        }
    )
    pq.write_table(lists, tmp_path / "bags.parquet", row_group_size=90)
    preprocess(tmp_path / "bags.parquet", tmp_path / "p", schema, "vocab:4", "last:0.2")
    same_but_inputs(tmp_path / "c", tmp_path / "p")
    hashed = preprocess(path, tmp_path / "h", schema, "hash:9", "last:0.2", limits=Limits(chunk_bytes=700))
    values, offsets = hashed.bags["items"]
    assert values.tolist() == [1 + mix_python(int(x)) % 8 for bag in bags for x in bag]
    assert offsets[-1] == sum(len(bag) for bag in bags)


def test_time_formats_features_and_splits(tmp_path) -> None:
    days = ["2014-10-21", "2014-10-22T23:59:59", "2014-10-23 01:30", "2014-10-22T00:00:00Z", "2000-02-29"]
    (tmp_path / "iso.csv").write_text("t,y,c\n" + "".join(f"{d},1,a\n" for d in days))
    ids = (Categorical("c"),)
    time = Time("t", "iso", categorical=("hour_of_day", "weekday"), dense=("hour_cos",))
    cache = preprocess(tmp_path / "iso.csv", tmp_path / "c", Schema(Label("y"), (), ids, time), "raw", "time:1,1")
    assert cache.ids[:, 1].tolist() == [0, 23, 1, 0, 0]
    assert cache.ids[:, 2].tolist() == [1, 2, 3, 2, 1]  # Tuesday, Wednesday, Thursday, Wednesday, Tuesday
    assert np.allclose(cache.dense[:, 0], np.cos(np.array([0, 23, 1, 0, 0]) * 2 * np.pi / 24))
    assert np.asarray(cache.splits["test"]).tolist() == [2]
    assert np.asarray(cache.splits["valid"]).tolist() == [1, 3]
    assert np.asarray(cache.splits["train"]).tolist() == [0, 4]
    for form, texts in (
        ("unix", ["1413849600", "1414022399", "1414027800", "1413936000", "951782400"]),
        ("unix_ms", ["1413849600000", "1414022399999", "1414027800001", "1413936000000", "951782400000"]),
        ("yymmddhh", ["14102100", "14102223", "14102301", "14102200", "00022900"]),
    ):
        (tmp_path / f"{form}.csv").write_text("t,y,c\n" + "".join(f"{d},1,a\n" for d in texts))
        schema = Schema(Label("y"), (), ids, Time("t", form, time.categorical, time.dense))
        preprocess(tmp_path / f"{form}.csv", tmp_path / form, schema, "raw", "time:1,1")
        same_but_inputs(tmp_path / "c", tmp_path / form)
    stamps = np.array(["2014-10-21", "2014-10-22T23:59:59", "2014-10-23T01:30", "2014-10-22", "2000-02-29"], "M8[ms]")
    pq.write_table(pa.table({"t": stamps, "y": [1] * 5, "c": ["a"] * 5}), tmp_path / "stamp.parquet")
    preprocess(tmp_path / "stamp.parquet", tmp_path / "s", Schema(Label("y"), (), ids, time), "raw", "time:1,1")
    same_but_inputs(tmp_path / "c", tmp_path / "s")
    with pytest.raises(ValueError, match="no time column"):
        preprocess(tmp_path / "iso.csv", tmp_path / "x", Schema(Label("y"), (), ids), "raw", "time:1")


def test_labels_by_threshold_and_by_text(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("\ufeffr,c\r\n5,x\r\n3.5,x\r\n\r\n-1e0,x\r\n", "utf-8")
    by = Schema(Label("r", threshold=3.5), (), (Categorical("c"),))
    assert preprocess(tmp_path / "a.csv", tmp_path / "t", by, "raw").labels.tolist() == [1, 1, 0]
    by = Schema(Label("r", positive=("5", "-1e0")), (), (Categorical("c"),))
    text = preprocess(tmp_path / "a.csv", tmp_path / "p", by, "raw")
    assert text.labels.tolist() == [1, 0, 1]
    assert len(set(text.ids[:, 0].tolist())) == 1  # the carriage return is no part of the id
    pq.write_table(pa.table({"r": ["5", "3.5", "-1e0"], "c": ["x"] * 3}), tmp_path / "a.parquet")
    preprocess(tmp_path / "a.parquet", tmp_path / "q", by, "raw")
    same_but_inputs(tmp_path / "p", tmp_path / "q")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1e3", 1000.0),
        ("-2.50", -2.5),
        (".5", 0.5),
        ("7.", 7.0),
        ("+4E-2", 0.04),
        ("123456789012345678901234", 1.2345679e23),
        ("0.000000000000000000000000000001", 1e-30),
        ("00012", 12.0),
        ("999", 999.0),
        ("1234", 1234.0),
    ],
)
def test_numbers(tmp_path, text, want) -> None:
    (tmp_path / "n.csv").write_text(f"y,a,b\n0,{text},{text}\n")
    schema = Schema(Label("y"), (Dense("a", "identity"), Dense("b")), ())
    cache = preprocess(tmp_path / "n.csv", tmp_path / "c", schema, "raw")
    assert cache.dense[0].tolist() == [np.float32(want), np.float32(np.log1p(max(want, 0.0)))]


def test_ids_at_the_edges_of_int64(tmp_path) -> None:
    (tmp_path / "n.csv").write_text("y,h,d\n0,ffffffffffffffff,-9223372036854775808\n1,FF,9223372036854775807\n")
    schema = Schema(Label("y"), (), (Categorical("h", "hex"), Categorical("d", "decimal")))
    assert preprocess(tmp_path / "n.csv", tmp_path / "c", schema, "raw").ids.tolist() == [
        [-1, -(2**63)],
        [255, 2**63 - 1],
    ]


def test_an_empty_log_and_a_log_of_nothing_but_a_header(tmp_path) -> None:
    path, schema, _ = bag_csv(tmp_path, rows=0)
    for ids in ("vocab:2", "hash:10", "raw"):
        cache = preprocess(path, tmp_path / ids[0], schema, ids)
        assert (cache.rows, cache.n_dense, cache.ids.shape, cache.splits) == (0, 1, (0, 2), {"train": range(0, 0)})


def test_a_finished_folder_is_opened_and_another_job_is_refused(tmp_path) -> None:
    path, schema = small_log(tmp_path)
    preprocess(path, tmp_path / "c", schema, "hash:50")
    before = (tmp_path / "c" / "ids.bin").stat().st_mtime_ns
    assert preprocess(path, tmp_path / "c", schema, "hash:50").rows == 4000
    assert (tmp_path / "c" / "ids.bin").stat().st_mtime_ns == before
    with pytest.raises(ResumeMismatch, match="begun with other ids: remove it"):
        preprocess(path, tmp_path / "c", schema, "hash:51")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "thesis.txt").write_text("mine")
    with pytest.raises(ResumeMismatch, match=r"holds 'thesis.txt'"):
        preprocess(path, tmp_path / "strange", schema, "hash:50")
    shutil.rmtree(tmp_path / "c")


def test_progress_tells_stages_rows_and_share(tmp_path) -> None:
    path, schema = small_log(tmp_path)
    calls: list[tuple[str, int, float]] = []
    preprocess(path, tmp_path / "c", schema, "vocab:2", limits=SMALL_CHUNKS, progress=lambda *a: calls.append(a))
    assert list(dict.fromkeys(c[0] for c in calls)) == ["read", "count", "order", "map", "write"]
    reads = [c for c in calls if c[0] == "read"]
    assert [r[1] for r in reads] == sorted(r[1] for r in reads)
    assert reads[-1][1:] == (4000, 1.0)
    assert ColumnCache.open(tmp_path / "c", verify=True).rows == 4000
    assert not (tmp_path / "c" / "work").exists()
