"""Parquet to arrays. Texts go through the parsers of the text reader; numbers are taken as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data import cells
from dlrm.data.cells import BAG_HEX, ID_HEX
from dlrm.data.errors import CorruptInput, SchemaError
from dlrm.data.parsed import BadCell, Parsed
from dlrm.data.schema import Schema
from dlrm.data.text import KEPT_BAD, column_kinds, expected_text, pack_texts
from embcache.kernels.jit import kernel


def describe(path: Path) -> tuple[tuple[str, ...], int]:
    """Column names and number of rows of a Parquet file."""
    file = _open(path)
    return tuple(file.schema_arrow.names), int(file.metadata.num_rows)


def record_batches(path: Path, columns: tuple[str, ...], start: int, block_bytes: int) -> Iterator[Any]:
    """Record batches of the columns from row ``start`` on, each of about ``block_bytes`` of text."""
    import pyarrow as pa

    file = _open(path)
    rows = max(1024, min(1 << 20, block_bytes // (8 * max(len(columns), 1))))
    skip = start
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if skip >= count:
            skip -= count
            continue
        try:
            for batch in file.iter_batches(rows, [group], list(columns), use_threads=False):
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                yield batch.slice(skip)
                skip = 0
        except pa.ArrowException as error:
            raise CorruptInput(f"{path}: {error}") from None


def _open(path: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ImportError("Parquet input needs pyarrow: pip install 'embcache[cpu]'") from None
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise CorruptInput(f"{path}: {error}") from None


@dataclass(frozen=True)
class ArrowFormat:
    """A schema bound to a Parquet file."""

    schema: Schema
    kinds: dict[str, tuple[int, int, int]]
    file: str

    @classmethod
    def bind(cls, schema: Schema, names: tuple[str, ...], file: str) -> ArrowFormat:
        """``names``: the file's columns."""
        absent = [n for n in schema.used_columns if n not in names]
        if absent:
            raise SchemaError(f"{file}: no column {', '.join(absent)}; the file has {', '.join(names)}")
        twice = [n for n in schema.used_columns if names.count(n) > 1]
        if twice:
            raise SchemaError(f"{file}: column {', '.join(twice)} occurs more than once")
        return cls(schema, column_kinds(schema), file)

    def parse(self, batch: Any) -> Parsed:
        """Columns of a record batch; rows with a malformed cell are left out and listed."""
        n, schema = batch.num_rows, self.schema
        bags = schema.bags[: len(schema.categorical)]
        labels, dense = np.zeros(n, np.float32), np.zeros((n, len(schema.dense)), np.float32)
        keys, missing = np.zeros((bags.count(False), n), np.int64), np.zeros((bags.count(False), n), np.bool_)
        times = np.zeros(n if schema.time else 0, np.int64)
        sizes: list[np.ndarray] = [np.zeros(n, np.int64)] * bags.count(True)
        bag_keys: list[np.ndarray] = [np.zeros(0, np.int64)] * bags.count(True)
        errors = np.zeros(n, np.int64)  # the code, plus 100 times (1 + place of the column)
        for place, name in enumerate(batch.schema.names):
            kind, slot, separator = self.kinds[name]
            with self._named(name, batch.column(place).type):
                column, code = _plain(batch.column(place)), np.zeros(n, np.int64)
                if kind < cells.DENSE_LOG1P:
                    labels[:], code = self._label(column, kind)
                elif kind < ID_HEX:
                    dense[:, slot], code = _numbers(column, kind, self.schema)
                elif kind < BAG_HEX:
                    keys[slot], missing[slot], code = _keys(column, kind - ID_HEX, self.schema)
                elif kind < cells.TIME_YYMMDDHH:
                    sizes[slot], bag_keys[slot], code = _bag_keys(column, kind - BAG_HEX, separator, self.schema)
                else:
                    times[:], code = _times(column, kind, self.schema)
            errors = np.where((errors == 0) & (code != 0), code + 100 * (place + 1), errors)
        return self._good_rows(batch, errors, labels, dense, keys, missing, times, sizes, bag_keys)

    @contextmanager
    def _named(self, column: str, kind: Any) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, SchemaError) as error:
            text = error if isinstance(error, SchemaError) else f"a {kind} column cannot be read as the schema says"
            raise SchemaError(f"{self.file}, column {column!r}: {text}") from error

    def _label(self, column: Any, kind: int) -> tuple[np.ndarray, np.ndarray]:
        import pyarrow as pa

        out, code = np.zeros(len(column), np.float32), np.zeros(len(column), np.int64)
        if kind == cells.LABEL_POSITIVE:
            positive = set(self.schema.label.positive)
            texts = column.cast(pa.string()).to_pylist()
            out[:] = [t in positive for t in texts]
            code[[_is_missing(t, self.schema) for t in texts]] = cells.ABSENT
            return out, code
        values, valid, code = _float64(column, self.schema)
        threshold = self.schema.label.threshold
        if threshold is not None:
            out[:] = values >= threshold
        else:
            outside = ~((values >= 0) & (values <= 1)) & (code == 0)
            out[:] = np.where(outside, 0, values)
            code[outside & valid] = cells.LABEL_RANGE
        code[~valid] = cells.ABSENT
        return out, code

    def _good_rows(self, batch: Any, errors: np.ndarray, *arrays: Any) -> Parsed:
        labels, dense, keys, missing, times, sizes, bag_keys = arrays
        n, bad, reports = batch.num_rows, np.flatnonzero(errors), []
        for row in bad[:KEPT_BAD]:
            place, code = divmod(int(errors[row]), 100)
            name = batch.schema.names[place - 1]
            found = repr(batch.column(place - 1)[int(row)].as_py())[:60]
            reports.append(BadCell(int(row), place, expected_text(code, self.schema), f"{found} in {name!r}"))
        if bad.size:
            good = errors == 0
            bag_keys = [k[np.repeat(good, s)] for s, k in zip(sizes, bag_keys, strict=True)]
            sizes = [s[good] for s in sizes]
            labels, dense, times = labels[good], dense[good], times[good] if times.size else times
            keys, missing = keys[:, good], missing[:, good]
        return Parsed(labels, dense, keys, missing, times, sizes, bag_keys, n, int(bad.size), reports)


