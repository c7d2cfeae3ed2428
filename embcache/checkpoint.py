"""Checkpoints: numbered generations, each complete or absent, committed by one rename.

A folder holds ``manifest.json`` and a folder for each generation it lists. A generation has ``state.json`` and
``state.safetensors`` (dense weights, optimizers, random state, data position: whatever the caller gives) and the rows
of every embedding table:

* of a store in memory, its *written* rows: ids, weights and optimizer state, in ``rows-*.safetensors`` of about
  ``PART_BYTES``. A row that was never written is a function of the seed and costs nothing;
* of a store on disk, which lives in the same folder, a description of the files its last tier has frozen. Only rows
  that changed since the generation before are written, and ``save(wait=False)`` returns as soon as they are copied.

Files carry checksums; the manifest is written last, fsynced and renamed, and is the only commit point: a generation it
does not list does not exist and is swept by the next save.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import shutil
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from . import records, schema, statefile
from .cache.saving import Saving
from .config import TableConfig
from .errors import BadConfig, CorruptStore, FormatVersion, SchemaMismatch
from .lock import FolderLock
from .tiers.base import DurableTier

__all__ = ["Checkpoints", "Generation", "Savable", "SavedStore"]

FORMAT, VERSION = "embcache-checkpoint", 2
MANIFEST = "manifest.json"
PART_BYTES = 32 << 20
_NAME = re.compile(r"generation-\d{8,}$")


class Savable(Protocol):
    """What a checkpoint needs of a store (``embcache.EmbeddingStore`` is one)."""

    tables: list[TableConfig]
    steps: list[int]

    @property
    def durable(self) -> DurableTier | None:
        """The last tier, where it outlives the process."""

    def pending_tables(self) -> set[int]: ...
    def begin_save(self, number: int, wait: bool) -> Saving: ...
    def raw_rows(self, table: int, block: int) -> Iterator[tuple[Tensor, Tensor]]: ...
    def put_raw_rows(self, table: int, ids: Tensor, rows: Tensor) -> None: ...
    def begin_restore(self, description: Mapping[str, Any] | None, keep: Sequence[dict[str, Any]]) -> None: ...
    def extra_state(self) -> dict[str, Tensor]: ...
    def load_extra_state(self, state: dict[str, Tensor]) -> None: ...
    def committed(self, number: int) -> None: ...


@dataclass(frozen=True)
class Generation:
    """One committed checkpoint.

    Attributes:
        number: counts up from 1.
        notes: the caller's, plain JSON.
        best: whether it is the best so far.
        check: checksum of its table of contents.
        disk: what the last tier of each disk store needs to read its rows.
    """

    number: int
    notes: dict[str, Any]
    best: bool
    check: int
    disk: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"generation-{self.number:08d}"


@dataclass(frozen=True)
class SavedStore:
    """A store as a generation describes it: ``disk``, its rows lie in the last tier; else in the generation's files."""

    disk: bool
    tables: list[TableConfig]
    steps: list[int]
    extra: dict[str, Tensor]


