"""Malformed input: file, line, column and what was expected, in the message; tolerated rows are counted."""

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm.data import (
    Categorical,
    CorruptInput,
    Dense,
    Label,
    Limits,
    MalformedRow,
    ResumeMismatch,
    Schema,
    SchemaError,
    Time,
    preprocess,
)

SCHEMA = Schema(
    Label("y"),
    (Dense("d"),),
    (Categorical("h", "hex"), Categorical("n", "decimal"), Categorical("b", "decimal", separator="|")),
    Time("t", "yymmddhh"),
    quote='"',
)
GOOD = "1,2.5,ff,7,1|2,14102100"
HEADER = "y,d,h,n,b,t\n"


def write(folder: Path, *lines: str) -> Path:
    (folder / "log.csv").write_text(HEADER + "".join(f"{line}\n" for line in lines))
    return folder / "log.csv"


@pytest.mark.parametrize(
    ("line", "column", "expected"),
    [
        ("1,2,ff,7,1", 0, "expected 6 columns, found 5"),
        ("1,2,ff,7,1,14102100,9", 0, "expected 6 columns, found more"),
        ("yes,2,ff,7,1,14102100", 1, "expected a number, found 'yes' in 'y'"),
        ("2,2,ff,7,1,14102100", 1, "expected a label in [0, 1], found '2' in 'y'"),
        (",2,ff,7,1,14102100", 1, "expected a value (this column cannot be missing), found '' in 'y'"),
        ("1,two,ff,7,1,14102100", 2, "expected a number, found 'two' in 'd'"),
        ("1,nan,ff,7,1,14102100", 2, "expected a number, found 'nan' in 'd'"),
        ("1,1e39,ff,7,1,14102100", 2, "expected a number in the range of float32, found '1e39' in 'd'"),
        ("1,1e,ff,7,1,14102100", 2, "expected a number, found '1e' in 'd'"),
        ("1,-,ff,7,1,14102100", 2, "expected a number, found '-' in 'd'"),
        ("1,2,fg,7,1,14102100", 3, "expected a hexadecimal id, found 'fg' in 'h'"),
        ("1,2,00000000000000001,7,1,14102100", 3, "expected at most 16 hexadecimal digits"),
        ("1,2,ff,7.0,1,14102100", 4, "expected a decimal id, found '7.0' in 'n'"),
        ("1,2,ff,9223372036854775808,1,14102100", 4, "expected an id in the range of int64"),
        ("1,2,ff,7,1|x|2,14102100", 5, "expected a decimal id, found '1|x|2' in 'b'"),
        ("1,2,ff,7,1,14102124", 6, "expected a time as YYMMDDHH, found '14102124' in 't'"),
        ("1,2,ff,7,1,14023000", 6, "expected a time as YYMMDDHH, found '14023000' in 't'"),
        ('1,2,"ff,7,1,14102100', 3, "expected a closing quote before a delimiter or the line's end"),
        ('1,2,"ff"f,7,1,14102100', 3, "expected a closing quote"),
    ],
)
def test_a_malformed_line_says_where_and_what(tmp_path, line, column, expected) -> None:
    path = write(tmp_path, GOOD, GOOD, line, GOOD)
    place = f"{path}, line 4" + (f", column {column}" if column else "") + ": "
    with pytest.raises(MalformedRow) as caught:
        preprocess(path, tmp_path / "c", SCHEMA, "raw")
    assert str(caught.value).startswith(place + expected)
    assert (caught.value.line, caught.value.column) == (4, column)
    kept = preprocess(path, tmp_path / "d", SCHEMA, "raw", limits=Limits(max_bad_rows=1))
    assert (kept.rows, kept.info["bad_rows"]) == (3, 1)
    assert kept.info["bad_examples"] == [str(caught.value)]
    assert kept.bags["b"][0].tolist() == [1, 2] * 3
    assert kept.ids[:, 0].tolist() == [255] * 3


