"""preprocess: logs of any size to a ColumnCache, streaming, in bounded memory, resumable.

Reading (:mod:`dlrm.data.ingest`) parses every input byte once. With a vocabulary, ids are then codes into
dictionaries of their chunks, and four short stages follow: count, order, map (:mod:`dlrm.data.vocabulary`) and write
(:mod:`dlrm.data.finish`). The last step renames ``manifest.json`` into place. The finished folder's bytes do not depend
on chunk size, threads, memory budget or interruptions.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dlrm.data.cache import ColumnCache
from dlrm.data.finish import Finish
from dlrm.data.ids import IdSpec
from dlrm.data.ingest import Ingest, Progress
from dlrm.data.job import Job, Limits, Paths
from dlrm.data.schema import Schema
from dlrm.data.splits import SplitSpec
from embcache.errors import EmbcacheError
from embcache.statefile import named_when_full


def preprocess(
    inputs: Paths,
    out: str | Path,
    schema: Schema | str | Path,
    ids: IdSpec | str = "vocab:2",
    split: SplitSpec | str = "last:0.1",
    *,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> ColumnCache:
    """Turn log files into a cache folder ``out`` and open it.

    ``inputs``: one path, several, or a mapping of ``train``/``valid``/``test`` to paths (with split ``files``); text,
    gzip or Parquet. ``ids``: see :mod:`dlrm.data.ids`; ``split``: see :mod:`dlrm.data.splits`. A folder that an
    interrupted run left is finished; one that holds the same finished job is opened. ``progress(stage, rows,
    fraction)`` is called after every chunk.

    Raises :class:`MalformedRow`, :class:`SchemaError`, :class:`CorruptInput`, :class:`ResumeMismatch`, ``StoreLocked``
    (another process preprocesses there), ``StorageFull`` (call again when there is room: it goes on).
    """
    job = Job(inputs, Path(out), schema if isinstance(schema, Schema) else Schema.load(schema),
               IdSpec.parse(ids) if isinstance(ids, str) else ids,
               SplitSpec.parse(split) if isinstance(split, str) else split,
               limits or Limits(), progress or (lambda stage, rows, fraction: None))  # fmt: skip
    with named_when_full(job.out):
        if not job.begin():
            state = Ingest(job.inputs, job.layout, job.chunks, job.limits.max_bad_rows, job.progress).run(
                job.limits.threads, job.limits.chunk_bytes
            )
            Finish(job, state).run()
    if job.work.exists():
        shutil.rmtree(job.work)
    return ColumnCache.open(job.out)


def input_errors() -> tuple[type[Exception], ...]:
    """Errors that a user's input or settings cause, for scripts to print without a traceback."""
    return (EmbcacheError, ValueError, OSError)
