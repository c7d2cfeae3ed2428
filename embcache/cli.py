"""``python -m embcache verify|info|export|import|compact PATH``: looking after stores and exports from a shell.

Exit status 0: done; 1: damage was found, or an error, said in one line on the standard error; 2: a command that cannot
be understood. Reading commands may run beside a process that trains.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoints
from .errors import BadConfig, CorruptStore, EmbcacheError
from .kernels.buckets import BUCKETS
from .planning import human
from .store import EmbeddingStore
from .tiers import Lmdb, Ram
from .transfer import Manifest, export_store, import_exports, is_export, verify

__all__ = ["main"]

STORE, BASE = "manifest.json", "data.mdb"
CACHED = 4096  # rows of each table; these commands stream past the cache
EPILOG = """\
PATH is the folder of a store (or, for verify and info, of checkpoints or an export).

  python -m embcache info runs/a/store
  python -m embcache verify runs/a/store
  python -m embcache export runs/a/store exports/monday
  python -m embcache export runs/a/store exports/tuesday --since exports/monday
  python -m embcache import copy exports/monday exports/tuesday
  python -m embcache export runs/a/store user.npy --table user
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    >>> main(["info", "/no/such/folder"])
    1
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 130
    except (EmbcacheError, OSError, ImportError) as error:
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m embcache",
        description="Look after embedding stores and their exports.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _verify_parser(commands)
    _info_parser(commands)
    _export_parser(commands)
    _import_parser(commands)
    compact = commands.add_parser(
        "compact",
        help="merge what can be merged and rewrite the base without gaps",
        description="Merge what can be merged and rewrite the base without gaps. No other process may have the store "
        "open; needs disk space for a second base meanwhile.",
    )
    compact.add_argument("path", metavar="PATH", type=Path)
    compact.set_defaults(run=_compact)
    return parser


def _verify_parser(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="read everything and compare it with its checksums",
        description="Read every byte of a store's generations, of checkpoints, or of an export, and compare it with "
        "its checksums; rows already merged into the base have none, of those order and number are checked. A line for "
        "each thing that is damaged; exit status 1 if there is one.",
    )
    verify.add_argument("path", metavar="PATH", type=Path)
    verify.set_defaults(run=_verify)


def _info_parser(commands: Any) -> None:
    info = commands.add_parser(
        "info",
        help="generations, tables, rows and bytes",
        description="What a store, checkpoints or an export hold.",
    )
    info.add_argument("path", metavar="PATH", type=Path)
    info.add_argument("--json", action="store_true", help="as JSON, for programs")
    info.set_defaults(run=_info)


def _export_parser(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write rows as Parquet files by hash bucket, or one table as .npy or .parquet",
        description="Write the rows of a store's last generation that differ from their initial values to the new "
        "folder OUT: everything, or with --since what has changed. With --table one table, to OUT.npy (weights) or "
        "OUT.parquet.",
    )
    export.add_argument("path", metavar="PATH", type=Path)
    export.add_argument("out", metavar="OUT", type=Path)
    export.add_argument("--since", metavar="EXPORT", help="an earlier export of this store, or a generation it keeps")
    export.add_argument("--buckets", type=int, help=f"files a table ({BUCKETS})")
    export.add_argument("--generation", metavar="N", default="latest", help="latest, best, or a number")
    export.add_argument("--table", metavar="NAME", help="this table alone, to a .npy or .parquet file")
    export.add_argument("--rows", choices=("written", "all"), help="of --table: all only of bounded tables")
    export.add_argument("--state", action="store_true", help="of --table, .parquet: optimizer state as well")
    export.set_defaults(run=_export)