def _plain(column: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return column
    wide = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    if column.type in wide:
        return column.cast(wide[column.type])
    if hasattr(pa, "string_view") and column.type in (pa.string_view(), pa.binary_view()):
        return column.cast(pa.string() if column.type == pa.string_view() else pa.binary())
    return column


def _is_text(column: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(column.type) or pa.types.is_binary(column.type)


def _is_missing(text: str | None, schema: Schema) -> bool:
    return text is None or text == "" or text in schema.missing


def _valid(column: Any) -> np.ndarray:
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False))


def _buffers(column: Any) -> tuple[np.ndarray, np.ndarray]:
    # uint8 bytes and int64 bounds [n + 1] of a string or binary column.
    n = len(column)
    _, bounds, data = column.buffers()
    starts = np.zeros(n + 1, np.int64)
    if bounds is not None:
        starts[:] = np.frombuffer(bounds, np.int32, n + 1, 4 * column.offset)
    if data is None or data.size == 0:
        return np.zeros(1, np.uint8), starts
    return np.frombuffer(data, np.uint8), starts


def _cells(column: Any, kind: int, schema: Schema) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    # int64 keys, float64 numbers, validity and codes of a text column.
    n, valid = len(column), _valid(column)
    data, bounds = _buffers(column)
    keys, numbers, codes = np.zeros(n, np.int64), np.zeros(n), np.zeros(n, np.int64)
    _parse_cells(data, bounds, valid, kind, *pack_texts(schema.missing), keys, numbers, codes)
    return keys, numbers, valid, codes


