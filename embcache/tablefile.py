"""One table in and out of files that other tools read, without loading the rest: numpy and Parquet, in blocks.

======================== ==========================================================================================
file                     holds
======================== ==========================================================================================
``x.npy``                weights [n, D]; row k is id k, unless ``x.ids.npy`` (int64 [n]) lies beside it
``x.parquet``            columns ``id``, ``weight`` and, if asked for, ``state`` (see ``embcache.columns``)
a folder (reading only)  its ``*.parquet`` files in order of name, such as a table's folder in a full export
======================== ==========================================================================================

fp32 and fp16 tables keep their dtype, bf16 is widened to float32, which is exact.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from . import columns, records, statefile
from .config import TableConfig
from .errors import BadConfig, CorruptStore, IdOutOfRange, SchemaMismatch

__all__ = ["TableRows", "export_table", "load_table"]

BLOCK_BYTES = 16 << 20
Block = tuple[Tensor, Tensor]  # ids int64 [n], whole rows uint8 [n, row_bytes]


class TableRows(Protocol):
    """What is needed of a store (``embcache.EmbeddingStore`` is one)."""

    tables: list[TableConfig]
    front: Any

    def index(self, table: str) -> int: ...
    def raw_rows(self, table: int, block: int) -> Iterator[Block]: ...
    def put_raw_rows(self, table: int, ids: Tensor, rows: Tensor) -> None: ...


def export_table(store: TableRows, name: str, path: str | Path, *, rows: str | None = None, state: bool = False) -> int:
    """Write a table's current rows to ``path``, ``.npy`` or ``.parquet``; returns their number.

    Args:
        rows: "written": those that differ from their initial value, by ascending id (as unsigned number), with
            ``x.ids.npy`` beside ``x.npy``; "all": of a bounded table, by id; None: "all" for ``.npy`` of a bounded
            table, else "written".
        state: optimizer state as well, in Parquet.

    The files appear under their names when they are complete. BadConfig on anything else; StorageFull.
    """
    t = store.index(name)
    table, path = store.tables[t], Path(path)
    rows = rows or ("all" if path.suffix == ".npy" and table.num_embeddings is not None else "written")
    if rows not in ("all", "written"):
        raise BadConfig(f"export_table: rows = {rows!r}, must be 'written' or 'all'")
    if rows == "all" and table.num_embeddings is None:
        raise BadConfig(f"table {name!r} has no bound: only its written rows can be exported")
    source = _all(store, t) if rows == "all" else store.raw_rows(t, _block(table))
    with statefile.named_when_full(path):
        if path.suffix == ".parquet":
            return _to_parquet(table, path, source, state)
        if path.suffix == ".npy" and not state:
            return _to_numpy(table, path, source, with_ids=rows == "written")
    raise BadConfig(f"export_table to {path}: must end in .parquet, or in .npy, which holds weights only")


def load_table(store: TableRows, name: str, source: Any, *, ids: Any = None) -> int:
    """Replace rows of a table by those of ``source``; returns their number. Other rows stay.

    Args:
        source: a file or folder as above, or a tensor or numpy array (a memory map, too) [n, D] of any float type.
        ids: of the rows of an array or ``.npy``: int64 [n], an array or the path of one. None: the file
            ``x.ids.npy`` beside ``x.npy`` if there is one, else row k is id k, and a bounded table needs all its rows.

    Optimizer state begins as that of new rows, unless a Parquet file has it. Where an id occurs twice, its last row
    counts. What the source holds is checked before the first row changes: SchemaMismatch (another width or type),
    IdOutOfRange, CorruptStore (no such file format).
    """
    t = store.index(name)
    found = _source(store.tables[t], source, ids)
    _check_ids(store.tables[t], found)
    count = 0
    for some, rows in found.blocks():
        order = _last_of_each(some)
        store.put_raw_rows(t, some[order], rows[order])
        count += len(some)
    return count


def _check_ids(table: TableConfig, source: _Source) -> None:
    at, limit = 0, table.num_embeddings
    for ids in source.ids():
        if limit is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
            k = int(((ids < 0) | (ids >= limit)).nonzero()[0])
            raise IdOutOfRange(table.name, f"ids of {source.what}", at + k, int(ids[k]), limit)
        at += ids.numel()


# out -------------------------------------------------------------------------------------------------------------


def _all(store: TableRows, t: int) -> Iterator[Block]:
    table = store.tables[t]
    rows, block = table.num_embeddings or 0, _block(table)
    for start in range(0, rows, block):
        ids = torch.arange(start, min(start + block, rows))
        yield ids, store.front.read_rows(t, ids)


def _to_parquet(table: TableConfig, path: Path, source: Iterator[Block], state: bool) -> int:
    _, pq = columns.arrow()
    count = 0
    with (
        _new_file(path) as file,
        pq.ParquetWriter(file, columns.schema_of(table, state=state), **columns.WRITER) as out,
    ):
        for ids, rows in source:
            out.write_table(columns.to_arrow(table, ids, rows, state=state))
            count += len(ids)
    return count


def _to_numpy(table: TableConfig, path: Path, source: Iterator[Block], *, with_ids: bool) -> int:
    beside = path.with_suffix(".ids.npy")
    dtype = "<f2" if table.dtype == torch.float16 else "<f4"
    count = 0
    with ExitStack() as files:
        out = _Array(files.enter_context(_new_file(path)), dtype, (table.embedding_dim,))
        keys = _Array(files.enter_context(_new_file(beside)), "<i8", ()) if with_ids else None
        for ids, rows in source:
            weight = records.weights(table, rows)
            out.append((weight if table.dtype == torch.float16 else weight.float()).numpy())
            if keys is not None:
                keys.append(ids.numpy())
            count += len(ids)
        for array in filter(None, (out, keys)):
            array.finish()
    if not with_ids:
        beside.unlink(missing_ok=True)  # of an earlier export to the same name: it would renumber the rows
    return count


class _Array:
    """An ``.npy`` file whose number of rows is known at the end: numpy leaves room for it in the header."""

    def __init__(self, file: IO[bytes], dtype: str, shape: tuple[int, ...]) -> None:
        self._file, self._dtype, self._shape, self._rows = file, dtype, shape, 0
        self._header()
        self._start = file.tell()

    def append(self, block: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(block, dtype=self._dtype).data)
        self._rows += len(block)

    def finish(self) -> None:
        self._file.seek(0)
        self._header()
        if self._file.tell() != self._start:
            raise RuntimeError("numpy's header has grown: no room was left in it")

    def _header(self) -> None:
        what = {"descr": self._dtype, "fortran_order": False, "shape": (self._rows, *self._shape)}
        np.lib.format.write_array_header_1_0(self._file, what)


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when it is complete and on the disk."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        statefile.sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


# in --------------------------------------------------------------------------------------------------------------


class _Source(Protocol):
    @property
    def what(self) -> str: ...

    def ids(self) -> Iterator[Tensor]: ...
    def blocks(self) -> Iterator[Block]: ...


def _source(table: TableConfig, source: Any, ids: Any) -> _Source:
    if isinstance(source, Tensor):
        return _ArraySource.checked(table, source.detach().cpu(), ids, "the array")
    if isinstance(source, np.ndarray):
        return _ArraySource.checked(table, source, ids, "the array")
    path = Path(source)
    if path.suffix == ".npy":
        beside = path.with_suffix(".ids.npy")
        ids = beside if ids is None and beside.exists() else ids
        return _ArraySource.checked(table, _mapped(path), ids, str(path))
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files or any(file.suffix != ".parquet" for file in files):
        raise BadConfig(f"load_table from {path}: must be .npy, .parquet, or a folder of .parquet files")
    if ids is not None:
        raise BadConfig(f"load_table from {path}: Parquet files name their ids themselves")
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise FileNotFoundError(f"{missing} does not exist")
    return _ParquetSource(table, files)


@dataclass(frozen=True)
class _ArraySource:
    table: TableConfig
    rows: Any  # a tensor or an array, [n, D]
    keys: np.ndarray | None
    what: str

    @classmethod
    def checked(cls, table: TableConfig, rows: Any, ids: Any, what: str) -> _ArraySource:
        wanted = f"weights of table {table.name!r}"
        floating = rows.is_floating_point() if isinstance(rows, Tensor) else rows.dtype.kind == "f"
        if rows.ndim != 2 or rows.shape[1] != table.embedding_dim or not floating:
            expected = f"[n, {table.embedding_dim}] of floats"
            raise SchemaMismatch(f"{what}, {wanted}", f"{list(rows.shape)} of {rows.dtype}", expected)
        if ids is None:
            if table.num_embeddings != rows.shape[0]:
                needed = "ids" if table.num_embeddings is None else f"ids, or all {table.num_embeddings} rows"
                raise BadConfig(f"{what}, {wanted}: {rows.shape[0]} rows without ids; this table needs {needed}")
            return cls(table, rows, None, what)
        keys = _mapped(Path(ids)) if isinstance(ids, str | Path) else np.asarray(ids)
        if keys.ndim != 1 or keys.dtype.kind not in "iu" or len(keys) != rows.shape[0]:
            raise SchemaMismatch(f"ids of {what}", f"{list(keys.shape)} of {keys.dtype}", f"[{rows.shape[0]}] of int64")
        return cls(table, rows, keys, what)

    def _starts(self) -> range:
        return range(0, self.rows.shape[0], _block(self.table))

    def _ids(self, start: int) -> Tensor:
        stop = min(start + _block(self.table), self.rows.shape[0])
        if self.keys is None:
            return torch.arange(start, stop)
        return torch.from_numpy(self.keys[start:stop].astype(np.int64))

    def ids(self) -> Iterator[Tensor]:
        yield from map(self._ids, self._starts())

    def blocks(self) -> Iterator[Block]:
        for start in self._starts():
            ids = self._ids(start)
            block = self.rows[start : start + len(ids)]
            if not isinstance(block, Tensor):
                block = torch.from_numpy(np.array(block, dtype=block.dtype.newbyteorder("=")))
            yield ids, records.join(self.table, block)


@dataclass(frozen=True)
class _ParquetSource:
    table: TableConfig
    files: list[Path]

    @property
    def what(self) -> str:
        return str(self.files[0] if len(self.files) == 1 else self.files[0].parent)

    def ids(self) -> Iterator[Tensor]:
        """Where a file's types alone do not show that every row is whole, all of it is read."""
        for file in self.files:
            if columns.proved(self.table, file):
                for batch in columns.batches(file, ["id"]):
                    yield columns.ids_of(self.table, batch)
            else:
                yield from (ids for ids, _ in self._rows(file))

    def blocks(self) -> Iterator[Block]:
        for file in self.files:
            yield from self._rows(file)

    def _rows(self, file: Path) -> Iterator[Block]:
        for batch in columns.batches(file, rows=_block(self.table)):
            yield columns.from_arrow(self.table, batch)


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise CorruptStore(f"{path} is not a numpy array: {error}") from error


def _last_of_each(ids: Tensor) -> Tensor:
    """Positions that keep the last of equal ids, by ascending id as unsigned number."""
    backwards = ids.numpy().view(np.uint64)[::-1]
    _, first = np.unique(backwards, return_index=True)
    return torch.from_numpy(len(ids) - 1 - first)


def _block(table: TableConfig) -> int:
    return max(1, BLOCK_BYTES // table.row_bytes)
