"""Input files as a stream of blocks, from any committed position: text, gzip, Parquet (told apart by their content).

A position is what the next block begins at: a byte offset of the (decompressed) text, or a row number of a
Parquet file. Blocks of text hold whole lines.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from dlrm.data.arrow import ArrowFormat, describe, record_batches
from dlrm.data.errors import CorruptInput, MalformedRow
from dlrm.data.parsed import Parsed
from dlrm.data.schema import Schema
from dlrm.data.text import TextFormat, header_names

LONGEST_LINE = 1 << 26


class RawBlock(NamedTuple):
    """Bytes or rows still to be parsed, and the position after them."""

    data: Any
    end: int


class Input:
    """One input file: ``blocks`` reads it (in one thread), ``parse`` turns a block into columns (in any thread)."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path, self.schema = path, schema
        self._bytes, self._rows = path.stat().st_size, 0
        with path.open("rb") as f:
            magic = f.read(4)
        self.kind = "parquet" if magic == b"PAR1" else "gzip" if magic[:2] == b"\x1f\x8b" else "text"
        self._format: TextFormat | ArrowFormat
        self.header_bytes = 0
        self.consumed = 0  # bytes of the file behind the last block: a measure of progress only
        if self.kind == "parquet":
            names, self._rows = describe(path)
            self._format = ArrowFormat.bind(schema, names, str(path))
            return
        names = schema.columns
        if schema.header:
            with self._open() as f:
                line = self._guard(lambda: f.readline(LONGEST_LINE))
            self.header_bytes = len(line)
            names = header_names(line, schema, str(path))
        self._format = TextFormat.bind(schema, names, str(path))

    @property
    def first_line(self) -> int:
        """Line number of the first row."""
        return 2 if self.header_bytes else 1

    def identity(self) -> dict[str, Any]:
        """What tells this file from another: name, size, checksum of its beginning."""
        with self.path.open("rb") as f:
            return {"path": str(self.path), "bytes": self.path.stat().st_size, "head": zlib.crc32(f.read(1 << 16))}

    def parse(self, block: RawBlock) -> Parsed:
        """A block's rows."""
        return self._format.parse(block.data).with_time_features(self.schema)

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Blocks from position ``start``; 0 is the beginning."""
        if self.kind == "parquet":
            at = start
            for batch in record_batches(self.path, self.schema.used_columns, start, block_bytes):
                at += batch.num_rows
                self.consumed = self._bytes * at // max(self._rows, 1)
                yield RawBlock(batch, at)
            return
        with self._open() as f:
            at = max(start, self.header_bytes)
            self._skip(f, at)
            yield from self._lines(f, at, block_bytes)

    def _open(self) -> Any:
        return gzip.open(self.path, "rb") if self.kind == "gzip" else self.path.open("rb")

    def _guard(self, read: Any) -> Any:
        try:
            return read()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise CorruptInput(f"{self.path}: torn or not gzip ({error})") from None

    def _skip(self, f: IO[bytes], count: int) -> None:
        if self.kind == "text":
            f.seek(count)
            return
        left = bytearray(1 << 24)
        while count > 0:
            room = memoryview(left)[: min(count, len(left))]
            count -= self._guard(lambda room=room: _fill(f, room)) or count

    def _lines(self, f: IO[bytes], at: int, block_bytes: int) -> Iterator[RawBlock]:
        kept = b""
        while True:
            buffer = bytearray(max(block_bytes, 2 * len(kept)) + 1)
            buffer[: len(kept)] = kept
            room = memoryview(buffer)[len(kept) : -1]
            got = self._guard(lambda room=room: _fill(f, room)) + len(kept)
            self.consumed = getattr(f, "fileobj", f).tell()
            if got == 0:
                return
            end = buffer.rfind(b"\n", 0, got) + 1
            if got < len(buffer) - 1 and end < got:  # the last line lacks its newline
                buffer[got] = 10
                yield RawBlock(np.frombuffer(buffer, np.uint8, got + 1), at + got)
                return
            if end == 0:
                if got > LONGEST_LINE:
                    raise MalformedRow(str(self.path), 0, 0, f"lines of at most {LONGEST_LINE} bytes", "a longer one")
                kept = bytes(memoryview(buffer)[:got])
                continue
            kept = bytes(memoryview(buffer)[end:got])
            at += end
            yield RawBlock(np.frombuffer(buffer, np.uint8, end), at)


def _fill(f: IO[bytes], room: memoryview) -> int:
    got = 0
    while got < len(room):
        n = f.readinto(room[got:])  # type: ignore[attr-defined]
        if not n:
            break
        got += n
    return got
