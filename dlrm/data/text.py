"""Delimited text to arrays: one Numba kernel over a block of whole lines, run in several threads at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dlrm.data import cells
from dlrm.data.cells import (
    ABSENT,
    BAD_TIME,
    BAG_HEX,
    DENSE_LOG1P,
    FEW,
    ID_HEX,
    LABEL,
    LABEL_POSITIVE,
    MANY,
    QUOTE,
    SKIP,
    TIME_YYMMDDHH,
)
from dlrm.data.errors import MalformedRow, SchemaError
from dlrm.data.parsed import BadCell, Parsed
from dlrm.data.schema import Schema
from embcache.kernels.jit import I64, inline, kernel, pasted

KEPT_BAD = 1000


class Columns(NamedTuple):
    """What to do with each column of a file, in file order."""

    kinds: np.ndarray  # int64 [C], the constants of dlrm.data.cells
    slots: np.ndarray  # int64 [C], place among the dense values, the single ids or the bags
    separators: np.ndarray  # int64 [C], byte that separates a bag's ids
    texts: np.ndarray  # uint8, the schema's missing markers, then the positive labels, packed
    missing: np.ndarray  # int64 [markers + 1] bounds in texts
    positive: np.ndarray  # int64 [labels + 1] bounds in texts
    threshold: float
    delimiter: int
    quote: int  # -1 for none
    log_table: np.ndarray


@dataclass(frozen=True)
class TextFormat:
    """A schema bound to one file's columns."""

    schema: Schema
    columns: Columns
    names: tuple[str, ...]

    @classmethod
    def bind(cls, schema: Schema, names: tuple[str, ...], file: str) -> TextFormat:
        """``names``: the file's columns in order. A missing column is a :class:`SchemaError`."""
        absent = [n for n in schema.used_columns if n not in names]
        if absent:
            raise SchemaError(f"{file}: no column {', '.join(absent)}; the file has {', '.join(names)}")
        twice = [n for n in schema.used_columns if names.count(n) > 1]
        if twice:
            raise SchemaError(f"{file}: column {', '.join(twice)} occurs more than once")
        kinds, slots = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
        separators = np.full(len(names), -1, np.int64)
        for name, (kind, slot, separator) in column_kinds(schema).items():
            place = names.index(name)
            kinds[place], slots[place], separators[place] = kind, slot, separator
        texts, bounds = pack_texts((*schema.missing, *schema.label.positive))
        split = len(schema.missing)
        columns = Columns(kinds, slots, separators, texts, bounds[: split + 1], bounds[split:],
                          0.0 if schema.label.threshold is None else schema.label.threshold, ord(schema.delimiter),
                          ord(schema.quote) if schema.quote else -1, cells.log_table())  # fmt: skip
        return cls(schema, columns, names)

    def parse(self, block: np.ndarray) -> Parsed:
        """Whole lines (uint8, the last one ends in a newline) to columns; malformed lines are left out and listed."""
        schema, n = self.schema, int(np.count_nonzero(block == 10))
        singles, bags = schema.bags[: len(schema.categorical)].count(False), schema.bags.count(True)
        labels, dense = np.empty(n, np.float32), np.zeros((n, len(schema.dense)), np.float32)
        keys, missing = np.empty((singles, n), np.int64), np.zeros((singles, n), np.bool_)
        times = np.empty(n if schema.time else 0, np.int64)
        bag_sizes = np.zeros((bags, n), np.int64)
        bag_keys = np.empty(block.shape[0] // 2 + n * bags + 1 if bags else 0, np.int64)
        bad = np.empty((KEPT_BAD, 5), np.int64)
        rows, lines, n_bad, n_keys = _parse(
            block, self.columns, labels, dense, keys, missing, times, bag_sizes, bag_keys, bad)  # fmt: skip
        reports = [self._report(block, *(int(x) for x in row)) for row in bad[: min(n_bad, KEPT_BAD)]]
        return Parsed(labels[:rows], dense[:rows], keys[:, :rows], missing[:, :rows], times[:rows],
                      *split_bags(bag_sizes[:, :rows], bag_keys[:n_keys]), lines, int(n_bad), reports)  # fmt: skip

    def _report(self, block: np.ndarray, line: int, column: int, code: int, start: int, end: int) -> BadCell:
        found = repr(block[start : min(end, start + 60)].tobytes().decode("utf-8", "backslashreplace"))
        if code in (FEW, MANY):
            return BadCell(line, 0, f"{len(self.names)} columns", f"{column}" if code == FEW else "more")
        return BadCell(line, column + 1, expected_text(code, self.schema), f"{found} in {self.names[column]!r}")


def column_kinds(schema: Schema) -> dict[str, tuple[int, int, int]]:
    """Column -> (kind, slot, separator byte or -1)."""
    label = schema.label
    kind = LABEL_POSITIVE if label.positive else LABEL if label.threshold is None else cells.LABEL_THRESHOLD
    out = {label.column: (kind, 0, -1)}
    for k, d in enumerate(schema.dense):
        out[d.column] = (cells.DENSE_LOG1P if d.transform == "log1p" else cells.DENSE_IDENTITY, k, -1)
    places = [0, 0]
    for c in schema.categorical:
        encoding = ("hex", "decimal", "string").index(c.encoding)
        separator = ord(c.separator) if c.separator is not None else -1
        out[c.column] = ((BAG_HEX if c.is_bag else ID_HEX) + encoding, places[c.is_bag], separator)
        places[c.is_bag] += 1
    if schema.time is not None:
        kinds = {"yymmddhh": cells.TIME_YYMMDDHH, "unix": cells.TIME_UNIX, "unix_ms": cells.TIME_UNIX_MS}
        out[schema.time.column] = (kinds.get(schema.time.format, cells.TIME_ISO), 0, -1)
    return out


def pack_texts(texts: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """UTF-8 bytes of all texts, and int64 bounds ``[n + 1]``."""
    parts = [t.encode() for t in texts]
    bounds = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(p) for p in parts], out=bounds[1:])
    return np.frombuffer(bytearray(b"".join(parts)) or bytearray(1), np.uint8), bounds