def _import_parser(commands: Any) -> None:
    importing = commands.add_parser(
        "import",
        help="make rows those of an export and of deltas that follow it",
        description="Verify exports and make the rows of a store those of the first and of the deltas that follow it, "
        "committed as a new generation. The store is made if PATH does not exist. With --table: replace rows of one "
        "table by those of a .npy or .parquet file.",
    )
    importing.add_argument("path", metavar="PATH", type=Path)
    importing.add_argument("sources", metavar="EXPORT", nargs="+", type=Path)
    importing.add_argument("--table", metavar="NAME", help="load EXPORT, a .npy or .parquet file, into this table")
    importing.add_argument("--ids", metavar="FILE", type=Path, help="of --table, .npy: the ids of its rows, .npy too")
    importing.set_defaults(run=_import)


# commands --------------------------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    problems = 0
    for problem in _problems(options.path):
        _say(problem)
        problems += 1
    _say(f"{options.path}: {problems} problems" if problems else f"{options.path}: intact")
    return 1 if problems else 0


def _problems(path: Path) -> Iterator[str]:
    if is_export(path):
        try:
            verify(path)
        except CorruptStore as error:
            yield str(error)
        return
    checkpoints = _checkpoints(path)
    yield from checkpoints.verify()
    if not (path / BASE).exists():
        return
    with EmbeddingStore.open(path, readonly=True, rows=CACHED) as store:
        for generation in [g.number for g in store.checkpoints.generations][:-1]:
            try:
                store.restore(generation)
            except CorruptStore as error:
                yield f"generation {generation}: {error}"
        store.refresh()
        yield from _tier(store).verify()


def _info(options: argparse.Namespace) -> int:
    found = _export_info(options.path) if is_export(options.path) else _store_info(options.path)
    if options.json:
        _say(json.dumps(found, indent=1))
        return 0
    tables = found.pop("tables")
    for name, value in found.items():
        if isinstance(value, list):
            for line in value:
                _say(f"{name:<14} {line['number']}{_marks(line)}")
        else:
            _say(f"{name:<14} {_cell(name, value)}")
    if tables:
        columns = list(tables[0])
        cells = [columns, *([_cell(name, table[name]) for name in columns] for table in tables)]
        widths = [max(len(row[k]) for row in cells) for k in range(len(columns))]
        for row in cells:
            _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _marks(generation: dict[str, Any]) -> str:
    notes = json.dumps(generation["notes"]) if generation["notes"] else ""
    return f"{' (best)' if generation['best'] else ''}  {notes}".rstrip()


def _export_info(path: Path) -> dict[str, Any]:
    manifest = Manifest.read(path)
    tables = [
        {
            **_table(t.table),
            "step": t.step,
            "rows": t.rows,
            "deleted": t.deleted,
            "bytes": sum(f.bytes for f in t.files),
        }
        for t in manifest.tables
    ]
    parent = {} if manifest.parent is None else {"parent": str(manifest.parent)}
    head = {"export": str(path), "kind": manifest.kind, "state": str(manifest.state), **parent}
    return {**head, "buckets": manifest.buckets, "tables": tables}


def _store_info(path: Path) -> dict[str, Any]:
    checkpoints = _checkpoints(path)
    generations = [{"number": g.number, "best": g.best, "notes": g.notes} for g in checkpoints.generations]
    found: dict[str, Any] = {"folder": str(path), "lineage": checkpoints.lineage, "generation": generations}
    if not (path / BASE).exists():
        return {**found, "tables": []}
    with EmbeddingStore.open(path, readonly=True, rows=CACHED) as store:
        tables = [
            {**_table(table), "step": step, "rows": store.count_written(table.name)}
            for table, step in zip(store.tables, store.steps, strict=True)
        ]
        tier = _tier(store).info()
    disk = {name: int(tier[name]) for name in ("base_bytes", "overlay_bytes", "spare_bytes", "overlay_rows")}
    return {**found, **disk, "tables": tables}


