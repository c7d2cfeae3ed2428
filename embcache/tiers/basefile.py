"""The base: rows of merged generations in one LMDB environment, read without holding the interpreter.

A process opens an environment once, however many tiers look at it. A snapshot is a read transaction; the kernels of
``kernels/btree.py`` then walk the pages it keeps alive, in a map of our own. Where the file's layout is not the one
they know (big-endian or 32-bit machines), rows are read through py-lmdb.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np

from ..errors import BadConfig, CorruptStore, ForkError, FormatVersion, SchemaMismatch, StorageFull
from ..kernels import btree, parts
from . import merge_rows
from .mapping import Mapping

try:
    import lmdb
except ImportError:  # the `cpu` extra
    lmdb = None  # type: ignore[assignment]

__all__ = ["FORKED", "READERS", "BaseFile", "Snapshot", "full"]

FORMAT, VERSION = b"embcache-rows", 1
READERS = 512
FORKED = "open it by its path, with readonly=True, in a process that is started anew (multiprocessing: spawn)"
_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_META = struct.Struct("<16xIIQQ")  # of a meta page: magic, version, address, map size
_DB = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_NONE = 2**64 - 1
_FEW = 32  # keys this many leaves apart share no path worth remembering
_SMALLEST_MAP, _LARGEST_MAP = 1 << 30, 16 << 40
_KNOWN = sys.byteorder == "little" and sys.maxsize > 2**32


class BaseFile:
    """An open environment. ``walking``: rows are read by the kernels."""

    _opened: ClassVar[WeakValueDictionary[tuple[int, str], BaseFile]] = WeakValueDictionary()
    _opening: ClassVar[threading.Lock] = threading.Lock()
    _inherited: ClassVar[set[str]] = set()  # open in the process that this one was forked from

    @classmethod
    def open(cls, folder: Path, row_bytes: Sequence[int], create: bool) -> BaseFile:
        """The environment in ``folder``, made if ``create``. CorruptStore and FormatVersion before anything is
        written; BadConfig where the address space is limited too much."""
        if lmdb is None:
            raise ImportError("tiers.Lmdb needs LMDB: pip install 'embcache[cpu]'")
        with cls._opening:
            key = (os.getpid(), str(folder.resolve()))
            if key[1] in cls._inherited:
                # a forked process cannot even close what it got: that would end the parent's read transactions
                raise ForkError(f"{folder} is open in the process that this one was forked from: {FORKED}")
            there = cls._opened.get(key)
            if there is None or there.closed:
                there = cls._opened[key] = cls(folder, row_bytes, create)
            there.users += 1
            return there

    @classmethod
    def forked(cls) -> None:
        """This process is a fork: it has no environment open, and cannot open those of its parent."""
        cls._inherited.update(path for (_, path), base in cls._opened.items() if not base.closed)
        cls._opened, cls._opening = WeakValueDictionary(), threading.Lock()

    def __init__(self, folder: Path, row_bytes: Sequence[int], create: bool) -> None:
        self.path, self.row_bytes = folder / "data.mdb", list(row_bytes)
        self.users, self.closed = 0, False
        self._mapping: Mapping | None = None
        self._lock = threading.Lock()
        fresh = not self.path.exists() or self.path.stat().st_size == 0
        if fresh and not create:
            raise CorruptStore(f"{self.path} is missing")
        if not fresh:
            _check_file(self.path)
        self.map_size = _map_size(0 if fresh else self.path.stat().st_size)
        self.env = self._open_env(folder, create)
        self.env.reader_check()
        self.descriptor = os.open(self.path, os.O_RDONLY)
        head = os.pread(self.descriptor, 4096, 0)
        self.page_size = struct.unpack_from("<I", head, 40)[0]
        self.walking = _KNOWN and _META.unpack_from(head)[:2] == (_MAGIC, _DATA_VERSION)
        try:
            self._check_format(fresh, create)
        except BaseException:
            self._close()
            raise

    def _open_env(self, folder: Path, create: bool) -> Any:
        writable = os.access(folder, os.W_OK) and (create or os.access(self.path, os.W_OK))
        while True:
            try:
                return lmdb.open(
                    str(folder),
                    map_size=self.map_size,
                    max_dbs=len(self.row_bytes) + 8,
                    max_readers=READERS,
                    max_spare_txns=0,  # a spare one would be given up by a forked process, in our name
                    lib_version=0,
                    metasync=False,
                    readahead=False,
                    create=create,
                    readonly=not writable,
                )
            except lmdb.MemoryError:
                if self.map_size <= _SMALLEST_MAP:
                    raise BadConfig(f"{self.path}: no address space for a map of {self.map_size:,} bytes") from None
                self.map_size //= 2
            except lmdb.Error as error:
                raise CorruptStore(f"{self.path}: {error}") from error

    def _check_format(self, fresh: bool, create: bool) -> None:
        """Ours, of this version and with these tables; a new file gets its databases."""
        shape = ",".join(map(str, self.row_bytes)).encode()
        try:
            if fresh:
                self.meta, self.tables = merge_rows.open_tables(self.env, len(self.row_bytes))
                with self.env.begin(write=True) as txn:
                    txn.put(b"format", b"%s %d" % (FORMAT, VERSION), db=self.meta)
                    txn.put(b"tables", shape, db=self.meta)
                return
            with self.env.begin() as txn:
                if not txn.get(merge_rows.META):
                    raise CorruptStore(f"{self.path} is not a store of rows of this library")
            self.meta = self.env.open_db(merge_rows.META, create=False)
            with self.env.begin() as txn:
                name, _, version = (txn.get(b"format", db=self.meta) or b"").partition(b" ")
                if name != FORMAT or not version.isdigit():
                    raise CorruptStore(f"{self.path} is not a store of rows of this library")
                if int(version) > VERSION:
                    raise FormatVersion(str(self.path), int(version), VERSION)
                found = txn.get(b"tables", db=self.meta)
            if found != shape:
                raise SchemaMismatch(
                    f"bytes of a row of each table in {self.path}", (found or b"").decode(), shape.decode()
                )
            names = [b"rows-%d" % t for t in range(len(self.row_bytes))]
            self.tables = [self.env.open_db(n, integerkey=True, create=False) for n in names]
        except lmdb.Error as error:
            if merge_rows.is_full(error, self.path):
                raise full(self.path) from error
            raise CorruptStore(f"{self.path}: {error}") from error

    def claim(self) -> int:
        """Take the base over from any writer before: merges of theirs end. The number that ours must carry."""
        with self.writing() as txn:
            owner = merge_rows.number(txn.get(merge_rows.OWNER, db=self.meta)) + 1
            txn.put(merge_rows.OWNER, b"%d" % owner, db=self.meta)
        return owner

    @contextlib.contextmanager
    def owned(self, owner: int) -> Iterator[bool]:
        """Whether the base is still that owner's, with claims and merges of others locked out meanwhile."""
        txn = self.env.begin(write=True)
        try:
            yield merge_rows.number(txn.get(merge_rows.OWNER, db=self.meta)) == owner
        finally:
            txn.abort()

    @contextlib.contextmanager
    def writing(self) -> Iterator[Any]:
        """A write transaction; StorageFull where there is no room."""
        try:
            with self.env.begin(write=True) as txn:
                yield txn
        except lmdb.Error as error:
            if not merge_rows.is_full(error, self.path):
                raise
            raise full(self.path) from error

    def snapshot(self) -> Snapshot:
        """The rows as they are now; close it soon, because the file grows while it is held."""
        return Snapshot(self)

    def map(self) -> Mapping:
        """A map that covers the file as it is now."""
        with self._lock:
            size = os.fstat(self.descriptor).st_size
            if self._mapping is None or self._mapping.length < size:
                self._mapping = Mapping(self.descriptor, max(2 * size, 1 << 26), random=True)
            return self._mapping

    @property
    def pages(self) -> int:
        """Whole pages that the file has."""
        return os.fstat(self.descriptor).st_size // self.page_size

    def close(self) -> None:
        """One user less; the last one closes the file."""
        with self._opening:
            self.users -= 1
            if self.users == 0 and not self.closed:
                self._close()

    def _close(self) -> None:
        self.closed = True
        self.env.close()
        os.close(self.descriptor)
        self._mapping = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BaseFile.forked)


