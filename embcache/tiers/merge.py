"""Merging beside training: on a thread of its own, which leaves large merges to a child process.

While py-lmdb writes, it holds the interpreter; a child costs a start of about a fifth of a second instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import StorageFull
from . import merge_rows
from .basefile import READERS, BaseFile, full
from .changes import Changes
from .fold import SUFFIX, fold, runs
from .overlay import Overlay
from .presence import Presence
from .segment import Segment
from .spares import Spares

__all__ = ["MergeFailed", "Merger", "run_merge"]

SMALL = 20_000  # records; starting a process costs as much as merging so many
_NICE = 5  # training goes first
_MANY_FILES = 1024


class MergeFailed(RuntimeError):
    """The merging process ended without an answer; nothing is lost, and the merge can be tried again."""


def run_merge(base: BaseFile, job: dict[str, Any], child: bool | None = None) -> dict[str, int]:
    """Merge the segments of a job; what ``merge_rows.merge`` counts. ``child``: None decides by the size.

    Raises: StorageFull, MergeFailed; what is merged in part is valid, and merging again finishes it.
    """
    if child is None:
        child = sum(int(s["records"]) for s in job["segments"]) > SMALL
    if not child:
        try:
            return merge_rows.merge(base.env, job)
        except merge_rows.Fenced:
            raise MergeFailed("another process owns the store") from None
        except (merge_rows.lmdb.Error, OSError) as error:
            raise _typed(base, str(error), merge_rows.is_full(error, base.path)) from error
    job = {**job, "parent": os.getpid(), "map_size": base.map_size, "max_readers": READERS, "nice": _NICE}
    # a file of its own, so that the child imports neither the library nor torch (-P: nor anything beside that file)
    command = [sys.executable, "-P", str(merge_rows.__file__)]
    # the system kills the child when the *thread* that started it ends: this call waits for it, so the thread lives
    done = subprocess.run(command, input=json.dumps(job) + "\n", capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MergeFailed(f"the merging process ended with status {done.returncode}: {last}") from None
    if answer.get("fenced"):
        raise MergeFailed("another process owns the store")
    if "error" in answer:
        raise _typed(base, answer["error"], answer["full"])
    return dict(answer)


def _typed(base: BaseFile, message: str, no_room: bool) -> Exception:
    return full(base.path) if no_room else MergeFailed(message)


@dataclass
class Merger:
    """Decides when rows move from the overlays to the base, and moves them.

    ``horizon``: the oldest generation that may be asked for; ``merged``: the one that the base holds whole.
    ``base_used``: the base may hold rows. ``state`` guards these and the overlays' chains of segments. At most one
    merge runs; its thread ends with it.
    """

    folder: Path
    base: BaseFile
    overlays: list[Overlay]
    owner: int
    limit: int  # bytes of index
    changes: Changes
    spares: Spares
    on_merged: Callable[[], None]
    count: Callable[..., None]
    state: threading.RLock = field(default_factory=threading.RLock)
    horizon: int = 0
    kept: tuple[int, ...] = ()  # every generation that may be asked for, where that is known
    merged: int = 0
    base_used: bool = False
    failure: Exception | None = None
    _running: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.presence = Presence(self.folder)

    def target(self) -> int:
        """The newest generation that has rows to merge and may be merged."""
        chain = [s.generation for o in self.overlays for s in list(o.segments)]
        return max((g for g in chain if 0 < g <= self.horizon), default=0)

    def due(self) -> bool:
        """Whether the overlays have grown so much that a merge should begin."""
        if self._running is not None:
            return False
        index = sum(o.index_bytes for o in self.overlays if o.segments)
        data = sum(o.bytes for o in self.overlays)
        large = data > 32 * self.limit or sum(len(o.segments) for o in self.overlays) > _MANY_FILES
        if self.target() > self.merged:
            return large or index > self.limit
        return large and any(self._runs())

    def _runs(self) -> list[tuple[Overlay, list[Segment]]]:
        """Runs of segments that are worth folding."""
        if not self.kept:
            return []
        return [(o, run) for o in self.overlays for run in runs(list(o.segments), self.kept)]

    def start(self, wait: bool) -> None:
        """Merge what may be merged; with ``wait`` a failure is raised."""
        with self.state:
            if self._running is None and (self.target() > self.merged or any(self._runs())):
                self.failure, self.base_used = None, True
                self._running = threading.Thread(target=self._run, name="embcache-merge", daemon=True)
                self._running.start()
        if wait:
            self.wait()
            if self.failure is not None:
                raise self.failure

    def wait(self) -> None:
        """Until no merge runs."""
        running = self._running
        if running is not None and running is not threading.current_thread():
            running.join()

    def _run(self) -> None:
        try:
            self._merge()
        except Exception as error:  # nothing is lost: the segments stay, and the next commit tries again
            self.failure = error
            if isinstance(error, StorageFull):
                self.spares.relieve()
            self.count(merges_failed=1)
        finally:
            self._running = None

    def _merge(self) -> None:
        began = time.perf_counter()
        with self.state:
            target = self.target()
            if target <= self.merged:
                self._fold()
                return
            chain = [s for o in self.overlays for s in o.segments if 0 < s.generation <= target]
            job = {
                "folder": str(self.folder.resolve()),
                "row_bytes": self.base.row_bytes,
                "owner": self.owner,
                "merged": self.merged,
                "target": target,
                "segments": [s.describe() for s in chain],
            }
        if not self.presence.prepare(self.base, self.owner, chain, target):
            raise MergeFailed("another process owns the store")
        done = run_merge(self.base, job)
        with self.state:
            self.merged = target
            gone = [s for overlay in self.overlays for s in overlay.forget(target)]
        self.count(
            merges=1,
            rows_merged=done["rows"],
            bytes_merged=done["bytes"],
            bytes_written_base=done.get("written", 0),
            seconds_merge=time.perf_counter() - began,
        )
        try:
            self.on_merged()
        finally:
            self.spares.give(gone)
            for segment in gone:
                segment.path.with_suffix(SUFFIX).unlink(missing_ok=True)
            self.changes.trim()

    def renew_presence(self) -> None:
        """A new filter of the base's keys, unless a merge runs, which needs the one that is there."""
        with self.state:
            if self._running is None:
                self.presence.renew(self.base, self.owner)

    def _fold(self) -> None:
        """An old generation keeps rows from being merged: versions that no kept generation needs go."""
        for overlay, run in self._runs():
            for path in fold(overlay, run):
                path.unlink(missing_ok=True)
            self.count(folds=1)
        self.on_merged()
