"""What people see of a run while it goes: progress, the curves on disk, TensorBoard. None of it steers the run."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from embcache.errors import NotSupported
from embcache.train.task import Progress

__all__ = ["Console", "History", "Observer", "Stopwatch", "TensorBoard"]


class Observer(Protocol):
    """Told of the run's events; ``point`` holds ``step``, ``kind`` and numbers."""

    def begin(self, progress: Progress, total_steps: int) -> None: ...
    def step(self, progress: Progress) -> None: ...
    def point(self, point: Mapping[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...
    def end(self) -> None: ...


class History:
    """The curves of a run as ``history.jsonl``, a line a point; a resumed run cuts it back to where it starts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def begin(self, progress: Progress, total_steps: int) -> None:
        kept = [point for point in read_history(self._path) if point["step"] <= progress.step]
        shorter = self._path.with_name(self._path.name + ".tmp")
        shorter.write_text("".join(map(_line, kept)), encoding="utf-8")
        os.replace(shorter, self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def step(self, progress: Progress) -> None:
        return

    def point(self, point: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(_line(point))
            self._file.flush()

    def message(self, text: str) -> None:
        return

    def end(self) -> None:
        if self._file is not None:
            self._file.close()


def _line(point: Mapping[str, Any]) -> str:
    finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in point.items()}
    return json.dumps(finite) + "\n"


def read_history(path: Path) -> list[dict[str, Any]]:
    """The points written so far; a last line that a crash cut short is left out."""
    if not path.exists():
        return []
    points = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            point = json.loads(line)
        except ValueError:
            continue
        if isinstance(point, dict) and {"step", "kind"} <= point.keys():
            points.append({k: math.nan if v is None else v for k, v in point.items()})
    return points


class Console:
    """A progress bar on a terminal, a line for each point elsewhere; with samples/s, loss and the last metrics."""

    def __init__(self, stream: TextIO | None = None, headline: tuple[str, ...] = ("auc", "ne")) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._headline = headline
        self._bar: tqdm[Any] | None = None
        self._shown: dict[str, str] = {}
        self._total = 0

    def begin(self, progress: Progress, total_steps: int) -> None:
        self._total = total_steps
        if self._live:
            self._bar = tqdm(
                total=total_steps, initial=progress.step, unit="step", file=self._stream, dynamic_ncols=True
            )

    def step(self, progress: Progress) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def point(self, point: Mapping[str, Any]) -> None:
        if point["kind"] == "train":
            self._shown["samples/s"] = f"{point['samples_per_second']:,.0f}"
            self._shown["loss"] = f"{point['loss']:.4f}"
        else:
            self._shown.update({k: f"{point[k]:.4f}" for k in self._headline if k in point})
        if self._bar is not None:
            self._bar.set_postfix(self._shown)
        if self._bar is None or point["kind"] == "eval":
            shown = "  ".join(f"{name} {value}" for name, value in self._shown.items())
            what = "  (evaluated)" if point["kind"] == "eval" else ""
            self.message(f"step {point['step']}/{self._total}  {shown}{what}")

    def message(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()


class TensorBoard:
    """TensorBoard scalars: ``train/loss``, ``eval/auc``, …"""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self, progress: Progress, total_steps: int) -> None:
        # Imported here: it takes a second, and only runs that want it pay.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise NotSupported("TensorBoard is not installed: pip install tensorboard, or --no-tensorboard") from error

        self._writer = SummaryWriter(str(self._folder), purge_step=progress.step + 1)

    def step(self, progress: Progress) -> None:
        return

    def point(self, point: Mapping[str, Any]) -> None:
        for name, value in point.items():
            if name not in ("step", "kind"):
                self._writer.add_scalar(f"{point['kind']}/{name}", value, point["step"])

    def message(self, text: str) -> None:
        return

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Stopwatch:
    """Seconds by stage.

    >>> watch = Stopwatch()
    >>> with watch("forward"):
    ...     pass
    >>> list(watch.seconds)
    ['forward']
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds = {} if seconds is None else seconds

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