class Checkpoints:
    """The generations in a folder. One thread at a time may call it.

    Args:
        folder: made by the first ``save``; the store's own folder where a store on disk is saved.
        keep: newest generations kept; the best is kept besides.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = Checkpoints(folder)
    ...     _ = saved.save({"weight": torch.ones(2)}, notes={"step": 7})
    ...     state = Checkpoints(folder).load()
    >>> state
    {'weight': tensor([1., 1.])}
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep}, must be at least 1")
        self.folder = Path(folder).absolute()  # the process may change its directory
        self.keep = keep
        self.lineage = ""
        """Random, made with the folder's first generation: tells these generations from those of any other folder."""
        self.generations: list[Generation] = self._read_manifest()
        self.held: frozenset[int] = frozenset()
        """Numbers that are kept besides, because something outside this folder names them."""
        self._lock: FolderLock | None = None
        self._saving: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._writing = threading.RLock()  # the manifest, which merges rewrite too

    def claim(self) -> None:
        """Keep other processes from writing here until this object is gone; StoreLocked if one does already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock.take(self.folder)
        self.generations = self._read_manifest()

    @property
    def latest(self) -> Generation | None:
        """The newest generation."""
        return self.generations[-1] if self.generations else None

    @property
    def best(self) -> Generation | None:
        """The generation last saved with ``best=True``."""
        return next((g for g in reversed(self.generations) if g.best), None)

    # saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        state: Any,
        stores: Sequence[Savable] = (),
        *,
        notes: dict[str, Any] | None = None,
        best: bool = False,
        wait: bool = True,
    ) -> Generation:
        """Commit a new generation and drop those no longer kept.

        Args: ``state``: nested plain values and tensors, copied; ``stores``: embedding stores without pending
        gradients, at most one of them on disk; ``notes``: shown by ``generations`` without reading the state;
        ``best``: this is now the best generation; ``wait``: False returns once everything is copied, where all stores
        are on disk: another thread makes it durable, and the next ``save`` or ``wait`` raises what went wrong there.
        Raises: StorageFull with everything committed before intact; RuntimeError when gradients wait for a step.
        """
        self.wait()
        self._check_stores(stores)
        noted = _plain(notes)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._writing:
            self.generations = self._read_manifest()
            self._sweep()
        number = self.generations[-1].number + 1 if self.generations else 1
        generation = Generation(number, noted, best, 0)
        folder = self.folder / generation.name
        folder.mkdir()
        wait = wait or not stores or any(store.durable is None for store in stores)
        begun: list[Saving] = []
        work: list[Callable[[], object]] = []  # for the thread: what is in here will be done, whatever happens now
        go = threading.Lock()
        go.acquire()
        try:
            finish = self._prepare(folder, state, stores)
            if not wait:  # first: whether an interrupted start has started anything nobody knows
                aside = threading.Thread(target=self._aside, args=(go, work), name="embcache-commit")
                aside.start()
            begun += [store.begin_save(number, wait) for store in stores if store.durable is not None]
            if not wait:
                self._saving = aside
                for saving in begun:
                    saving.promised = True
                work.append(lambda: self._finish(generation, begun, finish, stores))
                return generation
        except BaseException:
            if not work:
                self._saving = None
                for saving in begun:
                    saving.abort()
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            go.release()
        return self._finish(generation, begun, finish, stores)

    def wait(self) -> None:
        """Return when a save in the background is durable; raises what went wrong with it."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _check_stores(self, stores: Sequence[Savable]) -> None:
        for store in stores:
            if store.pending_tables():
                raise RuntimeError("a checkpoint between backward and step would lose gradients: save after step()")
            durable = store.durable
            if durable is not None and durable.folder.resolve() != self.folder.resolve():
                raise BadConfig(
                    f"a store on disk keeps its generations in its own folder {durable.folder}, not in {self.folder}"
                )
            if durable is not None and self._lock is not None and not self._lock.current():
                raise CorruptStore(f"{self.folder} was moved, removed or replaced while it was open")
        if sum(store.durable is not None for store in stores) > 1:
            raise BadConfig("at most one store on disk can be saved together: put all tables into one store")

    def _aside(self, go: threading.Lock, work: Sequence[Callable[[], object]]) -> None:
        try:
            with go:
                for call in work:
                    call()
        except BaseException as error:  # raised again by the caller's next call
            self._failure = error

    def _finish(
        self, generation: Generation, begun: Sequence[Saving], write: Callable[[], int], stores: Sequence[Savable]
    ) -> Generation:
        """Make everything durable, then commit."""
        try:
            generation = dataclasses.replace(generation, disk=[saving.land() for saving in begun])
            for store in stores:
                if store.durable is not None:
                    store.durable.sync()
            generation = dataclasses.replace(generation, check=write())
        except BaseException:
            for saving in begun:
                saving.abort()  # where it was not even asked to land
            shutil.rmtree(self.folder / generation.name, ignore_errors=True)
            raise
        with self._writing:
            self._commit(generation)
            self._sweep()
            horizon = min(g.number for g in self.generations)
        for store in stores:
            store.committed(generation.number)
            if store.durable is not None:
                store.durable.sealed(generation.number, horizon, [g.number for g in self.generations])
        return generation

    def _prepare(self, folder: Path, state: Any, stores: Sequence[Savable]) -> Callable[[], int]:
        """Copy what may change; the function returned writes it and gives the checksum of the table of contents."""
        plain, tensors = statefile.pack(state)
        extras, extra_tensors = statefile.pack([store.extra_state() for store in stores])
        saved = [
            {
                "disk": store.durable is not None,
                "tables": [schema.describe(table) for table in store.tables],
                "steps": list(store.steps),
                "extra": extra,
            }
            for store, extra in zip(stores, extras, strict=True)
        ]
        content = {"format": FORMAT, "version": VERSION, "state": plain, "stores": saved}
        content["unique"] = secrets.token_hex(8)  # so that no other generation has this one's checksum

        def write() -> int:
            content["rows"] = [
                {"tables": list(held), "file": statefile.write_tensors(folder, f"rows-{i:05d}.safetensors", part)}
                for i, (held, part) in enumerate(_parts(stores))
            ]
            content["tensors"] = statefile.write_tensors(folder, "state.safetensors", tensors)
            content["extra_tensors"] = statefile.write_tensors(folder, "extra.safetensors", extra_tensors)
            entry = statefile.write_json(folder, "state.json", content)
            statefile.sync_folder(folder)
            statefile.sync_folder(self.folder)
            return int(entry["crc32"])

        return write

    def _commit(self, new: Generation) -> None:
        kept = [dataclasses.replace(g, best=g.best and not new.best) for g in self.generations] + [new]
        best = next((g for g in reversed(kept) if g.best), None)
        self._write_manifest([g for g in kept if g in kept[-self.keep :] or g is best or g.number in self.held])

    def retain(self, numbers: Collection[int]) -> None:
        """Forget all other generations as if they had never been committed; before a store on disk is opened here."""
        with self._writing:
            self.generations = self._read_manifest()
            kept = [g for g in self.generations if g.number in numbers]
            if kept != self.generations:
                self._write_manifest(kept)
                self._sweep()

    def rewrite(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Replace the disk descriptions of all kept generations, in one step; from any thread."""
        with self._writing:
            current = self._read_manifest()
            if current:
                self._write_manifest([dataclasses.replace(g, disk=[change(d) for d in g.disk]) for g in current])

    def _write_manifest(self, generations: list[Generation]) -> None:
        self.lineage = self.lineage or secrets.token_hex(8)
        listed = [dataclasses.asdict(g) for g in generations]
        body = {"format": FORMAT, "version": VERSION, "lineage": self.lineage, "generations": listed}
        statefile.replace_json(self.folder, MANIFEST, {**body, "check": _check(body)})
        self.generations = generations

    def _sweep(self) -> None:
        """Remove what the manifest does not list: older generations, and those a crash left half written."""
        listed = {g.name for g in self.generations}
        for path in self.folder.iterdir():
            if _NAME.match(path.name) and path.name not in listed:
                shutil.rmtree(path)

    # loading ----------------------------------------------------------------------------------------------------

    def load(self, stores: Sequence[Savable] = (), which: str | int = "latest", *, disk_only: bool = False) -> Any:
        """Read a generation ("latest", "best" or a number) into the stores and return its state. ``disk_only``: stores
        in memory that were saved with it are left out.

        Everything is checked before the first row changes: CorruptStore (torn, foreign, altered), FormatVersion
        (newer), SchemaMismatch (other tables, listing both), FileNotFoundError where there is no such generation.
        """
        self.wait()
        self._check_stores(stores)
        generation = self.find(which)
        folder = self.folder / generation.name
        content = self._content(folder, generation)
        saved = [s for s in content["stores"] if s["disk"] or not disk_only]
        _check_same(folder, saved, stores)
        parts = [] if disk_only else content["rows"]
        for part in parts:
            statefile.read_checked(folder, part["file"])
        state = statefile.unpack(content["state"], statefile.read_tensors(folder, content["tensors"]))
        extra_tensors = statefile.read_tensors(folder, content["extra_tensors"])
        others = [description for g in self.generations if g is not generation for description in g.disk]
        for store, mine in zip(stores, saved, strict=True):
            store.begin_restore(generation.disk[0] if mine["disk"] else None, others)
            store.steps[:] = [int(step) for step in mine["steps"]]
            store.load_extra_state(statefile.unpack(mine["extra"], extra_tensors))
        places = _places(stores)
        for part in parts:
            rows = statefile.read_tensors(folder, part["file"])
            for k in part["tables"]:
                store, t = places[k]
                found = {what: rows[f"{k}.{what}"] for what in ("weight", "state", "meta") if f"{k}.{what}" in rows}
                store.put_raw_rows(t, rows[f"{k}.ids"], records.join(store.tables[t], **found))
        for store in stores:
            store.committed(generation.number)
        return state

    def find(self, which: str | int) -> Generation:
        """A generation by "latest", "best" or number; FileNotFoundError where there is none, BadConfig for what is
        neither."""
        if which == "latest":
            found = self.latest
        elif which == "best":
            found = self.best
        elif isinstance(which, Integral) and not isinstance(which, bool):
            found = next((g for g in self.generations if g.number == which), None)
        else:
            raise BadConfig(f"generation {which!r} of {self.folder}: must be 'latest', 'best' or a number")
        if found is None:
            raise FileNotFoundError(f"{self.folder} holds no checkpoint{'' if which == 'latest' else f' {which}'}")
        return found

    def tables(self, which: str | int = "latest") -> list[TableConfig]:
        """The tables of a generation's store on disk, as they were declared when it was saved."""
        generation = self.find(which)
        folder = self.folder / generation.name
        content = self._content(folder, generation)
        return [table for s in content["stores"] if s["disk"] for table in _restored(folder, s)]

    def state(self, which: str | int = "latest") -> Any:
        """The state that a generation was saved with."""
        folder, content = self._opened(which)
        return statefile.unpack(content["state"], statefile.read_tensors(folder, content["tensors"]))

    def stores(self, which: str | int = "latest") -> list[SavedStore]:
        """What a generation says of the stores saved with it."""
        folder, content = self._opened(which)
        extra = statefile.read_tensors(folder, content["extra_tensors"])
        return [
            SavedStore(bool(s["disk"]), _restored(folder, s), list(s["steps"]), statefile.unpack(s["extra"], extra))
            for s in content["stores"]
        ]

    def rows(self, which: str | int, table: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids ascending as unsigned numbers, whole rows) of a table that was saved from memory; tables are counted
        over all stores."""
        folder, content = self._opened(which)
        declared = [t for s in content["stores"] for t in _restored(folder, s)][table]
        for part in content["rows"]:
            if table in part["tables"]:
                found = statefile.read_tensors(folder, part["file"])
                parts = {what: found[f"{table}.{what}"] for what in ("weight", "state", "meta")
                         if f"{table}.{what}" in found}  # fmt: skip
                yield found[f"{table}.ids"], records.join(declared, **parts)

    def _opened(self, which: str | int) -> tuple[Path, dict[str, Any]]:
        generation = self.find(which)
        folder = self.folder / generation.name
        return folder, self._content(folder, generation)

    def verify(self) -> Iterator[str]:
        """A line for each file of a listed generation that is not what was written; rows on disk are the tier's."""
        for generation in self.generations:
            folder = self.folder / generation.name
            try:
                content = self._content(folder, generation)
            except (CorruptStore, FormatVersion) as error:
                yield str(error)
                continue
            for entry in [content["tensors"], content["extra_tensors"], *(part["file"] for part in content["rows"])]:
                try:
                    statefile.read_checked(folder, entry)
                except CorruptStore as error:
                    yield str(error)

    def _read_manifest(self) -> list[Generation]:
        path = self.folder / MANIFEST
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return []
        manifest = _parsed(path, data)
        body = {key: value for key, value in manifest.items() if key != "check"}
        if manifest.get("check") != _check(body):
            raise CorruptStore(f"{path}: the checksum does not match")
        self.lineage = manifest["lineage"]
        return [Generation(**g) for g in manifest["generations"]]

    def _content(self, folder: Path, generation: Generation) -> dict[str, Any]:
        path = folder / "state.json"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CorruptStore(f"{path} is missing") from None
        if zlib.crc32(data) != generation.check:
            raise CorruptStore(f"{path}: the checksum does not match")
        return _parsed(path, data)


def _parts(stores: Sequence[Savable]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """(tables, their written rows) in files of about PART_BYTES: big tables are cut, small ones share a file."""
    held: list[int] = []
    part: dict[str, Tensor] = {}
    for k, (store, t) in enumerate(_places(stores)):
        if store.durable is not None:
            continue
        table = store.tables[t]
        for ids, rows in store.raw_rows(t, max(1, PART_BYTES // (8 + table.row_bytes))):
            new = {"ids": ids, **records.split(table, rows)}
            full = sum(map(_bytes, [*part.values(), *new.values()])) > PART_BYTES
            if part and (full or k in held):
                yield held, part
                held, part = [], {}
            held.append(k)
            part.update({f"{k}.{what}": tensor for what, tensor in new.items()})
    if part:
        yield held, part


def _places(stores: Sequence[Savable]) -> list[tuple[Savable, int]]:
    """Every table: its store and its index there."""
    return [(store, t) for store in stores for t in range(len(store.tables))]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise CorruptStore(f"{path} is not JSON") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CorruptStore(f"{path} is not a checkpoint of this library")
    if value.get("version", 0) > VERSION:
        raise FormatVersion(str(path), value["version"], VERSION)
    if value.get("version") != VERSION:
        raise CorruptStore(f"{path} has format version {value.get('version')}, this version reads {VERSION} only")
    return value


def _plain(notes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Notes as they will be read again (keys become strings, tuples lists), so that checksums of both agree."""
    try:
        plain = json.loads(json.dumps(notes or {}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BadConfig(f"notes = {notes!r}, must be plain JSON: {error}") from error
    if not isinstance(plain, dict):
        raise BadConfig(f"notes = {notes!r}, must be a dict")
    return plain


def _check(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _restored(folder: Path, saved: Mapping[str, Any]) -> list[TableConfig]:
    return [schema.restore(table, str(folder)) for table in saved["tables"]]


def _check_same(folder: Path, saved: Sequence[Mapping[str, Any]], stores: Sequence[Savable]) -> None:
    """Raise SchemaMismatch unless the stores have the tables that were saved, and are on disk where those were."""
    tables = [table for s in saved for table in _restored(folder, s)]
    schema.agree(tables, [t for store in stores for t in store.tables], f"tables of {folder}")
    shapes = [[(s["disk"], len(s["tables"])) for s in saved], [(s.durable is not None, len(s.tables)) for s in stores]]
    if shapes[0] != shapes[1]:
        raise SchemaMismatch(f"stores (on disk, tables) of {folder}", *shapes)
