"""Staging ahead: while one batch trains, a thread reads the next ones and makes their rows resident.

A batch comes out with a handle on it (``jagged.staged``), which modules use in place of staging again; the handle is
given back when the next batch is asked for. Rows change in ``step()`` only, so results are those of no look-ahead. The
idea is that of BagPipe (Agarwal et al., 2023) and of FBGEMM's prefetching, with pins that somebody owns: the loader's
end, an error, ``break``, ``close()`` and garbage collection leave neither a thread nor a pin.

>>> import torch, embcache as ec
>>> store = ec.EmbeddingStore([ec.TableConfig("user", num_embeddings=100, embedding_dim=2)])
>>> loader = [ec.KeyedJaggedTensor(["user"], torch.tensor([i, 7]), lengths=torch.tensor([2])) for i in range(3)]
>>> with LookAhead(lambda jagged, overflow: store.stage(jagged), loader, depth=2) as batches:
...     for batch in batches:
...         print(batch.values().tolist(), store.lookup(batch.staged)["user"].shape)
[0, 7] torch.Size([1, 2])
[1, 7] torch.Size([1, 2])
[2, 7] torch.Size([1, 2])
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol

from .errors import BadConfig, CacheTooSmall

__all__ = ["LookAhead"]

AUTO_DEPTH = 4
# The collector may drop an iterator while its thread waits for a lock that the collecting thread holds.
COLLECTED_WAIT = 5.0
_END = object()


class Handle(Protocol):
    """What owns the pins of a staged batch."""

    def release(self) -> None:
        """Give the pins back."""


Stage = Callable[[Any, bool], Handle]
"""(jagged batch, whether rows that find no free slot may sit beyond the cache) -> the handle of its rows."""


class LookAhead(Iterator[Any]):
    """The batches of a loader in their order, the rows of each resident and pinned until the next one is asked for.

    One thread at a time may iterate. The loader is read, and ``ids`` called, on another thread (with ``depth=0`` on the
    caller's): neither may draw from global random generators. At most ``depth + 1`` batches are pinned.

    Args:
        stage: makes the rows of one jagged batch resident. Called on another thread.
        loader: gives batches; closed at the end where its iterator has a ``close``.
        depth: batches staged beyond the one that trains; 0 works without a thread. "auto": as many as fit beside those
            still pinned, at most 4; where the next does not fit, it waits.
        ids: the jagged input, or inputs, of a batch; None: the batch itself.
        window: further batches that are read and announced, for a policy that knows what is needed later.
        announce: told the jagged inputs of each batch once, as soon as it is read, and how many batches there are to be
            staged up to it (1: it is the next).
        steady: how many batches are staged depends on how many were asked for alone: what is due is also staged where
            the end comes early. For stages in which several processes take part.

    Raises, at the batch concerned and after all earlier ones: whatever the loader, ``ids`` or ``stage`` raise;
    CacheTooSmall where a batch does not fit beside those still pinned and ``depth`` is a number.
    """

    def __init__(
        self,
        stage: Stage,
        loader: Iterable[Any],
        depth: int | Literal["auto"] = 1,
        ids: Callable[[Any], Any] | None = None,
        window: int = 0,
        announce: Callable[[Any, int], None] | None = None,
        steady: bool = False,
    ) -> None:
        waits = depth == "auto"
        depth = AUTO_DEPTH if depth == "auto" else depth
        for what, value in (("depth", depth), ("window", window)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                other = " or 'auto'" if what == "depth" else ""
                raise BadConfig(f"look-ahead: {what} = {value!r}, must be an integer >= 0{other}")
        if window and announce is None:
            raise BadConfig(f"look-ahead: window = {window}, but there is nothing to announce its batches to")
        self._loader = loader
        self._state = _State(_Source(stage, ids, window, announce), depth, waits, steady)
        self._finalizer = weakref.finalize(self, self._state.stop, COLLECTED_WAIT)

    def __iter__(self) -> LookAhead:
        return self

    def __len__(self) -> int:
        """Batches of the loader, where it knows."""
        return len(self._loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        if self._state.stopping:
            raise StopIteration
        try:
            if self._state.source.batches is None:
                self._state.start(iter(self._loader))
            item = self._state.next()
        except BaseException:
            self.close()
            raise
        if item.error is not None or item.last:
            self.close()
        if item.last:
            raise StopIteration
        if item.error is None:
            return item.batch
        try:
            raise item.error
        finally:
            del item  # the error's traceback would hold it, and it the error

    def close(self) -> None:
        """End the thread and give all pins back; iterating further gives nothing."""
        self._state.stop()
        self._finalizer.detach()

    def __enter__(self) -> LookAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Item:
    """A batch on its way: read, then staged; or the error in its place; or the end (``last``)."""

    def __init__(self, batch: Any = None, jagged: Sequence[Any] = (), error: BaseException | None = None) -> None:
        self.batch, self.jagged, self.error, self.last = batch, tuple(jagged), error, False
        self.handles: list[Handle] = []

    @classmethod
    def end(cls) -> _Item:
        """What comes after the last batch."""
        item = cls()
        item.last = True
        return item

    def stage(self, stage: Stage, overflow: bool) -> None:
        """Pin the rows of all inputs, or of none."""
        try:
            for jagged in self.jagged:
                self.handles.append(stage(jagged, overflow))
        except BaseException:
            self.release()
            raise
        for jagged, handle in zip(self.jagged, self.handles, strict=True):
            jagged.staged = handle

    def release(self) -> None:
        """Give the pins back."""
        handles, self.handles = self.handles, []
        for jagged, handle in zip(self.jagged, handles, strict=False):
            if getattr(jagged, "staged", None) is handle:
                jagged.staged = None
            handle.release()


class _Source:
    """The loader's batches with what stages them; used by one thread at a time."""

    def __init__(
        self, stage: Stage, ids: Callable[[Any], Any] | None, window: int, announce: Callable[[Any, int], None] | None
    ) -> None:
        self.stage, self._ids, self._window, self._announce = stage, ids, window, announce
        self.batches: Iterator[Any] | None = None
        self._later: deque[_Item] = deque()
        self._ended = False

    def read(self) -> _Item:
        """The next batch, not staged yet; the window behind it is announced."""
        while not self._ended and len(self._later) <= self._window:
            self._later.append(self._pull())
            if self._announce is not None:
                for jagged in self._later[-1].jagged:
                    self._announce(jagged, len(self._later))
        return self._later.popleft()

    def _pull(self) -> _Item:
        assert self.batches is not None
        try:
            batch = next(self.batches, _END)
            if batch is not _END:
                jagged = batch if self._ids is None else self._ids(batch)
                return _Item(batch, jagged if isinstance(jagged, list | tuple) else (jagged,))
            item = _Item.end()
        except StopIteration as error:
            item = _Item(error=RuntimeError(f"{self._ids} raised StopIteration, which would pass for the end: {error}"))
        except Exception as error:
            item = _Item(error=error)
        self._ended = True
        return item

    def close(self) -> None:
        """Let go of the loader: its threads, if it has any, end."""
        batches, self.batches = self.batches, iter(())
        self._later.clear()
        close = getattr(batches, "close", None)
        if close is not None:
            close()


class _State:
    """What the thread and its consumer share. It does not know the iterator, so that dropping that ends the thread.

    Handles are released outside the lock: their tier's lock may be held by a thread that waits for this one.
    """

    def __init__(self, source: _Source, depth: int, waits: bool, steady: bool) -> None:
        self.source, self._depth, self._waits, self._steady = source, depth, waits, steady
        self._asked = self._begun = 0  # batches asked for, and begun to be staged
        self.stopping = False
        self._changed = threading.Condition()
        self._ready: deque[_Item] = deque()
        self._current: _Item | None = None
        self._pinned = 0  # batches that were staged and not given back
        self._thread: threading.Thread | None = None

    # the consumer's side ------------------------------------------------------------------------------------------

    def start(self, batches: Iterator[Any]) -> None:
        """Begin to read; with a depth, on a thread."""
        self.source.batches = batches
        if self._depth:
            self._thread = threading.Thread(target=self._run, name="embcache-lookahead", daemon=True)
            self._thread.start()

    def next(self) -> _Item:
        """Give the batch before back and take the next one."""
        self._give_back()
        if self._thread is None:
            item = self.source.read()
            item.stage(self.source.stage, True)
            self._pinned += 1
        else:
            with self._changed:
                self._asked += 1
                self._changed.notify_all()
                while not self._ready and not self.stopping:
                    self._changed.wait()
                item = self._ready.popleft() if self._ready else _Item.end()
                self._changed.notify_all()
        self._current = item
        return item

    def _give_back(self) -> None:
        item, self._current = self._current, None
        if item is not None:
            item.release()
            with self._changed:
                self._pinned -= 1
                self._changed.notify_all()

    def stop(self, limit: float | None = None) -> None:
        """End the thread, waiting for it at most ``limit`` seconds, and give everything back; any thread may call."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()
        self._release_all()
        if self._thread is None:
            self.source.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(limit)

    def _release_all(self) -> None:
        with self._changed:
            left, self._current = [*self._ready, self._current], None
            self._ready.clear()
        for item in left:
            if item is not None:
                item.release()

    # the thread's side --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_until(self._has_room, self._steady):
                self._begun += 1
                item = self.source.read()
                if item.error is None and not item.last:
                    item = self._staged(item)
                self._put(item)
                if item.error is not None or item.last:
                    break
        except BaseException as error:
            self._put(_Item(error=error))
        finally:
            if self.stopping:  # the collector may have stopped it in the middle of a put
                self._release_all()
            self.source.close()

    def _has_room(self) -> bool:
        if self._steady:
            return self._begun < self._asked + self._depth
        return len(self._ready) < self._depth

    def _wait_until(self, condition: Callable[[], bool], first: bool = False) -> bool:
        """Sleep until the condition holds; False when it is time to end instead (``first``: where it does not hold)."""
        with self._changed:
            while not self.stopping and not condition():
                self._changed.wait()
            return not self.stopping or (first and condition())

    def _staged(self, item: _Item) -> _Item:
        """The item with its rows pinned, or the error in its place. Alone it may go beyond the cache, never beside
        other batches: they would be crowded out of it."""
        while True:
            beside = self._pinned
            try:
                item.stage(self.source.stage, beside == 0)
                return item
            except CacheTooSmall as error:
                if beside == 0 or not self._waits:
                    return _Item(error=error)
                if not self._wait_until(lambda before=beside: self._pinned < before):  # type: ignore[misc]
                    return _Item()
            except Exception as error:
                return _Item(error=error)

    def _put(self, item: _Item) -> None:
        with self._changed:
            stopping = self.stopping
            if not stopping:
                self._ready.append(item)
                self._pinned += 1
                self._changed.notify_all()
        if stopping:
            item.release()