def _table(table: Any) -> dict[str, Any]:
    return {
        "table": table.name,
        "ids": table.num_embeddings,
        "dim": table.embedding_dim,
        "dtype": str(table.dtype).removeprefix("torch."),
        "optimizer": table.optimizer.name,
        "row_bytes": table.row_bytes,
    }


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "any int64" if name == "ids" else ""
    if name in ("bytes", "base_bytes", "overlay_bytes", "spare_bytes"):
        return human(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _export(options: argparse.Namespace) -> int:
    _checkpoints(options.path)
    with EmbeddingStore.open(options.path, readonly=True, rows=CACHED) as store:
        if options.generation != "latest":
            store.restore(_number(options.generation))
        if options.table is not None:
            if options.since is not None or options.buckets is not None:
                raise BadConfig("--since and --buckets are for exports of a whole store, without --table")
            rows = store.export_table(options.table, options.out, rows=options.rows, state=options.state)
            _say(f"{options.out}: {rows:,} rows of table {options.table!r}, generation {store.generation}")
            return 0
        if options.rows is not None or options.state:
            raise BadConfig("--rows and --state are for one table, with --table NAME")
        since = None if options.since is None else _number(options.since)
        buckets = BUCKETS if options.buckets is None else options.buckets
        manifest = export_store(store, options.out, since=since, buckets=buckets)
    rows, deleted = sum(t.rows for t in manifest.tables), sum(t.deleted for t in manifest.tables)
    more = f", {deleted:,} deleted ids, since {manifest.parent}" if manifest.parent is not None else ""
    _say(f"{options.out}: {manifest.kind} export of {manifest.state}: {rows:,} rows{more}")
    return 0


def _number(text: str) -> Any:
    """A generation's number, or what else the text says."""
    return int(text) if text.isdigit() else text


def _import(options: argparse.Namespace) -> int:
    if options.table is not None:
        return _import_table(options)
    if options.ids is not None:
        raise BadConfig("--ids is for one table, with --table NAME")
    if (options.path / STORE).exists():
        store = EmbeddingStore.open(options.path, rows=CACHED)
    else:
        tables = [t.table for t in Manifest.read(options.sources[0]).tables]
        store = EmbeddingStore(tables, [Ram(rows=CACHED), Lmdb(options.path)])
    with store:
        state = import_exports(store, *options.sources)
        _say(f"{options.path}: {state}, committed as generation {store.generation}")
    return 0


def _import_table(options: argparse.Namespace) -> int:
    if len(options.sources) != 1:
        raise BadConfig("--table takes one file")
    _checkpoints(options.path)
    with EmbeddingStore.open(options.path, rows=CACHED) as store:
        state = store.restore("latest")  # dense weights and the like go on into the new generation
        rows = store.load_table(options.table, options.sources[0], ids=options.ids)
        latest = store.checkpoints.latest
        number = store.commit(state, notes=None if latest is None else latest.notes)
        _say(f"{options.path}: {rows:,} rows of table {options.table!r}, committed as generation {number}")
    return 0


def _purge(store: EmbeddingStore) -> None:
    """Rows that have expired leave the disk, in a generation that is otherwise the last one."""
    if any(table.expiry is not None for table in store.tables):
        latest, state = store.checkpoints.find("latest"), store.restore()
        if store.front.purge():
            store.commit(state, notes=latest.notes, keep="best" if latest.best else None)


def _compact(options: argparse.Namespace) -> int:
    _checkpoints(options.path)
    base = options.path / BASE
    with EmbeddingStore.open(options.path, rows=CACHED) as store:
        before = base.stat().st_size
        _purge(store)
        _tier(store).compact()
    _say(f"{options.path}: {human(before)} before, {human(base.stat().st_size)} now")
    return 0


# -----------------------------------------------------------------------------------------------------------------


def _checkpoints(path: Path) -> Checkpoints:
    """The generations in a folder; FileNotFoundError where there are none."""
    found = Checkpoints(path)
    if found.latest is None:
        raise FileNotFoundError(f"{path} holds no store, no checkpoint and no export")
    return found


def _tier(store: EmbeddingStore) -> Any:
    """The tier on disk, with what only people ask of it."""
    return store.durable


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
