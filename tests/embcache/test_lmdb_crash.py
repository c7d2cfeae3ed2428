"""A writer killed at any instant: what the manifest names comes back bit for bit, and the next writer goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_model import TABLES, Model, Nothing, play, unfiltered

from embcache.statefile import replace_json
from embcache.tiers import merge
from embcache.tiers.lmdb import Lmdb
from embcache.tiers.presence import NAME

TRIALS = int(os.environ.get("EMBCACHE_CRASH_TRIALS", "18"))


def _manifest(folder: Path) -> dict[str, Any]:
    """Descriptions as last committed: "latest", "before" it, and perhaps "best"."""
    path = folder / "manifest.json"
    return dict(json.loads(path.read_text())) if path.exists() else {"latest": None, "before": None}


def _numbers(told: dict[str, Any]) -> list[int]:
    return [d["generation"] for d in told.values() if d]


def _open(folder: Path) -> tuple[Lmdb, dict[str, Any]]:
    told = _manifest(folder)
    tier = Lmdb(folder, overlay_bytes=1)
    tier.open(TABLES)
    tier.restore(told["latest"], keep=[d for d in told.values() if d])
    return tier, told


def _generation(tier: Any, model: Model, number: int) -> None:
    """What generation ``number`` writes and deletes, a function of the number."""
    play(tier, model, np.random.default_rng(number), size=120)


def _train(folder: Path, ready: int, best: int) -> None:
    """Commit generation after generation, merging all the time, until killed."""
    tier, told = _open(folder)
    number = told["latest"]["generation"] if told["latest"] else 0
    kept = _numbers(told)
    tier.sealed(number, min(kept, default=0), kept)
    os.write(ready, b"x")
    while True:
        number += 1
        _generation(tier, Model(), number)
        told = {**told, "latest": tier.freeze(number), "before": told["latest"]}
        if number == best:
            told["best"] = told["latest"]
        tier.sync()
        replace_json(folder, "manifest.json", told)
        tier.sealed(number, min(_numbers(told)), _numbers(told))
        if number % 7 == 0:
            tier.compact()


def _killed_run(folder: Path, delay: float, best: int) -> None:
    """A child that trains, killed ``delay`` seconds after it has opened the store."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(readable)
            _train(folder, writable, best)
        finally:
            os._exit(1)
    os.close(writable)
    started = os.read(readable, 1)
    os.close(readable)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert started == b"x"
    assert os.WIFSIGNALED(status), "the child ended by itself"


def _damage(file: Path, chance: random.Random) -> None:
    """Nothing, or what a disk does to a file: the filter of keys may be lost at any time."""
    how = chance.randrange(4)
    if not file.exists() or how > 2:
        return
    data = bytearray(file.read_bytes())
    if how == 0:
        file.unlink()
    elif how == 1:
        file.write_bytes(data[: chance.randrange(len(data))])
    else:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)


@pytest.mark.parametrize(("child", "best"), [(False, 0), (True, 0), (False, 3)])
def test_killed_at_random_instants(tmp_path: Path, child: bool, best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``child``: merges in a process of their own; ``best``: this generation is kept, so that segments are folded."""
    monkeypatch.setattr(merge, "SMALL", 0 if child else 10**9)
    chance = random.Random(2 * child + best)
    models = {0: Model()}
    reached = 0
    for _ in range(TRIALS // 3):
        _killed_run(tmp_path, chance.uniform(0, 0.5), best)
        tier, told = _open(tmp_path)
        assert not list(tmp_path.glob(NAME + "*.tmp"))
        assert unfiltered(tier) == []
        number = told["latest"]["generation"] if told["latest"] else 0
        for g in range(reached + 1, number + 1):
            models[g] = models[g - 1].copy()
            _generation(Nothing(), models[g], g)
        models[number].check(tier, block=1000)
        for name in ("before", "best", "latest"):
            if told.get(name):
                tier.restore(told[name])
                models[told[name]["generation"]].check(tier, block=1000)
        assert list(tier.verify()) == []
        tier.close()
        _damage(tmp_path / NAME, chance)
        assert number >= reached
        reached = number
    assert reached >= TRIALS // 4