def expected_text(code: int, schema: Schema) -> str:
    """What a cell should have been, for messages."""
    if code == BAD_TIME and schema.time is not None:
        return cells.TIME_EXPECTED[schema.time.format]
    return cells.EXPECTED[code]


def split_bags(sizes: np.ndarray, keys: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys in (row, bag) order and sizes ``[bags, rows]`` to sizes and keys of each bag feature."""
    if sizes.shape[0] == 0:
        return [], []
    if sizes.shape[0] == 1:
        return [sizes[0]], [keys]
    owner = np.repeat(np.tile(np.arange(sizes.shape[0]), sizes.shape[1]), sizes.T.ravel())
    return list(sizes), [keys[owner == b] for b in range(sizes.shape[0])]


def header_names(line: bytes, schema: Schema, file: str) -> tuple[str, ...]:
    """Column names of a header line."""
    text = line.rstrip(b"\r\n").removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    names = [n.strip() for n in text.split(schema.delimiter)]
    if schema.quote:
        names = [n.removeprefix(schema.quote).removesuffix(schema.quote) for n in names]
    if not text:
        raise MalformedRow(file, 1, 0, "a header line", "nothing")
    return tuple(names)


@inline
def _unquote(buf: np.ndarray, at: I64, quote: I64) -> tuple[I64, I64]:
    # Moves a doubled quote's text together in place; returns (end of the text or -1, first byte after the quote).
    end, at = at + 1, at + 1
    while buf[at] != 10:
        if buf[at] == quote:
            if buf[at + 1] != quote:
                return end, at + 1
            at += 1
        buf[end] = buf[at]
        end += 1
        at += 1
    return -1, at


@inline
def _bag(
    buf: np.ndarray, start: int, end: int, encoding: int, separator: int, keys: np.ndarray, n: int
) -> tuple[int, int]:
    # Appends the ids of a cell at keys[n]; empty parts are no ids. Returns (new n, code).
    at = start
    for k in range(start, end + 1):
        if k == end or buf[k] == separator:
            if k > at:
                value, code = cells.parse_key(buf, at, k, encoding)
                if code != 0:
                    return n, code
                keys[n] = value
                n += 1
            at = k + 1
    return n, 0


@pasted
def _cut(buf: np.ndarray, at: I64, delimiter: I64, quote: I64) -> tuple[I64, I64, I64]:
    # The cell that begins at ``at``: (start, end, place of the delimiter or newline after it); end -1 for a bad quote.
    start = at
    if quote >= 0 and buf[at] == quote:
        end, at = _unquote(buf, at, quote)
        at += 1 if buf[at] == 13 else 0
        return start + 1, end if buf[at] == delimiter or buf[at] == 10 else -1, at
    while buf[at] != delimiter and buf[at] != 10:
        at += 1
    return start, at - 1 if buf[at] == 10 and at > start and buf[at - 1] == 13 else at, at


@kernel
def _parse(
    buf: np.ndarray,
    columns: Columns,
    labels: np.ndarray,
    dense: np.ndarray,
    keys: np.ndarray,
    missing: np.ndarray,
    times: np.ndarray,
    bag_sizes: np.ndarray,
    bag_keys: np.ndarray,
    bad: np.ndarray,
) -> tuple[int, int, int, int]:
    kinds, slots, separators, threshold = columns.kinds, columns.slots, columns.separators, columns.threshold
    texts, markers, positive, logs = columns.texts, columns.missing, columns.positive, columns.log_table
    delimiter, quote, last = columns.delimiter, columns.quote, columns.kinds.shape[0] - 1
    at, row, line, n_bad, n_keys = 0, 0, 0, 0, 0
    while at < buf.shape[0]:
        if buf[at] == 10 or (buf[at] == 13 and buf[at + 1] == 10):  # a blank line holds no row
            at += 1 if buf[at] == 10 else 2
            line += 1
            continue
        code, column, cell, first_key = 0, 0, at, n_keys
        while code == 0 and column <= last:
            cell = at
            start, end, at = _cut(buf, at, delimiter, quote)
            kind, slot = kinds[column], slots[column]
            if end < 0:
                code = QUOTE
            elif (buf[at] == 10) != (column == last):
                code = MANY if column == last else FEW
            elif kind == SKIP:
                pass
            elif start == end or (markers.shape[0] > 1 and cells.same_text(buf, start, end, texts, markers)):
                if kind <= LABEL_POSITIVE or kind >= TIME_YYMMDDHH:
                    code = ABSENT
                elif kind < ID_HEX:
                    dense[row, slot] = 0.0
                elif kind < BAG_HEX:
                    keys[slot, row], missing[slot, row] = 0, True
                else:
                    bag_sizes[slot, row] = 0
            elif kind < DENSE_LOG1P:
                labels[row], code = cells.parse_label(buf, start, end, kind, threshold, texts, positive)
            elif kind < ID_HEX:
                dense[row, slot], code = cells.parse_dense(buf, start, end, kind, logs)
            elif kind == ID_HEX:  # by far the most frequent
                keys[slot, row], code = cells.parse_hex(buf, start, end)
                missing[slot, row] = False
            elif kind < BAG_HEX:
                keys[slot, row], code = cells.parse_key(buf, start, end, kind - ID_HEX)
                missing[slot, row] = False
            elif kind < TIME_YYMMDDHH:
                before = n_keys
                n_keys, code = _bag(buf, start, end, kind - BAG_HEX, separators[column], bag_keys, n_keys)
                bag_sizes[slot, row] = n_keys - before
            else:
                times[row], code = cells.parse_time(buf, start, end, kind)
            at += 1
            column += 1
        row += 1 if code == 0 else 0
        if code != 0:
            at -= 1  # at the cell's end again
            if n_bad < bad.shape[0]:
                bad[n_bad, 0], bad[n_bad, 1], bad[n_bad, 2] = line, column if code == FEW else column - 1, code
                bad[n_bad, 3], bad[n_bad, 4] = cell, at
            n_bad, n_keys = n_bad + 1, first_key
            while buf[at] != 10:
                at += 1
            at += 1
        line += 1
    return row, line, n_bad, n_keys
