"""A training step as named stages on named lanes, and the order in which a schedule runs them.

What a step consists of, and which of it needs which, is told in stages, listed in the plain order: ids, rows, forward
and backward of one micro-batch after the other, then the updates. ``sync`` runs just that list, each stage begun when
the one before has ended. It is the oracle: every other schedule runs the same stages in an order in which each still
comes after what it needs, and must end in the same bits.

>>> from functools import partial
>>> done = []
>>> step = Step(7, [Stage("forward", partial(done.append, "f"), micro=0),
...                 Stage("backward", partial(done.append, "b"), micro=0, after=(("forward", 0),))])
>>> timeline = Timeline()
>>> schedule_named("sync").run(step, timeline)
>>> done, list(timeline.seconds)
(['f', 'b'], ['forward', 'backward'])
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from embcache.errors import BadConfig
from embcache.sharded.lanes import NAMES

__all__ = ["COMPUTE", "SCHEDULES", "Key", "Schedule", "Span", "Stage", "Step", "Sync", "Timeline", "schedule_named"]

COMPUTE = "compute"
LANES = (COMPUTE, *NAMES)
Key = tuple[str, int | None]
"""A stage's name and micro-batch (None: of the whole step)."""


@dataclass(frozen=True)
class Stage:
    """A part of a step.

    Attributes:
        name: what people read; with ``micro`` it is the stage's key, once in a step.
        run: does it.
        lane: what it occupies: the processor, or the road between ranks that it waits for.
        micro: number of the micro-batch, None of the whole step.
        after: keys of the stages that it needs.
    """

    name: str
    run: Callable[[], Any]
    lane: str = COMPUTE
    micro: int | None = None
    after: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        return self.name, self.micro


class Step:
    """The stages of one step in the plain order, which is checked: each key once, what a stage needs before it."""

    def __init__(self, number: int, stages: Sequence[Stage]) -> None:
        self.number, self.stages = number, list(stages)
        self._of = {stage.key: stage for stage in self.stages}
        for stage in self.stages:
            if stage.lane not in LANES:
                raise BadConfig(f"stage {_words(stage.key)}: lane = {stage.lane!r}, must be one of {list(LANES)}")
        self.check([stage.key for stage in self.stages])

    def __getitem__(self, key: Key) -> Stage:
        return self._of[key]

    def check(self, order: Sequence[Key]) -> None:
        """Refuse an order that leaves a stage out, runs it twice, or runs it before one that it needs."""
        done: set[Key] = set()
        for key in order:
            if key in done or key not in self._of:
                raise BadConfig(f"stage {_words(key)} {'comes twice' if key in done else 'is none of this step'}")
            missing = [need for need in self._of[key].after if need not in done]
            if missing:
                raise BadConfig(f"stage {_words(key)} comes before {_words(missing[0])}, which it needs")
            done.add(key)
        left = [key for key in self._of if key not in done]
        if left or len(order) < len(self.stages):
            raise BadConfig(f"stage {_words(left[0] if left else order[-1])} is left out")


def _words(key: Key) -> str:
    name, micro = key
    return repr(name) if micro is None else f"{name!r} of micro-batch {micro}"


class Span(NamedTuple):
    """Something that took time; on the clock of ``time.monotonic``.

    An operation of a lane has no step and micro-batch, but bytes that it sent.
    """

    lane: str
    begun: float
    done: float
    name: str
    step: int | None = None
    micro: int | None = None
    sent: int = 0


class Timeline:
    """Seconds of the stages by name; while it is ``recording``, also when each began and ended, and so every operation
    of the lanes of the ledgers it was given.

    Args:
        seconds: the dictionary that takes the sums.
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds = {} if seconds is None else seconds
        self._spans: list[Span] | None = None
        self._ledgers: list[Any] = []
        self._lock = threading.Lock()

    @contextmanager
    def of(self, step: int, stage: Stage) -> Iterator[None]:
        """Around a stage, on whatever thread; one that raises counts as well."""
        begun = time.monotonic()
        try:
            yield
        finally:
            done = time.monotonic()
            with self._lock:
                self.seconds[stage.name] = self.seconds.get(stage.name, 0.0) + done - begun
                if self._spans is not None:
                    self._spans.append(Span(stage.lane, begun, done, stage.name, step, stage.micro))

    def record(self, *ledgers: Any) -> None:
        """Keep spans from now on."""
        self._spans, self._ledgers = [], list(ledgers)
        for ledger in ledgers:
            ledger.trace = []

    def stop(self) -> list[Span]:
        """End the recording; what was recorded, by the time at which it began."""
        spans, self._spans = self._spans or [], None
        for ledger in self._ledgers:
            trace, ledger.trace = ledger.trace or [], None
            spans += [Span(lane, begun, done, lane, sent=sent) for lane, begun, done, sent in trace]
        self._ledgers = []
        return sorted(spans, key=lambda span: (span.begun, span.done))


class Schedule(Protocol):
    """Runs steps. What it leaves running when ``run`` returns, ``drain`` ends: before a checkpoint, an evaluation, and
    at the end."""

    name: str

    def run(self, step: Step, timeline: Timeline) -> None: ...
    def drain(self) -> None: ...


class Sync:
    """One stage after the other, in the order of the list; nothing is left when a step ends."""

    name = "sync"

    def run(self, step: Step, timeline: Timeline) -> None:
        """Run a step; the first stage that raises ends it."""
        for stage in step.stages:
            with timeline.of(step.number, stage):
                stage.run()

    def drain(self) -> None:
        """Nothing waits."""


SCHEDULES: dict[str, Callable[[], Schedule]] = {"sync": Sync}


def schedule_named(name: str) -> Schedule:
    """A new schedule of that name."""
    if name not in SCHEDULES:
        raise BadConfig(f"schedule = {name!r}, must be one of {sorted(SCHEDULES)}")
    return SCHEDULES[name]()
