"""Writing the base anew without gaps, while nobody reads it."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

from ..errors import NotSupported
from ..statefile import named_when_full, sync_folder
from .basefile import BaseFile

try:
    import fcntl
except ImportError:  # a system without POSIX locks has none of ours
    fcntl = None  # type: ignore[assignment]

__all__ = ["Gate", "ReaderLock", "rewrite"]


class Gate:
    """Many may be inside; ``closed`` waits until none is and lets none in."""

    def __init__(self) -> None:
        self._inside = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            while self._inside < 0:
                self._changed.wait()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        with self._changed:
            while self._inside != 0:
                self._changed.wait()
            self._inside = -1
        try:
            yield
        finally:
            with self._changed:
                self._inside = 0
                self._changed.notify_all()


class ReaderLock:
    """A reader is in the folder as long as this object lives (where the writer has made the file and locks exist)."""

    NAME = "readers"
    _held: ClassVar[WeakSet[ReaderLock]] = WeakSet()

    def __init__(self, folder: Path, alone: bool = False) -> None:
        self._descriptor, self._pid = -1, os.getpid()
        with contextlib.suppress(FileNotFoundError):
            self._descriptor = os.open(folder / self.NAME, os.O_RDONLY)
        if self.sure:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
        self._held.add(self)

    @property
    def sure(self) -> bool:
        """Whether this is a lock, and not only the wish for one."""
        return self._descriptor >= 0 and fcntl is not None

    @classmethod
    def make(cls, folder: Path) -> None:
        """The file that readers lock."""
        (folder / cls.NAME).touch()

    @classmethod
    def forked(cls) -> None:
        """This process is a fork: it reads nothing, and must not hold its parent's lock any longer than that does."""
        for lock in list(cls._held):
            lock.release()

    def release(self) -> None:
        if self._descriptor >= 0:
            if self.sure and self._pid == os.getpid():  # a process forked in this moment has the descriptor too
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ReaderLock.forked)


def rewrite(base: BaseFile, folder: Path, row_bytes: Sequence[int]) -> BaseFile:
    """The base, copied into a new file that takes the place of the old one; opened again.

    NotSupported while others read; StorageFull where there is no room for the copy: the old file stays.
    """
    if base.users > 1:
        raise NotSupported(f"{folder} cannot be compacted while this process reads it through another store")
    try:
        alone = ReaderLock(folder, alone=True)
    except BlockingIOError:
        raise NotSupported(f"{folder} cannot be compacted while another process reads it") from None
    copy = folder / "compacted"
    try:
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        with named_when_full(folder):
            base.env.copy(str(copy), compact=True)
        with (copy / "data.mdb").open("rb+") as file:
            os.fsync(file.fileno())
        base.close()
        os.replace(copy / "data.mdb", base.path)
        sync_folder(folder)
        return BaseFile.open(folder, row_bytes, create=False)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        alone.release()