def _float64(column: Any, schema: Schema) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    import pyarrow as pa

    if _is_text(column):
        _, numbers, valid, codes = _cells(column, cells.DENSE_IDENTITY, schema)
        return numbers, valid, codes
    valid = _valid(column)
    try:
        values = column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SchemaError(f"a {column.type} column cannot be read as numbers") from None
    codes = np.zeros(len(column), np.int64)
    missing = np.isnan(values)  # a NaN in a number column is how many writers say "null"
    codes[np.abs(values) > np.finfo(np.float32).max] = cells.TOO_BIG
    return np.where(missing, 0.0, values), valid & ~missing, codes


def _numbers(column: Any, kind: int, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    values, valid, codes = _float64(column, schema)
    out = np.zeros(len(column), np.float32)
    _transform(np.ascontiguousarray(values, np.float64), valid, kind, out)
    return out, codes


def _keys(column: Any, encoding: int, schema: Schema) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    import pyarrow as pa

    if not _is_text(column):
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int8())
        if encoding == 2:
            column = column.cast(pa.string())
        elif pa.types.is_integer(column.type):
            if column.type == pa.uint64():
                column = column.view(pa.int64())
            column = column.cast(pa.int64())
            return column.fill_null(0).to_numpy(zero_copy_only=False), ~_valid(column), np.zeros(len(column), np.int64)
        else:
            raise SchemaError(f"a {column.type} column cannot be read as ids; cast it, or use encoding: string")
    keys, _, valid, codes = _cells(column, ID_HEX + encoding, schema)
    return keys, ~valid, codes


def _bag_keys(column: Any, encoding: int, separator: int, schema: Schema) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    import pyarrow as pa
    import pyarrow.compute as pc

    n = len(column)
    if _is_text(column):
        if separator < 0:
            raise SchemaError("a text column with bags of ids needs a separator")
        empty = pc.or_(pc.is_null(column), pc.equal(column, pa.scalar("", column.type)))
        for marker in schema.missing:
            empty = pc.or_kleene(empty, pc.equal(column, pa.scalar(marker, column.type)))
        column = pc.split_pattern(pc.if_else(empty, pa.scalar(None, column.type), column), chr(separator))
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise SchemaError(f"a {column.type} column cannot be read as bags of ids: a list column expected")
    sizes = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    keys, missing, codes = _keys(_plain(column.flatten()), encoding, schema)
    owner = np.repeat(np.arange(n), sizes)
    kept = ~missing
    row_codes = np.zeros(n, np.int64)
    bad = np.flatnonzero(codes)[::-1]
    row_codes[owner[bad]] = codes[bad]
    return np.bincount(owner[kept], minlength=n).astype(np.int64), keys[kept], row_codes


def _times(column: Any, kind: int, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow as pa

    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        seconds = column.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
        valid = _valid(column)
        return seconds.fill_null(0).to_numpy(zero_copy_only=False), np.where(valid, 0, cells.ABSENT)
    if not _is_text(column):
        column = column.cast(pa.string())
    keys, _, valid, codes = _cells(column, kind, schema)
    return keys, np.where(valid, codes, cells.ABSENT)


@kernel
def _parse_cells(
    data: np.ndarray,
    bounds: np.ndarray,
    valid: np.ndarray,
    kind: int,
    texts: np.ndarray,
    markers: np.ndarray,
    keys: np.ndarray,
    numbers: np.ndarray,
    codes: np.ndarray,
) -> None:
    for i in range(bounds.shape[0] - 1):
        start, end = bounds[i], bounds[i + 1]
        if start == end or cells.same_text(data, start, end, texts, markers):
            valid[i] = False
        if valid[i]:
            if kind == cells.DENSE_IDENTITY:
                numbers[i], codes[i] = cells.parse_number(data, start, end)
            elif kind >= cells.TIME_YYMMDDHH:
                keys[i], codes[i] = cells.parse_time(data, start, end, kind)
            else:
                keys[i], codes[i] = cells.parse_key(data, start, end, kind - ID_HEX)


@kernel
def _transform(values: np.ndarray, valid: np.ndarray, kind: int, out: np.ndarray) -> None:
    for i in range(values.shape[0]):
        out[i] = cells.dense_value(values[i], kind) if valid[i] else np.float32(0.0)
