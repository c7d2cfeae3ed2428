"""Rewriting runs of segments that cannot be merged yet, because an older generation is kept (a best one, say).

Between two generations that may be asked for, only the newest version of a row counts. ``fold`` writes these to one
segment, and a file beside it says which segments it replaces, so that descriptions which name those stay good.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptStore
from ..kernels import segments
from ..statefile import replace_json
from .merge_rows import newest
from .overlay import Overlay
from .segment import Segment

__all__ = ["Folds", "fold", "runs"]

_CHUNK = 32 << 20  # bytes of rows copied at a time
SUFFIX = ".folded"
_IN_ORDER = np.empty(0, np.int32)


def runs(chain: Sequence[Segment], kept: Sequence[int]) -> list[list[Segment]]:
    """Neighbours in a chain that no kept generation separates, where at least half of the bytes would go."""
    ends = sorted(kept)
    groups: dict[int, list[Segment]] = {}
    for segment in chain:
        if segment.synced and 0 < segment.generation <= ends[-1]:
            groups.setdefault(next(e for e in ends if segment.generation <= e), []).append(segment)
    # the largest member is what an earlier fold left: it is rewritten only when as much has come since
    return [g for g in groups.values() if len(g) > 1 and sum(s.size for s in g) >= 2 * max(s.size for s in g)]


def fold(overlay: Overlay, run: list[Segment]) -> list[Path]:
    """Replace a run in its overlay by one segment; the files that are needed no more."""
    keys = np.concatenate([s.keys()[0] for s in run])
    starts = np.cumsum([0, *(s.records for s in run[:-1])]).astype(np.int64)
    addresses = np.array([s.first for s in run], np.int64)
    chosen = newest(keys.view(np.uint64))
    new = overlay.new_segment(run[0].start, len(chosen))
    try:
        step = max(1, _CHUNK // overlay.row_bytes)
        for i in range(0, len(chosen), step):
            part = chosen[i : i + step]
            rows, state = np.empty((len(part), overlay.row_bytes), np.uint8), np.empty(len(part), np.uint8)
            segments.gather(
                part.astype(np.int32), starts, addresses, overlay.row_bytes, rows.ctypes.data, _IN_ORDER, state
            )
            for live in (True, False):
                mine = (state == 1) == live
                if mine.any():
                    some = np.ascontiguousarray(rows[mine]) if live else None
                    new.count(int(mine.sum()), new.append(keys[part[mine]], some))
        new.generation = run[-1].generation
        new.sync()
        told = {"segment": new.describe(), "replaces": [s.path.name for s in run]}
        replace_json(new.path.parent, new.path.stem + SUFFIX, told)
    except BaseException:
        new.close()
        new.path.unlink(missing_ok=True)
        raise
    overlay.exchange(run, new)
    return [s.path for s in run]


class Folds:
    """What the files in a folder say about segments that replace others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told: dict[str, tuple[dict[str, Any], frozenset[str]]] = {}
        for path in folder.glob("*" + SUFFIX):
            try:
                told = json.loads(path.read_text())
                self._told[path.name] = dict(told["segment"]), frozenset(map(str, told["replaces"]))
            except FileNotFoundError:
                continue  # merged in between
            except (ValueError, KeyError, TypeError):
                raise CorruptStore(f"{path} does not describe a segment") from None

    def resolve(self, described: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The segments that hold now what the described ones held, in the same order."""
        out, again = list(described), bool(self._told)
        while again:
            again = False
            names = {s["file"] for s in out}
            for segment, replaced in self._told.values():
                if replaced <= names:
                    at = next(i for i, s in enumerate(out) if s["file"] in replaced)
                    out = [s for s in out[:at] if s["file"] not in replaced] + [segment] + out[at:]
                    out = [s for s in out if s["file"] not in replaced]
                    again = True
                    break
        return out

    def sweep(self, named: set[str]) -> None:
        """Remove what says nothing about the named segments."""
        live = set(named)
        for _ in self._told:  # folds of folds
            live |= {n for segment, replaced in self._told.values() if segment["file"] in live for n in replaced}
        for name, (segment, _) in self._told.items():
            if segment["file"] not in live:
                (self.folder / name).unlink(missing_ok=True)
