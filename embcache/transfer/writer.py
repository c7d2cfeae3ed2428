"""The streaming writer of exports, full or delta: it takes blocks of rows from anywhere."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from .. import columns, statefile
from ..config import TableConfig
from ..errors import BadConfig
from ..kernels.buckets import BUCKETS, bucket_order
from .manifest import EXTRA, MANIFEST, ExportFile, Manifest, State, TableFiles

__all__ = ["MAX_OPEN", "MEMORY", "BucketFiles", "ExportWriter", "clear", "sweep"]

MAX_OPEN = 512  # buckets of an export: each keeps a file open while a table is written
MEMORY = 64 << 20
_TABLE = re.compile(r"table-\d{4,}")

Block = tuple[Tensor, Tensor]  # ids int64 [n], whole rows uint8 [n, row_bytes]


class ExportWriter:
    """Writes one export, table after table, in memory that depends on neither rows nor tables.

    Args:
        folder: made if it is missing; BadConfig where it holds anything that an interrupted export did not leave.
        buckets: 1 to 512 files a table.
        memory: bytes of rows held back, so that row groups are not tiny.

    A context manager: an exception inside removes what was written. ``finish`` makes the export exist.
    """

    def __init__(self, folder: str | Path, *, buckets: int = BUCKETS, memory: int = MEMORY) -> None:
        if not isinstance(buckets, int) or not 1 <= buckets <= MAX_OPEN:
            raise BadConfig(f"export: buckets = {buckets!r}, must be an integer in [1, {MAX_OPEN}]")
        self.folder, self.buckets, self.memory = Path(folder), buckets, memory
        self._tables: list[TableFiles] = []
        clear(self.folder)

    def __enter__(self) -> ExportWriter:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            sweep(self.folder)

    def table(self, table: TableConfig, step: int, rows: Iterable[Block], deleted: Iterable[Tensor] = ()) -> TableFiles:
        """Write one table: its rows, and of a delta the ids that no longer have one."""
        part = Path(f"table-{len(self._tables):04d}")
        (self.folder / part).mkdir()
        with statefile.named_when_full(self.folder / part):
            files = [*self._split(table, part, rows, False), *self._split(table, part, _idle(deleted), True)]
        written = TableFiles(table, step, tuple(files))
        self._tables.append(written)
        return written

    def finish(self, state: State, parent: State | None = None, extra: dict[str, Tensor] | None = None) -> Manifest:
        """Everything is on the disk, and then the export exists."""
        entry = statefile.write_tensors(self.folder, EXTRA, extra) if extra else None
        for path in self.folder.glob("table-*"):
            statefile.sync_folder(path)
        statefile.sync_folder(self.folder)
        manifest = Manifest(state, parent, self.buckets, tuple(self._tables), entry)
        manifest.write(self.folder)
        return manifest

    def _split(self, table: TableConfig, part: Path, rows: Iterable[Block], deleted: bool) -> list[ExportFile]:
        """Distribute blocks over one file a bucket; each file's ids keep their order."""
        with BucketFiles(self.folder, part, table, deleted, self.buckets, self.memory) as files:
            for ids, block in rows:
                files.add(ids, block)
        return files.entries


