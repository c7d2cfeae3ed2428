"""The training scripts under torchrun: what one process trains, and the same bits however often ranks are killed."""

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import time

import pytest
import torchrun as tr
import yaml

from dlrm.data import SyntheticConfig, SyntheticLog
from embcache.sharded.plan import Placement, ShardingPlan

pytestmark = [pytest.mark.slow, pytest.mark.soak]
DISK = {"tiers": "ram,lmdb", "cache-rows": 60}


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """One rank compiles what many would compile at the same time."""
    place = tmp_path_factory.mktemp("compiled")
    ended = tr.torchrun(1, place / "w", out=place / "run", steps=3, limit=1200, **DISK)
    assert ended.status == 0, ended.err[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``runs(name, world, **settings)``: a run that ended well, made once; its folder is ``run`` in its own."""
    place = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(name, world, options):
        ended = tr.torchrun(world, place / name, out=place / name / "run", **dict(options))
        assert ended.status == 0, ended.err[-3000:]
        return ended

    return lambda name, world, **settings: run(name, world, tuple(settings.items()))


def result(ended):
    return json.loads((ended.folder / "run" / "result.json").read_text())


def check_exactly_once(ended, steps=30, size=100):
    """Every step of the committed history has trained its batch, and no sample came twice."""
    history = ended.history()
    assert sorted(history) == list(range(1, steps + 1))
    rows = [row for step in sorted(history) for row in history[step]]
    assert len(rows) == steps * size == len(set(rows))
    return history


@pytest.mark.parametrize("world", [2, *(pytest.param(w, marks=pytest.mark.soak) for w in (3, 4))])
def test_ranks_learn_what_one_process_learns(runs, world):
    alone, group = runs("alone", 0), runs(f"of {world}", world)
    assert check_exactly_once(alone) == check_exactly_once(group)
    for a, b in zip(alone.points(alone.folder / "run"), group.points(group.folder / "run"), strict=True):
        assert (a["step"], a.pop("kind")) == (b["step"], b.pop("kind"))
        assert b == pytest.approx(a, rel=2e-4), a["step"]
    assert group.lines == pytest.approx(alone.lines, abs=2e-4)
    assert list(group.lines) == ["loss", "auc", "ne", "logloss", "calibration"]
    assert group.out.count("\nloss ") == 1, "rank 0 alone speaks"
    assert group.err.count("step 30/30") == 2, "a point and an evaluation"
    report = (group.folder / "run" / "report.html").read_text()
    for words in ("Exchange between ranks", f"rank {world - 1}", "grads", "rows touched"):
        assert words in report
    assert yaml.safe_load((group.folder / "run" / "config.yaml").read_text())["wire"] is None


def test_another_number_of_ranks_goes_on(runs, tmp_path):
    """Three ranks stop at step 20; one rank tests these weights, two train them to the end."""
    out, reference = tmp_path / "run", runs("of 3", 3)
    first = tr.torchrun(3, tmp_path / "a", out=out, steps=20, test_weights="last")
    assert first.status == 0, first.err[-3000:]
    tested = json.loads((out / "result.json").read_text())["test"]
    again = tr.torchrun(1, tmp_path / "b", out=out, steps=20, resume=True, test_weights="last")
    assert again.status == 0, again.err[-3000:]
    assert json.loads((out / "result.json").read_text())["test"] == pytest.approx(tested, rel=1e-6)
    assert json.loads((out / "result.json").read_text())["test"]["auc"] == pytest.approx(tested["auc"], abs=1e-9)
    assert "from 3 to 1 ranks" in again.err
    last = tr.torchrun(2, tmp_path / "c", out=out, resume=True)
    assert last.status == 0, last.err[-3000:]
    assert "resumed at step 20" in last.err
    assert last.lines == pytest.approx(reference.lines, abs=2e-4)


def test_a_resumed_run_ends_in_the_same_bits(runs, tmp_path):
    first = tr.torchrun(2, tmp_path / "a", out=tmp_path / "run", steps=10)
    assert first.status == 0, first.err[-3000:]
    refused = tr.torchrun(2, tmp_path / "b", out=tmp_path / "run", restarts=1)
    assert refused.status == 1
    assert "already holds a run" in refused.err
    second = tr.torchrun(2, tmp_path / "c", out=tmp_path / "run", resume=True)
    assert second.status == 0, second.err[-3000:]
    assert second.bits() == runs("of 2", 2).bits()


@pytest.mark.soak
def test_cache_disk_and_look_ahead_change_no_bit(runs):
    disk = runs("disk", 2, **DISK)
    assert disk.bits() == runs("of 2", 2).bits()
    assert "rows touched" in disk.out


@pytest.mark.parametrize("kill", [0, *(pytest.param(k, marks=pytest.mark.soak) for k in (1, 2))])
def test_a_rank_that_is_killed_costs_nothing(runs, kill, tmp_path):
    """Any rank, at any instant of any step, with rows in memory or on disk."""
    rng = random.Random(kill)
    world, settings, reference = [(2, {}, "of 2"), (2, DISK, "of 2"), (3, {}, "of 3")][kill]
    harm = f"0 {rng.randrange(world)} {rng.randrange(11, 30)} {rng.random() * 0.03} kill"
    ended = tr.torchrun(world, tmp_path / "w", out=tmp_path / "run", restarts=2, harm=harm, delays=kill, **settings)
    assert ended.status == 0, f"{harm}\n{ended.err[-3000:]}"
    assert max(attempt for attempt, _ in ended.audit()) == 1, "nothing was killed"
    assert ended.bits() == runs(reference, world).bits(), harm
    assert check_exactly_once(ended) == runs(reference, world).history()
    points = [ended.points(tmp_path / "run"), runs(reference, world).points(runs(reference, world).folder / "run")]
    kept = [[{k: p[k] for k in ("step", "loss", "auc") if k in p} for p in each] for each in points]
    assert kept[0] == kept[1]


@pytest.mark.soak
def test_a_log_with_a_plan_and_a_wire_whose_disk_is_lost(tmp_path):
    """Rank 0 reads the log; each kind of placement; then everything but the copies is gone."""
    log, plan, out = tmp_path / "log.tsv", tmp_path / "plan.yaml", tmp_path / "run"
    SyntheticLog(SyntheticConfig(rows=3000, tables=(40, 30, 20, 10, 5) * 5 + (3,), spread=2.5)).write(log)
    kinds = [Placement("table_wise", (1,)), Placement("data_parallel"), Placement("row_wise", traffic="pooled")]
    kinds += [Placement("column_wise", (0, 1)), Placement("row_wise")]
    ShardingPlan(2, {f"C{i}": kinds[i % len(kinds)] for i in range(1, 27)}).save(plan)
    flags = {"script": "train_criteo", "data": log, "plan": plan, "wire": "bf16", "dim": 4, "bottom-mlp": "8,4",
             "top-mlp": 8, "global-batch-size": 100, "threads": 1, "micro-batches": 2, "dropout": 0.1, "eval-every": 8,
             "checkpoint-dir": tmp_path / "copies", "ids": "vocab:1", "test-weights": "last"}  # fmt: skip
    whole = tr.torchrun(2, tmp_path / "a", out=out, steps=16, **flags)
    assert whole.status == 0, whole.err[-3000:]
    assert whole.err.count("preprocessing: write") == 1
    assert whole.lines["auc"] > 0.5
    first = tr.torchrun(2, tmp_path / "b", out=tmp_path / "half", steps=8, columns=out / "columns",
                        **flags | {"checkpoint-dir": tmp_path / "others"})  # fmt: skip
    assert first.status == 0, first.err[-3000:]
    shutil.rmtree(tmp_path / "half" / "checkpoints")
    rest = tr.torchrun(2, tmp_path / "c", out=tmp_path / "half", steps=16, columns=out / "columns", resume=True,
                       **flags | {"checkpoint-dir": tmp_path / "others"})  # fmt: skip
    assert rest.status == 0, rest.err[-3000:]
    assert "resumed at step 8" in rest.err
    assert rest.bits() == whole.bits()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("id", "table 'C1', feature 'C1': values[0] = 1073741824, valid range [0, 300)"),
        ("nan", "the loss is nan; no weight has changed"),
    ],
)
def test_what_is_wrong_on_one_rank_ends_all_with_its_name(tmp_path, what, words):
    ended = tr.torchrun(2, tmp_path / "w", out=tmp_path / "run", harm=f"0 1 7 0 {what}", steps=10)
    assert ended.status == 1
    assert f"error: rank 1: {'IdOutOfRange' if what == 'id' else 'NonFiniteLoss'}" in ended.err
    assert words in ended.err
    assert max(step for _, step in ended.audit()) == 6


@pytest.mark.soak
def test_a_rank_that_hangs_is_noticed(tmp_path):
    process = tr.start(2, tmp_path / "w", out=tmp_path / "run", harm="0 1 27 0 stop")
    try:
        for line in process.stderr:
            if line.startswith("error: rank 1 died or hangs"):
                assert time.time() - (tmp_path / "w" / "harmed").stat().st_mtime < 30
                break
        else:
            raise AssertionError("nobody noticed")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        for pid in (tmp_path / "w").glob("pid-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)
        process.communicate()