def test_the_first_row_too_many_is_named_whatever_the_chunks(tmp_path) -> None:
    bad = "1,2,zz,7,1,14102100"
    path = write(tmp_path, *[bad if k in (3, 500, 501, 900) else GOOD for k in range(1000)])
    for chunk_bytes in (100, 3000, 1 << 20):
        with pytest.raises(MalformedRow, match="line 503, column 3"):
            preprocess(path, tmp_path / f"c{chunk_bytes}", SCHEMA, "raw", limits=Limits(2, 1 << 20, chunk_bytes, 2))
    cache = preprocess(path, tmp_path / "d", SCHEMA, "raw", limits=Limits(max_bad_rows=4))
    assert (cache.rows, cache.info["bad_rows"]) == (996, 4)
    assert [r.split(", ")[1] for r in cache.info["bad_examples"]] == ["line 5", "line 502", "line 503", "line 902"]


def test_line_numbers_go_on_after_a_blank_line_and_start_anew_in_the_next_file(tmp_path) -> None:
    one = write(tmp_path, GOOD, "", GOOD)
    two = tmp_path / "two.csv"
    two.write_text(HEADER + GOOD + "\n\nx" + GOOD + "\n")
    with pytest.raises(MalformedRow, match=r"two\.csv, line 4, column 1"):
        preprocess([one, two], tmp_path / "c", SCHEMA, "raw", limits=Limits(chunk_bytes=30))