class BucketFiles:
    """Rows of one table (``deleted``: ids without a row) over one file a bucket. A context manager; afterwards
    ``entries`` says what was written.

    Row groups have a fixed number of rows, so the bytes of a file depend on its rows, their order and the settings, but
    not on the blocks in which they came, nor on who wrote other buckets.
    """

    def __init__(
        self, folder: Path, part: Path, table: TableConfig, deleted: bool, buckets: int, memory: int = MEMORY
    ) -> None:
        self.folder, self.part, self.table, self.deleted, self.buckets = folder, part, table, deleted, buckets
        self.group = max(1, memory // buckets // (8 + (0 if deleted else table.row_bytes)))
        self.entries: list[ExportFile] = []
        self._held: list[list[Block]] = [[] for _ in range(buckets)]
        self._sizes = [0] * buckets
        self._files: dict[int, _BucketFile] = {}
        self._open = ExitStack()

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Write some more."""
        order, starts = bucket_order(ids.numpy(), self.buckets)
        for b in (starts[1:] > starts[:-1]).nonzero()[0].tolist():
            at = torch.from_numpy(order[starts[b] : starts[b + 1]])
            self._held[b].append((ids.index_select(0, at), rows.index_select(0, at)))
            self._sizes[b] += len(at)
            if self._sizes[b] >= self.group:
                self._flush(b, self._sizes[b] // self.group * self.group)

    def _flush(self, b: int, n: int) -> None:
        if b not in self._files:
            name = self.part / f"{'deleted' if self.deleted else 'rows'}-{b:05d}.parquet"
            file = _BucketFile(self.folder, name, self.table, b, self.deleted)
            self._files[b] = self._open.enter_context(file)
        ids, rows = map(torch.cat, zip(*self._held[b], strict=True))
        for start in range(0, n, self.group):
            end = min(start + self.group, n)
            self._files[b].write(ids[start:end], rows[start:end])
        self._sizes[b] -= n
        self._held[b] = [(ids[n:].clone(), rows[n:].clone())] if self._sizes[b] else []

    def __enter__(self) -> BucketFiles:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is None:
            try:
                for b in range(self.buckets):
                    if self._sizes[b]:
                        self._flush(b, self._sizes[b])
            except BaseException as problem:
                self._open.__exit__(type(problem), problem, problem.__traceback__)
                raise
        self._open.__exit__(kind, *(error or (None, None)))
        if kind is None:
            self.entries = [self._files[b].entry() for b in sorted(self._files)]


class _BucketFile:
    """A Parquet file in the making; size and checksum are worked out as it is written."""

    def __init__(self, folder: Path, name: Path, table: TableConfig, bucket: int, deleted: bool) -> None:
        self._name, self._table, self._bucket, self._deleted = name, table, bucket, deleted
        pa, self._pq = columns.arrow()
        self._schema = pa.schema([columns.schema_of(table).field(0)]) if deleted else columns.schema_of(table)
        self._sink = _Sink((folder / name).open("wb"))
        self._pa, self._rows = pa, 0
        self._writer: Any = None

    def __enter__(self) -> _BucketFile:
        self._writer = self._pq.ParquetWriter(self._pa.PythonFile(self._sink, mode="w"), self._schema, **columns.WRITER)
        return self

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Append one row group."""
        if self._deleted:
            group = self._pa.Table.from_arrays([self._pa.array(ids.numpy())], schema=self._schema)
        else:
            group = columns.to_arrow(self._table, ids, rows)
        self._writer.write_table(group, row_group_size=len(ids))
        self._rows += len(ids)

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self._writer.close()
                self._sink.sync()
        finally:
            self._sink.file.close()

    def entry(self) -> ExportFile:
        """What the table of contents says of the finished file."""
        sink = self._sink
        return ExportFile(self._name.as_posix(), sink.bytes, sink.crc32, self._bucket, self._rows, self._deleted)


class _Sink:
    """A file that counts and checks what passes through."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.bytes, self.crc32, self.closed = file, 0, 0, False

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.closed = True


def _idle(ids: Iterable[Tensor]) -> Iterator[Block]:
    for block in ids:
        yield block, torch.empty(len(block), 0, dtype=torch.uint8)


def clear(folder: Path) -> None:
    """An empty folder, where nothing but the remains of an interrupted export was in it."""
    if (folder / MANIFEST).exists():
        raise BadConfig(f"{folder} already holds an export: choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    odd = sorted(p.name for p in folder.iterdir() if not _ours(p))
    if odd:
        raise BadConfig(f"{folder} is not empty (it holds {odd[0]!r}): an export needs a folder of its own")
    sweep(folder)


def sweep(folder: Path) -> None:
    for path in filter(_ours, list(folder.iterdir())):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _ours(path: Path) -> bool:
    return path.name in (EXTRA, f"{MANIFEST}.tmp") or (path.is_dir() and _TABLE.fullmatch(path.name) is not None)
