"""Ranks killed at every point of a commit and of a move: all come back at one generation, bit for bit."""

from __future__ import annotations

import os
import signal

import pytest
import ranks
from sharding import expected, gathered, one_store, open_group, rows, tables, train, warm

from embcache import checkpoint, statefile
from embcache.sharded import reshard
from embcache.sharded.checkpoint import GroupCheckpoints
from embcache.sharded.manifest import GroupManifest
from embcache.store import EmbeddingStore

pytestmark = pytest.mark.soak  # minutes each


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    warm(tmp_path_factory.mktemp("warm"))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, turn=1):
    """Kill this process when a function is called for the ``turn``-th time."""
    original, calls = getattr(owner, name), [0]

    def wrapped(*arguments, **options):
        calls[0] += 1
        if calls[0] == turn:
            die()
        return original(*arguments, **options)

    setattr(owner, name, wrapped)


def after(owner, name, turn=1):
    """Kill this process when a function has returned for the ``turn``-th time."""
    original, calls = getattr(owner, name), [0]

    def wrapped(*arguments, **options):
        result = original(*arguments, **options)
        calls[0] += 1
        if calls[0] == turn:
            die()
        return result

    setattr(owner, name, wrapped)


def no_manifest():
    """Between the manifest's bytes and its rename."""
    original = statefile.write_file

    def write_file(folder, name, data):
        entry = original(folder, name, data)
        if name == "manifest.json.tmp" and b"embcache-group" in data:
            die()
        return entry

    statefile.write_file = write_file


COMMIT = {  # what kills a rank in a commit -> whether the commit exists
    "before its own save": (lambda: before(checkpoint.Checkpoints, "save"), False),
    "before its rows are on the disk": (lambda: before(checkpoint.Checkpoints, "_commit"), False),
    "after its own save": (lambda: after(checkpoint.Checkpoints, "_commit"), False),
    "before all have said so": (lambda: before(GroupCheckpoints, "_commit"), False),
    "before the manifest": (lambda: before(GroupManifest, "write"), False),
    "with the manifest not yet renamed": (no_manifest, False),
    "after the manifest": (lambda: after(GroupManifest, "write"), True),
    "after everybody has learned": (lambda: before(GroupCheckpoints, "_sweep"), True),
}
MOVE = {  # in the middle of a move; the generation is the same before and after it
    "before it": lambda: before(reshard, "readers_of"),
    "once its own part is read": lambda: after(checkpoint.Checkpoints, "load"),
    "in it": lambda: before(reshard, "move", 2),
    "before it forgets": lambda: before(EmbeddingStore, "delete"),
    "before the steps": lambda: after(reshard, "move", 3),
    "before its own save": lambda: before(checkpoint.Checkpoints, "save"),
    "after its own save": lambda: after(checkpoint.Checkpoints, "_commit"),
    "before the manifest": lambda: before(GroupManifest, "write"),
    "after the manifest": lambda: after(GroupManifest, "write"),
}


def run(rank, at, tier, kinds, kill=None, victims=(), move=False, train_steps=2, wait=True):
    """Load, note the rows, train, and commit; ``kill``: the point at which ``victims`` end."""
    saved, store = open_group(rank, at, kinds, tier)
    points = MOVE if move else {name: point[0] for name, point in COMMIT.items()}
    if kill is not None and rank.rank in victims and move:
        points[kill]()
    step = 0
    if saved.latest is not None:
        step = saved.load([store])["step"]
    found = rows(store)
    if kill is not None and rank.rank in victims and not move:
        points[kill]()
    train(store, range(step + 1, step + train_steps + 1), rank.rank)
    saved.save({"step": step + train_steps}, [store], notes={"step": step + train_steps}, wait=wait)
    saved.wait()
    result = step, found, store.plan, saved.latest.number
    store.close()
    return result


def check(got, step):
    assert [g[0] for g in got] == [step] * len(got)
    made = got[0][2]
    assert gathered([g[1] for g in got], made, tables()) == expected(one_store(step), made)


def killed(world, victims, **arguments):
    """A run in which the victims die; the others end by themselves, soon."""
    group = ranks.start(world, run, victims=victims, **arguments)
    outcomes = group.wait(40.0)
    for outcome in outcomes:
        if outcome.rank in victims:
            assert outcome.signal == signal.SIGKILL, outcome
        else:
            assert outcome.error is not None, (outcome, outcome.printed)
            assert outcome.error[0] == "RankFailed"


@pytest.mark.parametrize("tier", ["cache", pytest.param("ram", marks=pytest.mark.soak)])
def test_a_commit_is_on_all_ranks_or_on_none(tmp_path, tier):
    """One folder lives through a kill at every point, of every rank in turn; what the manifest says is there."""
    step = 0
    assert ranks.run(2, run, at=tmp_path, tier=tier, kinds="rrd")[0][0] == step
    step = 2
    for k, (point, (_, exists)) in enumerate(COMMIT.items()):
        victims = (0,) if "manifest" in point else ((1,), (0,), (0, 1))[k % 3]
        killed(2, victims, at=tmp_path, tier=tier, kinds="rrd", kill=point, wait=bool(k % 2))
        step += 2 * exists
        check(ranks.run(2, run, at=tmp_path, tier=tier, kinds="rrd"), step)
        step += 2


@pytest.mark.parametrize("tier", ["cache", pytest.param("ram", marks=pytest.mark.soak)])
def test_a_move_is_whole_or_has_not_been(tmp_path, tier):
    """From two ranks to three and another plan, killed at every point and tried again by three, two or four."""
    ranks.run(2, run, at=tmp_path, tier=tier, kinds="rrd")
    step, world = 2, 2
    for k, point in enumerate(MOVE):
        other = 3 if world == 2 else 2
        kinds = ("rrd", "trr", "rdt")[k % 3]
        victims = (0,) if "manifest" in point else (k % other,)
        killed(other, victims, at=tmp_path, tier=tier, kinds=kinds, kill=point, move=True)
        if k % 3 == 2:  # back to those who held it
            other, kinds = world, ("rrd", "trr", "rdt")[(k - 1) % 3]
        check(ranks.run(other, run, at=tmp_path, tier=tier, kinds=kinds), step)
        step, world = step + 2, other
