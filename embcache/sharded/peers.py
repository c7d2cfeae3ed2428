"""What the ranks of a group say to each other beside training: bytes to all, blocks to each, and what went wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from .agree import agree, together

__all__ = ["Peers"]

T = TypeVar("T")
_FIRST_BEAT, _BEAT = 0.002, 0.5  # seconds between two signs of life


class Peers:
    """All methods are collective, in the same order on every rank, one thread at a time.

    Args:
        lanes: of the group; words go over lane ``commit``, which nothing else uses, so that a commit in the background
            needs no place in the order of training's exchanges; blocks over lane ``rows``.
    """

    def __init__(self, lanes: Any) -> None:
        self.rank, self.world = int(lanes.rank), int(lanes.world)
        self._words, self._blocks = lanes["commit"], lanes.rows

    def gather(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, by rank."""
        if self.world == 1:
            return [data]
        return [part.numpy().tobytes() for part in self._words.all_gather(data)]

    def told(self, value: Any, root: int = 0) -> Any:
        """The root's plain value, on every rank."""
        if self.world == 1:
            return value
        data = json.dumps(value).encode() if self.rank == root else b""
        return json.loads(self._words.broadcast(data, root).numpy().tobytes())

    def all_told(self, value: Any) -> list[Any]:
        """Everybody's plain value, by rank."""
        return [json.loads(data) for data in self.gather(json.dumps(value).encode())]

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """The root's bytes, on every rank."""
        if self.world == 1:
            return data
        return self._blocks.broadcast(data if self.rank == root else b"", root).numpy().tobytes()

    def exchange(self, send: Sequence[np.ndarray]) -> list[np.ndarray]:
        """uint8 arrays, one for each rank; those that came, by rank. The own one comes without travelling."""
        if self.world == 1:
            return list(send)
        away = [np.zeros(0, np.uint8) if rank == self.rank else part for rank, part in enumerate(send)]
        sizes = self._blocks.header(np.array([[len(part)] for part in away], np.int64))[:, 0]
        came = self._blocks.all_to_all(away, sizes).numpy()
        ends = np.cumsum(sizes)
        parts = [came[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        parts[self.rank] = send[self.rank]
        return parts

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank where one has an error: its own there, the first of the others' elsewhere."""
        agree(self._words, error)

    def together(self, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank; what goes wrong on one is raised by all."""
        return together(self._words, work)

    def patiently(self, work: Callable[[], T]) -> T:
        """``together`` for what may take long: a rank that waits hears from the others meanwhile, so a group's timeout
        counts from the last sign of life. ``work`` runs on a thread of its own."""
        if self.world == 1:
            return work()
        found: list[Any] = [None, None]
        ended = threading.Event()

        def run() -> None:
            try:
                found[0] = work()
            except Exception as error:
                found[1] = error
            finally:
                ended.set()

        threading.Thread(target=run, name="embcache-work", daemon=True).start()
        beat = _FIRST_BEAT
        while True:
            mine = ended.wait(beat)
            if self._words.header(np.full((self.world, 1), int(mine)))[:, 0].all():
                break
            beat = min(2 * beat, _BEAT)
        self.agree(found[1])
        return found[0]
