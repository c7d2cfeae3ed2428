"""Where a script's data comes from: a log that is preprocessed first, or a folder that was preprocessed before."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dlrm.data import ColumnCache, IdSpec, Limits, Schema, SplitSpec, preprocess
from embcache.train.flags import flag

__all__ = ["DataConfig", "StageLine", "open_data"]


@dataclass(frozen=True)
class DataConfig:
    """Data: log files or a preprocessed folder; how ids become rows, and which rows train."""

    data: tuple[str, ...] = flag(help="log files (text, .gz, .parquet; several with commas), or a preprocessed folder")
    columns: Path | None = flag(None, "folder of the preprocessed columns (none: columns/ in --out)")
    ids: str = flag("vocab:2", "vocab:MIN_COUNT, hash:ROWS or raw")
    split: str = flag("last:0.1,0.1", "last:VALID,TEST, random:VALID,TEST,SEED, time:VALID_DAYS,TEST_DAYS")
    max_bad_rows: int = flag(0, "malformed lines that are skipped and counted before one is an error")

    def __post_init__(self) -> None:
        IdSpec.parse(self.ids)
        SplitSpec.parse(self.split)
        if not self.data:
            raise ValueError("--data names no file")


def open_data(config: DataConfig, out: Path, schema: Schema | str | Path, stream: TextIO | None = None) -> ColumnCache:
    """The columns to train on; a log is preprocessed once, and an interrupted preprocessing goes on."""
    first = Path(config.data[0])
    if (first / "manifest.json").is_file():
        return ColumnCache.open(first)
    folder = config.columns or out / "columns"
    limits = Limits(max_bad_rows=config.max_bad_rows)
    line = StageLine(stream or sys.stderr, "preprocessing: ")
    try:
        return preprocess(list(config.data), folder, schema, config.ids, config.split, limits=limits, progress=line)
    finally:
        line.close()


class StageLine:
    """What is being done to the data: a line that renews itself on a terminal; elsewhere a line for each stage and one
    every ten seconds."""

    def __init__(self, stream: TextIO, prefix: str = "") -> None:
        self._stream, self._live, self._prefix = stream, stream.isatty(), prefix
        self._last, self._stage = 0.0, ""

    def __call__(self, stage: str, rows: int, fraction: float) -> None:
        now, new = time.monotonic(), stage != self._stage
        text = f"{self._prefix}{stage}, {rows:,} rows, {fraction:4.0%}"
        if self._live:
            if new or fraction >= 1 or now - self._last > 0.2:
                self._stream.write(("\n" if new and self._stage else "") + f"\r{text}")
                self._last = now
        elif new or now - self._last > 10:
            self._stream.write(f"{self._prefix}{stage}\n" if new else f"{text}\n")
            self._last = now
        self._stage = stage
        self._stream.flush()

    def close(self) -> None:
        """End the line."""
        if self._live and self._stage:
            self._stream.write("\n")
        self._stage = ""
