"""The table of contents of an export, and what makes a chain of them.

An export is a folder. ``export.json`` is written last, so a folder without it is not an export. It names the state that
was exported (the store's lineage, a random number that a store gets once, and the generation), for a delta the state it
continues, every table with its description, and every file with its size and checksum:

    export.json
    table-0003/rows-00017.parquet      rows of bucket 17 of the fourth table
    table-0003/deleted-00017.parquet   only in deltas: ids of that bucket that no longer have a row
    extra.safetensors                  what admission and expiry remember besides rows, where tables have them
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import schema, statefile
from ..config import TableConfig
from ..errors import CorruptStore, FormatVersion, WrongParent
from ..kernels.buckets import MAX_BUCKETS

__all__ = [
    "EXTRA",
    "MANIFEST",
    "ExportFile",
    "Manifest",
    "State",
    "TableFiles",
    "check_chain",
    "check_file",
    "is_export",
    "verify",
]

FORMAT, VERSION = "embcache-export", 1
MANIFEST, EXTRA = "export.json", "extra.safetensors"
CHUNK = 4 << 20
_FILE = re.compile(r"table-\d{4,}/(rows|deleted)-\d{5}\.parquet")


@dataclass(frozen=True)
class State:
    """What an export holds: a generation of a lineage, and the checksum of its table of contents, by which a copy of
    the store that was trained differently is told apart. A store in memory has no generations: 0.

    >>> print(State("5f0c9a3e77d14b02", 7, 123))
    generation 7 of 5f0c9a3e77d14b02
    """

    lineage: str
    generation: int
    check: int

    def __str__(self) -> str:
        return f"generation {self.generation} of {self.lineage}"


@dataclass(frozen=True)
class ExportFile:
    """One Parquet file: its name below the folder, size, checksum, bucket and rows; ``deleted``: ids without a row."""

    name: str
    bytes: int
    crc32: int
    bucket: int
    rows: int
    deleted: bool = False


@dataclass(frozen=True)
class TableFiles:
    """One table of an export: its description, steps trained, and files."""

    table: TableConfig
    step: int
    files: tuple[ExportFile, ...]

    @property
    def rows(self) -> int:
        """Rows in the files."""
        return sum(file.rows for file in self.files if not file.deleted)

    @property
    def deleted(self) -> int:
        """Ids that no longer have a row."""
        return sum(file.rows for file in self.files if file.deleted)


@dataclass(frozen=True)
class Manifest:
    """A whole export. ``parent`` None: a full one."""

    state: State
    parent: State | None
    buckets: int
    tables: tuple[TableFiles, ...]
    extra: dict[str, Any] | None = field(default=None)

    @property
    def kind(self) -> str:
        return "full" if self.parent is None else "delta"

    def write(self, folder: Path) -> None:
        """Make the export exist: the last file, written aside, fsynced and renamed."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "state": vars(self.state),
            "parent": None if self.parent is None else vars(self.parent),
            "buckets": self.buckets,
            "tables": [
                {"table": schema.describe(t.table), "step": t.step, "files": [vars(file) for file in t.files]}
                for t in self.tables
            ],
            "extra": self.extra,
        }
        statefile.replace_json(folder, MANIFEST, {**body, "check": _check(body)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises FileNotFoundError where there is no export, CorruptStore where ``export.json`` is not one of ours or
        was altered, FormatVersion where it is newer."""
        path = folder / MANIFEST
        if not path.exists():
            raise FileNotFoundError(f"{folder} holds no export: there is no {MANIFEST} in it")
        try:
            body = json.loads(path.read_bytes())
        except ValueError:
            raise CorruptStore(f"{path} is not JSON") from None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CorruptStore(f"{path} is not an export of this library")
        version = body.get("version")
        if isinstance(version, int) and version > VERSION:
            raise FormatVersion(str(path), version, VERSION)
        check = body.pop("check", None)
        if check != _check(body):
            raise CorruptStore(f"{path}: the checksum does not match")
        try:
            return cls._parse(body, path)
        except CorruptStore:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CorruptStore(f"{path} lacks what an export has: {error!r}") from error

    @classmethod
    def _parse(cls, body: Mapping[str, Any], path: Path) -> Manifest:
        tables = []
        for entry in body["tables"]:
            files = tuple(ExportFile(**file) for file in entry["files"])
            odd = next((file.name for file in files if not _FILE.fullmatch(file.name)), None)
            if odd is not None:
                raise CorruptStore(f"{path} names a file {odd!r}, which no export has")
            tables.append(TableFiles(schema.restore(entry["table"], str(path)), int(entry["step"]), files))
        parent = None if body["parent"] is None else State(**body["parent"])
        buckets = int(body["buckets"])
        if not 1 <= buckets <= MAX_BUCKETS:
            raise CorruptStore(f"{path}: buckets = {buckets}, must be in [1, {MAX_BUCKETS}]")
        if body["extra"] is not None and body["extra"]["file"] != EXTRA:
            raise CorruptStore(f"{path} names a file {body['extra']['file']!r}, which no export has")
        return cls(State(**body["state"]), parent, buckets, tuple(tables), body["extra"])


def is_export(path: str | Path) -> bool:
    """Whether a folder holds a complete export."""
    return (Path(path) / MANIFEST).is_file()


def verify(folder: str | Path) -> Manifest:
    """Read every byte of an export and compare it with its checksums; CorruptStore names the first file that is
    missing, cut or altered. A few MiB of memory."""
    folder = Path(folder)
    manifest = Manifest.read(folder)
    for table in manifest.tables:
        for file in table.files:
            check_file(folder / file.name, file.bytes, file.crc32)
    if manifest.extra is not None:
        check_file(folder / EXTRA, manifest.extra["bytes"], manifest.extra["crc32"])
    return manifest


def check_chain(folders: Sequence[Path], manifests: Sequence[Manifest], found: State | None) -> None:
    """WrongParent unless each export continues the one before, the first one ``found`` (None: nothing known).

    A full export continues anything.
    """
    for folder, manifest in zip(folders, manifests, strict=True):
        if manifest.parent is not None and manifest.parent != found:
            raise WrongParent(str(folder), manifest.parent, found or "no imported or exported state")
        found = manifest.state


def check_file(path: Path, size: int, crc32: int) -> None:
    """CorruptStore where a file is not the one with this size and checksum."""
    found = crc = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                found, crc = found + len(chunk), zlib.crc32(chunk, crc)
    except FileNotFoundError:
        raise CorruptStore(f"{path} is missing") from None
    if (found, crc) != (size, crc32):
        raise CorruptStore(f"{path}: expected {size} bytes with checksum {crc32}, found {found} with {crc}")


def _check(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