class Snapshot:
    """A read transaction: ``seal`` and ``merged`` of the base, and rows by key. For any thread until it is closed."""

    def __init__(self, base: BaseFile) -> None:
        self._base = base
        self._txn = base.env.begin()
        self._lock = threading.Lock()
        self.map = base.map()  # the transaction began before: every page of it is in the file
        self._pages = min(base.pages, self.map.length // base.page_size)
        self._roots: dict[int, tuple[int, int, int]] = {}

    @property
    def seal(self) -> int:
        """The generation up to which rows may have been merged."""
        return merge_rows.number(self._txn.get(merge_rows.SEAL, db=self._base.meta))

    @property
    def merged(self) -> int:
        """The generation up to which every row has been merged."""
        return merge_rows.number(self._txn.get(merge_rows.MERGED, db=self._base.meta))

    @property
    def transaction(self) -> int:
        """The number of the base's state; it grows with each transaction, until the base is compacted."""
        return int(self._txn.id())

    def _root(self, table: int) -> tuple[int, int, int]:
        """(page number of a table's root, -1: empty; leaf pages; rows)."""
        known = self._roots.get(table)
        if known is None:
            _, _, _, _, leaves, _, entries, root = _DB.unpack(self._txn.get(b"rows-%d" % table))
            if root != _NONE and root >= self._pages:
                raise self._broken(table, btree.BROKEN)
            known = self._roots[table] = (-1 if root == _NONE else root, leaves, entries)
        return known

    def count(self, table: int) -> int:
        """Rows of a table."""
        if not self._base.walking:
            return int(self._txn.stat(self._base.tables[table])["entries"])
        return self._root(table)[2]

    def fill(
        self, table: int, keys: np.ndarray, state: np.ndarray, out: np.ndarray | None, asked: int | None = None
    ) -> int:
        """Copy the rows of keys whose state is 0 to ``out`` and set their state to MEMBER; how many there are.
        ``out`` None: only the states; ``asked``: how many have state 0, where that is known. CorruptStore where the
        file is not what LMDB writes."""
        if not self._base.walking:
            return self._fill_slowly(table, keys, state, out)
        root, number, _ = self._root(table)
        if root < 0:
            return 0
        row_bytes, target = self._base.row_bytes[table], 0 if out is None else out.ctypes.data
        address, size = self.map.address, self._base.page_size
        if _FEW * (len(keys) if asked is None else asked) < number:
            line = np.zeros((1, parts.FIELDS), np.int64)
            line[0, : parts.FIRST] = len(keys), keys.ctypes.data, 0, target, row_bytes
            line[0, parts.ROOT] = root
            found = btree.fetch(line, state, address, size, self._pages)
        else:
            leaves = np.empty(len(keys), np.int64)
            found = btree.locate(keys, state, address, size, self._pages, root, leaves)
            if found == 0:
                found = btree.pull(keys, state, leaves, address, size, self._pages, row_bytes, target)
        if found < 0:
            raise self._broken(table, int(found))
        return int(found)

    def fetch(self, lines: np.ndarray, tables: Sequence[int], state: np.ndarray) -> int:
        """``fill`` for the parts of one call (``kernels/parts.py``), straight into slots; where ``walking``."""
        lines[:, parts.ROOT] = [self._root(t)[0] for t in tables]
        found = btree.fetch(lines, state, self.map.address, self._base.page_size, self._pages)
        if found < 0:
            raise self._broken(tables[0], int(found))
        return int(found)

    def walk(self, table: int, first: int, keys: np.ndarray, out: np.ndarray | None) -> int:
        """The next ``len(keys)`` rows from key ``first`` (as an unsigned number) on; how many there were."""
        if not self._base.walking:
            return self._walk_slowly(table, first, keys, out)
        root, _, _ = self._root(table)
        if root < 0:
            return 0
        signed = first - 2**64 if first >= 2**63 else first
        target = 0 if out is None else out.ctypes.data
        found = btree.walk(
            signed,
            keys,
            self.map.address,
            self._base.page_size,
            self._pages,
            root,
            self._base.row_bytes[table],
            target,
        )
        if found < 0:
            raise self._broken(table, int(found))
        return int(found)

    def _fill_slowly(self, table: int, keys: np.ndarray, state: np.ndarray, out: np.ndarray | None) -> int:
        found, db = 0, self._base.tables[table]
        with self._lock:
            for i in np.flatnonzero(state == 0):
                value = self._txn.get(keys[i].tobytes(), db=db)
                if value is None:
                    continue
                if out is not None:
                    out[i] = np.frombuffer(value, np.uint8)
                state[i] = btree.MEMBER
                found += 1
        return found

    def _walk_slowly(self, table: int, first: int, keys: np.ndarray, out: np.ndarray | None) -> int:
        n = 0
        with self._lock, self._txn.cursor(self._base.tables[table]) as cursor:
            more = cursor.set_range(first.to_bytes(8, sys.byteorder))
            while more and n < len(keys):
                keys[n] = np.frombuffer(cursor.key(), np.int64)[0]
                if out is not None:
                    out[n] = np.frombuffer(cursor.value(), np.uint8)
                n, more = n + 1, cursor.next()
        return n

    def _broken(self, table: int, code: int) -> CorruptStore:
        what = "rows of another size" if code == btree.WRONG_SIZE else "pages that LMDB does not write"
        return CorruptStore(f"{self._base.path}: table {table} has {what}")

    def close(self) -> None:
        """End the transaction."""
        self._txn.abort()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def full(path: Path) -> StorageFull:
    """The error for a disk (or a map) without room for more."""
    return StorageFull(None, shutil.disk_usage(path.parent).free, str(path))


def _check_file(path: Path) -> None:
    """CorruptStore or FormatVersion unless LMDB 0.9 wrote this file and all of it is there."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
        size = os.fstat(file.fileno()).st_size
    if len(head) < 8192:
        raise CorruptStore(f"{path} has {size} bytes, too few for a store of rows")
    magic, version, _, _ = _META.unpack_from(head)
    if magic != _MAGIC:
        raise CorruptStore(f"{path} is not an LMDB file")
    if version > _DATA_VERSION:
        raise FormatVersion(str(path), version, _DATA_VERSION)
    page_size = struct.unpack_from("<I", head, 40)[0]
    if page_size not in (4096, 8192, 16384, 32768) or len(head) < 2 * page_size:
        raise CorruptStore(f"{path} has pages of {page_size} bytes")
    metas = [struct.unpack_from("<QQ", head, at + 136) for at in (0, page_size)]  # last page, transaction
    newest = page_size * max((0, 1), key=lambda i: metas[i][1])
    roots = [_DB.unpack_from(head, newest + at)[7] for at in (40, 88)]
    if any(root != _NONE and (root + 1) * page_size > size for root in roots):
        raise CorruptStore(f"{path} is truncated: {size} bytes, at least {(max(roots) + 1) * page_size} were written")
    last = struct.unpack_from("<Q", head, newest + 136)[0]
    # pages taken and given back in one transaction are never written, so a few may be missing at the end
    if (last + 1) * page_size > size + max(size // 8, 64 * page_size):
        raise CorruptStore(f"{path} is truncated: {size} bytes, {(last + 1) * page_size} were in use")


def _map_size(used: int) -> int:
    """16 TiB of address space, or half of what the process may still take."""
    with contextlib.suppress(ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            free = limit - _address_space()
            size = free // 2 // (1 << 20) * (1 << 20)
            if size < max(_SMALLEST_MAP, 2 * used):
                raise BadConfig(
                    f"the limit on address space (RLIMIT_AS, ulimit -v) is {limit:,} bytes, {free:,} are left: "
                    f"a disk store needs {2 * max(_SMALLEST_MAP, 2 * used):,} or more; it occupies no memory"
                )
            return min(size, _LARGEST_MAP)
    return _LARGEST_MAP


def _address_space() -> int:
    """Bytes of address space in use, 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
