"""Stages, steps and the plain order: what runs when, what is refused, what a timeline shows."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from embcache.errors import BadConfig
from embcache.schedule.base import COMPUTE, Stage, Step, Timeline, schedule_named
from embcache.sharded.ledger import Ledger


def toy(done, parts=2):
    """A step of micro-batches that only note their keys."""
    stages = []
    for i in range(parts):
        stages += [
            Stage("rows", partial(done.append, ("rows", i)), "rows", i),
            Stage("forward", partial(done.append, ("forward", i)), COMPUTE, i, (("rows", i),)),
            Stage("backward", partial(done.append, ("backward", i)), COMPUTE, i, (("forward", i),)),
        ]
    ends = tuple(("backward", i) for i in range(parts))
    return Step(3, [*stages, Stage("update", partial(done.append, ("update", None)), "grads", after=ends)])


def test_sync_runs_the_list():
    done = []
    step = toy(done)
    schedule_named("sync").run(step, Timeline())
    assert done == [stage.key for stage in step.stages]
    assert done[:3] == [("rows", 0), ("forward", 0), ("backward", 0)]
    assert done[-1] == ("update", None)


def test_a_stage_that_raises_ends_the_step_and_its_time_counts():
    done, timeline = [], Timeline()

    def fails():
        time.sleep(0.01)
        raise ValueError("no")

    step = Step(0, [Stage("forward", fails), Stage("backward", partial(done.append, 1))])
    with pytest.raises(ValueError, match="no"):
        schedule_named("sync").run(step, timeline)
    assert not done
    assert timeline.seconds["forward"] >= 0.01
    assert "backward" not in timeline.seconds


def test_orders_that_keep_what_is_needed_are_allowed():
    step = toy([])
    ahead = [("rows", 0), ("rows", 1), ("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    step.check([*ahead, ("update", None)])
    step.check([("rows", 1), ("forward", 1), ("backward", 1), *[key for key in ahead if key[1] == 0], ("update", None)])


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([("forward", 0)], "'forward' of micro-batch 0 comes before 'rows' of micro-batch 0, which it needs"),
        ([("rows", 0), ("rows", 0)], "'rows' of micro-batch 0 comes twice"),
        ([("rows", 0)], "'forward' of micro-batch 0 is left out"),
        ([("rows", 2)], "'rows' of micro-batch 2 is none of this step"),
    ],
)
def test_other_orders_are_refused(order, words):
    with pytest.raises(BadConfig, match=words):
        toy([]).check(order)


def test_a_step_is_a_legal_order_itself():
    with pytest.raises(BadConfig, match="'a' comes before 'b', which it needs"):
        Step(0, [Stage("a", int, after=(("b", None),)), Stage("b", int)])
    with pytest.raises(BadConfig, match="'a' comes twice"):
        Step(0, [Stage("a", int), Stage("a", int)])
    with pytest.raises(BadConfig, match="lane = 'moon'"):
        Step(0, [Stage("a", int, "moon")])


def test_a_timeline_adds_seconds_and_keeps_spans_only_while_it_records():
    seconds = {"forward": 1.0}
    timeline, ledger = Timeline(seconds), Ledger(["rows", "grads"], 0, 2)
    sync = schedule_named("sync")

    def exchanges():
        begun = time.monotonic()
        time.sleep(0.005)
        ledger.done("rows", begun, [0, 40], [0, 8])

    step = Step(5, [Stage("rows", exchanges, "rows", 0), Stage("forward", partial(time.sleep, 0.005), micro=0)])
    sync.run(step, timeline)
    assert timeline.stop() == []
    timeline.record(ledger)
    sync.run(step, timeline)
    rows, inside, forward = timeline.stop()
    assert (rows.lane, rows.name, rows.step, rows.micro) == ("rows", "rows", 5, 0)
    assert (inside.lane, inside.step, inside.sent) == ("rows", None, 40)
    assert (forward.lane, forward.name) == (COMPUTE, "forward")
    assert rows.begun <= inside.begun < inside.done <= rows.done <= forward.begun < forward.done
    assert ledger.trace is None
    assert seconds["forward"] >= 1.01  # twice
    assert timeline.stop() == []


def test_stages_on_several_threads_share_a_timeline():
    timeline = Timeline()
    timeline.record()

    def work():
        for k in range(200):
            with timeline.of(k, Stage("forward", int)):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.stop()) == 800


def test_unknown_schedules_are_named():
    with pytest.raises(BadConfig, match=r"schedule = 'warp', must be one of \['sync'\]"):
        schedule_named("warp")