def test_a_column_that_is_not_there(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("y,d,h,b,t\n")
    with pytest.raises(SchemaError, match=r"a\.csv: no column n; the file has y, d, h, b, t"):
        preprocess(tmp_path / "a.csv", tmp_path / "c", SCHEMA, "raw")
    (tmp_path / "a.csv").write_text("y,d,h,n,n,b,t\n")
    with pytest.raises(SchemaError, match="column n occurs more than once"):
        preprocess(tmp_path / "a.csv", tmp_path / "c", SCHEMA, "raw")
    pq.write_table(pa.table({"y": [1]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"a\.parquet: no column d, h, n, b, t"):
        preprocess(tmp_path / "a.parquet", tmp_path / "c", SCHEMA, "raw")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(MalformedRow, match="line 1: expected a header line, found nothing"):
        preprocess(tmp_path / "empty.csv", tmp_path / "c", SCHEMA, "raw")


def test_torn_gzip_and_broken_parquet(tmp_path) -> None:
    packed = gzip.compress((HEADER + f"{GOOD}\n" * 50_000).encode())
    (tmp_path / "a.gz").write_bytes(packed[:-20])
    with pytest.raises(CorruptInput, match=r"a\.gz: torn or not gzip"):
        preprocess(tmp_path / "a.gz", tmp_path / "c", SCHEMA, "raw")
    (tmp_path / "b.gz").write_bytes(packed[:300] + bytes(200) + packed[500:])
    with pytest.raises(CorruptInput, match=r"b\.gz: torn or not gzip"):
        preprocess(tmp_path / "b.gz", tmp_path / "d", SCHEMA, "raw")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(CorruptInput, match=r"a\.parquet"):
        preprocess(tmp_path / "a.parquet", tmp_path / "e", SCHEMA, "raw")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        preprocess(tmp_path / "nowhere.csv", tmp_path / "f", SCHEMA, "raw")


def test_a_line_without_end_is_refused_before_memory_is(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("dlrm.data.sources.LONGEST_LINE", 5000)
    (tmp_path / "a.csv").write_text(HEADER + GOOD + "\n" + "7" * 100_000)
    with pytest.raises(MalformedRow, match="expected lines of at most 5000 bytes"):
        preprocess(tmp_path / "a.csv", tmp_path / "c", SCHEMA, "raw", limits=Limits(chunk_bytes=1000))


def test_malformed_cells_of_parquet_name_row_and_column(tmp_path) -> None:
    good = {"y": 1.0, "d": 2.0, "h": "ff", "n": 7, "b": [1, 2], "t": "14102100"}
    for change, message in (
        ({"y": 1.5}, r"line 3, column 1: expected a label in \[0, 1\], found 1.5 in 'y'"),
        ({"y": None}, r"line 3, column 1: expected a value \(this column cannot be missing\), found None in 'y'"),
        ({"d": float("inf")}, "line 3, column 2: expected a number in the range of float32, found inf in 'd'"),
        ({"h": "xyz"}, "line 3, column 3: expected a hexadecimal id, found 'xyz' in 'h'"),
        ({"t": "14102199"}, "line 3, column 6: expected a time as YYMMDDHH"),
    ):
        rows = [good, good, {**good, **change}, good]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        with pytest.raises(MalformedRow, match=message):
            preprocess(tmp_path / "a.parquet", tmp_path / "c", SCHEMA, "raw")
        out = tmp_path / message[16:24].replace(":", "").replace(" ", "_")
        cache = preprocess(tmp_path / "a.parquet", out, SCHEMA, "raw", limits=Limits(max_bad_rows=1))
        assert (cache.rows, cache.info["bad_rows"], cache.bags["b"][0].tolist()) == (3, 1, [1, 2] * 3)
        for p in (tmp_path / "c" / "work", tmp_path / "c", out):
            for f in sorted(p.rglob("*"), reverse=True):
                f.unlink() if f.is_file() else f.rmdir()
            if p.exists():
                p.rmdir()
    missing = [{**good, "d": float("nan")}, {**good, "h": None}, {**good, "b": None}, {**good, "b": [None, 3]}]
    pq.write_table(pa.Table.from_pylist(missing), tmp_path / "m.parquet")
    cache = preprocess(tmp_path / "m.parquet", tmp_path / "m", SCHEMA, "raw")
    assert cache.dense[0, 0] == 0
    assert cache.ids[1, 0] == -(2**63)
    assert np.diff(cache.bags["b"][1]).tolist() == [2, 2, 0, 1]


def test_columns_of_parquet_that_cannot_be_what_the_schema_says(tmp_path) -> None:
    schema = Schema(Label("y"), (Dense("d"),), (Categorical("a", "string"),))
    for change, message in (({"d": {"x": 1}}, "column 'd': a struct<x: int64> column"), ({"a": [1, 2]}, "column 'a'")):
        pq.write_table(pa.Table.from_pylist([{"y": 1.0, "d": 2.0, "a": "u", **change}]), tmp_path / "a.parquet")
        with pytest.raises(SchemaError, match=rf"a\.parquet, {message}"):
            preprocess(tmp_path / "a.parquet", tmp_path / "c", schema, "raw")


def test_more_bad_rows_may_be_allowed_afterwards_and_not_fewer(tmp_path) -> None:
    path = write(tmp_path, *[GOOD] * 20, "x" + GOOD, *[GOOD] * 20, "z" + GOOD)
    whole = preprocess(path, tmp_path / "whole", SCHEMA, "raw", limits=Limits(max_bad_rows=2))
    for allowed in (0, 1):
        with pytest.raises(MalformedRow, match=f"line {22 + 21 * allowed}, column 1"):
            preprocess(path, tmp_path / "c", SCHEMA, "raw", limits=Limits(chunk_bytes=100, max_bad_rows=allowed))
    with pytest.raises(ResumeMismatch, match=r"1 malformed rows so far, more than 0; the first: .*line 22, column 1"):
        preprocess(path, tmp_path / "c", SCHEMA, "raw")
    again = preprocess(path, tmp_path / "c", SCHEMA, "raw", limits=Limits(max_bad_rows=2))
    assert again.ids.tolist() == whole.ids.tolist()
    assert again.info == whole.info
    with pytest.raises(ResumeMismatch, match=r"was made without 2 malformed rows, more than 1; the first: .*line 22"):
        preprocess(path, tmp_path / "c", SCHEMA, "raw", limits=Limits(max_bad_rows=1))
