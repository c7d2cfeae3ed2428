"""What can go wrong with data: each failure is a type of its own and says where."""

from __future__ import annotations

from embcache.errors import EmbcacheError


class DataError(EmbcacheError):
    """Base of every error of this package."""


class SchemaError(DataError, ValueError):
    """A schema that contradicts itself, or a file that lacks one of its columns."""


class MalformedRow(DataError, ValueError):
    """A data line that does not say what the schema expects.

    Attributes: ``file``, ``line`` (from 1; a row number for Parquet), ``column`` (from 1, 0 when the whole line is
    meant) and ``expected``.
    """

    def __init__(self, file: str, line: int, column: int, expected: str, found: str) -> None:
        place = f"{file}, line {line}" + (f", column {column}" if column else "")
        super().__init__(f"{place}: expected {expected}, found {found}")
        self.file, self.line, self.column, self.expected = file, line, column, expected


class CorruptInput(DataError):
    """An input file that cannot be read to its end (a torn .gz, a file that is not Parquet)."""


class ResumeMismatch(DataError):
    """An unfinished output folder was made with other inputs or settings."""


class CorruptCache(DataError):
    """A column cache that is torn, altered, or not a column cache at all."""


class CacheVersion(DataError):
    """A column cache of a newer format than this code reads."""


class MemoryBudgetExceeded(DataError):
    """A vocabulary does not fit the memory budget even in its smallest parts."""
