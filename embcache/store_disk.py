"""A store whose last tier outlives the process: generations, reopening, closing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from . import schema
from .cache import Front
from .cache.saving import Saving
from .checkpoint import Checkpoints
from .config import TableConfig
from .errors import CorruptStore, NotSupported
from .store_rows import CLOSED, StoreRows
from .tiers.base import DurableTier


class StoreDisk(StoreRows):
    """Commit and recovery; for stores in memory these raise NotSupported, ``ec.checkpoint.Checkpoints`` saves them."""

    tables: list[TableConfig]
    steps: list[int]
    front: Front
    recovered_from: int | None
    """The generation that was found on disk when the store was opened, None where there was none."""
    _generation: int
    _lineage: str
    _copied: int  # version of the rows when the last commit, or restore, copied them
    _saved: int  # version of the rows in the last committed generation
    _checkpoints: Checkpoints | None

    def _open_disk(self) -> None:
        """Take the folder and read the last generation in it."""
        self.recovered_from, self._generation, self._checkpoints = None, 0, None
        self._lineage, self._copied, self._saved = secrets.token_hex(8), self.version, self.version
        durable = self.front.durable
        if durable is None:
            return
        self._checkpoints = Checkpoints(durable.folder)
        if durable.readonly:
            self.refresh()
            return
        self._checkpoints.claim()
        durable.on_merged = self._merged
        if self._checkpoints.latest is None:
            durable.restore(None)
            return
        self._checkpoints.load([self], disk_only=True)
        self.recovered_from = self._generation

    def refresh(self) -> int:
        """Of a store opened read-only: go on to the newest committed generation; returns its number."""
        if not self.front.durable or not self.front.durable.readonly:
            raise NotSupported("refresh() is for stores that were opened with readonly=True")
        folder = self.front.durable.folder
        while True:
            self._checkpoints = seen = Checkpoints(folder)
            if seen.latest is None:
                raise FileNotFoundError(f"{folder} holds no committed generation")
            try:
                seen.load([self], disk_only=True)
                return self._generation
            except CorruptStore:  # the writer has removed files of this generation meanwhile, or it is true
                if Checkpoints(folder).generations == seen.generations:
                    raise

    @property
    def durable(self) -> DurableTier | None:
        """The last tier, where it outlives the process."""
        return self.front.durable

    @property
    def checkpoints(self) -> Checkpoints:
        """The generations in the store's folder."""
        self.require_usable()
        if self._checkpoints is None:
            raise NotSupported("this store lives in memory: save it with ec.checkpoint.Checkpoints(folder)")
        return self._checkpoints

    @property
    def generation(self) -> int:
        """The generation last committed to disk, or restored from it; 0 before the first."""
        return self._generation

    def commit(
        self,
        state: Any = None,
        notes: dict[str, Any] | None = None,
        *,
        keep: Literal["best"] | None = None,
        wait: bool = True,
    ) -> int:
        """Commit the rows as they are after the last step, and ``state``, as a new generation; returns its number.

        ``state``: nested plain values and tensors that belong to the same moment (dense weights, optimizer, position).
        ``keep="best"``: keep this generation, readable, until a better one is committed. ``wait=False`` returns once
        the dirty rows are copied; another thread makes them durable, and the next commit (or ``close``) raises what
        went wrong there. Gradients that wait for the step raise; StorageFull leaves the last generation readable and
        the cache intact, and the same call may be tried again.
        """
        self.require_writable("commit")
        return self.checkpoints.save(state, [self], notes=notes, best=keep == "best", wait=wait).number

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def restore(self, which: Literal["latest", "best"] | int = "latest") -> Any:
        """Go back to a generation; returns the ``state`` it was committed with. Rows committed later stay on disk until
        the next commit."""
        return self.checkpoints.load([self], which, disk_only=True)

    def flush(self) -> None:
        """Write every dirty row to the tier below; nothing is committed by it."""
        self.require_writable("flush")
        self.front.flush()

    def begin_save(self, number: int, wait: bool) -> Saving:
        """The rows as they are now become generation ``number``; see ``Front.begin_save``."""
        self.require_writable("commit")
        saving = self.front.begin_save(number, wait)
        self._copied = self.version
        return saving

    @property
    def lineage(self) -> str:
        """Hex digits that tell this store's generations from those of any other."""
        return self._lineage if self._checkpoints is None else self._checkpoints.lineage

    @property
    def unsaved(self) -> bool:
        """Whether rows have changed since the generation that ``generation`` names."""
        return self.version != self._saved

    def begin_restore(self, description: Mapping[str, Any] | None, keep: Sequence[dict[str, Any]] = ()) -> None:
        """Every row reads as a tier's description says, or (None: a store in memory) as its initial value; ``keep``: of
        other generations that may be asked for."""
        self.discard()
        if self.front.durable is not None:
            self.front.forget()
            self.front.durable.restore(None if description is None else dict(description), keep)
        else:
            for t in range(len(self.tables)):
                self.front.reset(t)
        self.version += 1
        self._copied = self.version

    def extra_state(self) -> dict[str, Tensor]:
        """What admission and expiry remember besides rows."""
        return self.front.extra_state()

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore what ``extra_state`` gave."""
        self.front.load_extra_state(state)

    def committed(self, number: int) -> None:
        """A generation with these rows exists."""
        self._generation, self._saved = number, self._copied

    def _merged(self) -> None:
        durable = self.front.durable
        if durable is not None and self._checkpoints is not None:
            self._checkpoints.rewrite(durable.trimmed)

    def _go_back_to(self, state: Mapping[str, Any]) -> None:
        folder, number = Path(str(state.get("path", ""))), state.get("generation")
        mine = self.checkpoints.folder
        if not isinstance(number, int) or folder.resolve() != mine.resolve():
            raise FileNotFoundError(f"the state is of generation {number!r} in {folder}, this store lives in {mine}")
        if number != self._generation:
            self.restore(number)

    def close(self) -> None:
        """Wait for a commit in the background and give back memory, files and the folder's lock; rows that were not
        committed are gone. The store cannot be used afterwards; closing it again does nothing. In a forked process only
        that process lets go of it."""
        try:
            if self._checkpoints is not None and self._pid == os.getpid():
                self._checkpoints.wait()
        finally:
            if self._pid == os.getpid():
                self.front.settle()
            self.front.close()
            self._checkpoints, self._pid = None, CLOSED


def check_folder(tables: Sequence[TableConfig], tiers: Sequence[Any]) -> None:
    """Raise SchemaMismatch where the last tier is a folder whose generations have other tables."""
    folder = getattr(tiers[-1], "folder", None) if tiers else None
    if folder is not None:
        saved = Checkpoints(folder)
        if saved.latest is not None:
            schema.agree(saved.tables(), tables, f"tables of {folder}")


def tables_of(folder: str | Path) -> Sequence[TableConfig]:
    """The tables of the last generation in a store's folder."""
    return Checkpoints(folder).tables()
