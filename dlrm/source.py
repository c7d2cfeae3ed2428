"""Where a script's data comes from: a log that is preprocessed first, or a folder that was preprocessed before."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from dlrm.data import ColumnCache, IdSpec, Limits, Schema, SplitSpec, preprocess
from dlrm.data.cache import MANIFEST
from embcache.errors import BadConfig
from embcache.train.distributed import Session
from embcache.train.flags import flag

__all__ = ["DataConfig", "StageLine", "open_data"]

IDS, SPLIT = "vocab:2", "last:0.1,0.1"


@dataclass(frozen=True)
class DataConfig:
    """Data: log files or a preprocessed folder; how ids become rows, and which rows train."""

    data: tuple[str, ...] = flag(help="log files (text, .gz, .parquet; several with commas), or a preprocessed folder")
    columns: Path | None = flag(None, "folder of the preprocessed columns (none: columns/ in --out)")
    ids: str | None = flag(None, f"vocab:MIN_COUNT, hash:ROWS or raw; none: {IDS}, or what a preprocessed folder has")
    split: str | None = flag(
        None,
        "last:VALID,TEST, random:VALID,TEST,SEED or time:VALID_DAYS,TEST_DAYS; "
        f"none: {SPLIT}, or what a preprocessed folder has",
    )
    max_bad_rows: int = flag(0, "malformed lines that are skipped and counted before one is an error")

    def __post_init__(self) -> None:
        IdSpec.parse(self.ids or IDS)
        SplitSpec.parse(self.split or SPLIT)
        if not self.data:
            raise ValueError("--data names no file")
        if self.max_bad_rows < 0:
            raise ValueError(f"--max-bad-rows must not be negative, got {self.max_bad_rows}")


def open_data(
    config: DataConfig,
    out: Path,
    schema: Schema | str | Path,
    stream: TextIO | None = None,
    session: Session | None = None,
) -> ColumnCache:
    """The columns to train on; a log is preprocessed once, by the first rank of a ``session``, and an interrupted
    preprocessing goes on.

    Raises BadConfig where a preprocessed folder was made with other settings than those given.
    """
    session = session or Session()
    if any((Path(path) / MANIFEST).is_file() for path in config.data):
        return _open_folder(config, schema)
    folder = config.columns or out / "columns"
    limits = Limits(max_bad_rows=config.max_bad_rows)
    ids, split = config.ids or IDS, config.split or SPLIT

    def work() -> ColumnCache:
        line = StageLine(stream or sys.stderr, "preprocessing: ") if session.is_main else None
        try:
            return preprocess(list(config.data), folder, schema, ids, split, limits=limits, progress=line)
        finally:
            if line is not None:
                line.close()

    cache = session.first(work)
    if cache.info["bad_rows"] and session.is_main:
        text = f"skipped {cache.info['bad_rows']:,} malformed rows; the first: {cache.info['bad_examples'][0]}\n"
        (stream or sys.stderr).write(text)
    return cache


def _open_folder(config: DataConfig, schema: Schema | str | Path) -> ColumnCache:
    folder, *others = config.data
    if others or config.columns is not None or config.max_bad_rows:
        raise BadConfig(f"--data {','.join(config.data)}: a preprocessed folder stands alone, without other files, "
                        "--columns and --max-bad-rows")  # fmt: skip
    cache = ColumnCache.open(folder)
    wanted = schema if isinstance(schema, Schema) else Schema.load(schema)
    if cache.schema.to_dict() != wanted.to_dict():
        raise BadConfig(f"--data {folder} was preprocessed with another schema than {schema}")
    job = cache.info.get("job") or {}
    for name, text, kind in (("ids", config.ids, IdSpec), ("split", config.split, SplitSpec)):
        if text is not None and job.get(name) != json.loads(json.dumps(asdict(kind.parse(text)))):
            raise BadConfig(f"--{name} {text}: {folder} was preprocessed with {job.get(name)}")
    return cache


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
