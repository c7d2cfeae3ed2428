"""Job: inputs, settings and folders of a preprocessing run, and whether a folder holds the same run already."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlrm.data.cache import MANIFEST, ColumnCache, write_atomically
from dlrm.data.chunks import ChunkLog
from dlrm.data.errors import ResumeMismatch, SchemaError
from dlrm.data.ids import IdSpec
from dlrm.data.ingest import Layout, Progress
from dlrm.data.schema import Schema
from dlrm.data.sources import Input
from dlrm.data.splits import NAMES, SplitSpec
from embcache.lock import FolderLock

INT32_ROWS = 2**31 - 1
Paths = str | Path | Sequence[str | Path] | Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """What a run may use. ``memory_bytes`` bounds the vocabulary stages; reading needs about ``20 * chunk_bytes``
    for each thread beside it."""

    threads: int = 2
    memory_bytes: int = 1 << 30
    chunk_bytes: int = 1 << 24
    max_bad_rows: int = 0

    def __post_init__(self) -> None:
        if min(self.threads, self.memory_bytes, self.chunk_bytes) < 1 or self.max_bad_rows < 0:
            raise ValueError("threads, memory_bytes and chunk_bytes must be >= 1, max_bad_rows >= 0")


class Job:
    """Inputs, settings and folders of a run."""

    def __init__(self, paths: Paths, out: Path, schema: Schema, ids: IdSpec, split: SplitSpec, limits: Limits,
                 progress: Progress) -> None:  # fmt: skip
        self.out, self.work, self.schema, self.ids, self.split = out, out / "work", schema, ids, split
        self.limits, self.progress = limits, progress
        named = _named_paths(paths, split)
        self.input_splits = [NAMES.index(name) for name, _ in named]
        self.inputs = [Input(path, schema) for _, path in named]
        self.tables = list(dict.fromkeys(schema.tables))
        if ids.kind == "hash":
            sizes = [ids.table_size(t) for t in self.tables]
            dtype = "<i4" if max(sizes, default=0) <= INT32_ROWS else "<i8"
        else:
            dtype = "<i8"
        self.layout = Layout(out, self.work, schema, ids, dtype)
        if split.kind == "time" and schema.time is None:
            raise SchemaError("split by time: the schema has no time column")

    def begin(self) -> bool:
        """Prepare the folders; True if the finished result is already there."""
        identity = {"inputs": [{**i.identity(), "split": NAMES[s]} for i, s in
                               zip(self.inputs, self.input_splits, strict=True)],
                    "schema": self.schema.to_dict(), "ids": asdict(self.ids),
                    "split": asdict(self.split)}  # fmt: skip
        self.identity = json.loads(json.dumps(identity))
        finished = (self.out / MANIFEST).exists()
        if finished:
            info = ColumnCache.open(self.out).info
            self._same(info.get("job"))
            if info["bad_rows"] > self.limits.max_bad_rows:
                raise ResumeMismatch(f"{self.out} was made without {info['bad_rows']} malformed rows, more than "
                                     f"{self.limits.max_bad_rows}; the first: {info['bad_examples'][0]}")  # fmt: skip
            return True
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.work / "job.json"
        begun = path.exists()
        kept = begun and ChunkLog(self.work / "chunks").count() > 0
        if kept:
            self._same(json.loads(path.read_bytes()))
        elif not begun and any(self.out.iterdir()):
            strange = next(p for p in self.out.iterdir())
            if strange != self.work:
                raise ResumeMismatch(
                    f"{self.out} holds {strange.name!r} and is not an unfinished run: choose a new folder"
                )
        self.work.mkdir(exist_ok=True)
        self.lock = FolderLock.take(self.work)
        if not kept:  # a mistake may have been mended since: begin anew
            for old in (*self.out.glob("*.bin"), *self.work.glob("*.bin")):
                old.unlink()
            write_atomically(path, json.dumps(self.identity).encode())
        self.chunks = ChunkLog(self.work / "chunks")
        return False

    def _same(self, have: Any) -> None:
        what = [k for k in self.identity if not isinstance(have, dict) or have.get(k) != self.identity[k]]
        if not what:
            return
        raise ResumeMismatch(f"{self.out} was begun with other {', '.join(what)}: remove it or choose a new folder")


def _named_paths(paths: Paths, split: SplitSpec) -> list[tuple[str, Path]]:
    if isinstance(paths, Mapping) != (split.kind == "files"):
        raise ValueError("split 'files' and a mapping of split names to input files go together")
    if isinstance(paths, Mapping):
        wrong = [n for n in paths if n not in NAMES]
        if wrong:
            raise ValueError(f"split {', '.join(wrong)}: expected {', '.join(NAMES)}")
        return [(n, p) for n in NAMES if n in paths for _, p in _named_paths(paths[n], SplitSpec())]
    several = [paths] if isinstance(paths, str | Path) else list(paths)
    if not several:
        raise ValueError("no input files")
    return [("train", Path(p)) for p in several]
