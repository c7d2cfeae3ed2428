"""The DLRM of bench_train.py with its tables in a cache over LMDB, beside the same with all rows in memory.

Both see the same fresh batches: a few that repeat would all fit into the cache. The cached one trains through
``store.lookahead`` and commits every so many steps in the background; the time of a round is whole, commits and the
work they leave included. Its rows lie in LMDB before the measurement begins, as after long training.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _bench import Worker, format_table, measure, noise, ratio
from _cache_work import PowerLaw, Split, anonymous_bytes, disk_bytes

_state: dict[str, Any] = {}


# ---------------------------------------------------------------------------------------------------- worker's side


class Model:
    """DLRM, its optimizers, and a stream of batches that is drawn before each round."""

    def __init__(self, work: dict[str, Any], path: str | None) -> None:
        import torch

        import embcache as ec
        from dlrm.models import build as build_model

        torch.manual_seed(work["seed"])
        if work["threads"]:
            torch.set_num_threads(work["threads"])
        self.torch, self.ec, self.work, self.path = torch, ec, work, path
        self.features = [f"f{i}" for i in range(work["tables"])]
        rule = ec.optim.RowWiseAdagrad(lr=0.01)
        tables = [
            ec.TableConfig(f"t{i}", work["rows"], work["dim"], features=[f], optimizer=rule)
            for i, f in enumerate(self.features)
        ]
        self.cache = max(1, int(work["cache"] * work["rows"]))
        self.tables = tables
        sizes = {"bottom_mlp": work["bottom"], "top_mlp": work["top"]}
        self.model = build_model("dlrm", tables, work["n_dense"], tiers=self.tiers(), **sizes)
        self.store = next(m.store for m in self.model.modules() if hasattr(m, "store"))
        self.dense_optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, fused=True)
        self.sparse_optimizer = ec.optim.SparseOptimizer(self.model)
        self.criterion = torch.nn.BCEWithLogitsLoss()
        self.law = PowerLaw(work["rows"], work["alpha"])
        self.drawn: list[tuple[Any, Any, Any]] = []
        self.steps = self.commits = 0
        self.stalls: list[float] = []
        self.losses: list[float] = []

    def tiers(self) -> list[Any]:
        if self.path is None:
            return [self.ec.tiers.Ram()]
        return [
            self.ec.tiers.Ram(rows=self.cache, policy=self.work["policy"]),
            self.ec.tiers.Lmdb(self.path),
        ]

    def populate(self, block: int = 100_000) -> float:
        """Every row into LMDB, with the initial values it has anyway; seconds."""
        start = time.perf_counter()
        for name in self.store.names:
            for first in range(0, self.work["rows"], block):
                ids = self.torch.arange(first, min(self.work["rows"], first + block))
                self.store.load_rows(name, ids, *self.store.read_rows(name, ids))
        self.store.commit()
        self.store.durable.merge()
        return time.perf_counter() - start

    def draw(self, first: int, steps: int) -> None:
        """The batches of the next steps, a function of the step."""
        batch, torch = self.work["batch"], self.torch
        for step in range(first, first + steps):
            rng = np.random.default_rng([self.work["seed"], step])
            self.drawn.append(
                (
                    torch.from_numpy(rng.standard_normal((batch, self.work["n_dense"]), dtype=np.float32)),
                    torch.from_numpy(self.law.draw(rng, batch * self.work["tables"])),
                    torch.from_numpy((rng.random(batch) < 0.25).astype(np.float32)),
                )
            )

    def batches(self) -> Iterator[tuple[Any, Any, Any]]:
        while self.drawn:
            dense, ids, labels = self.drawn.pop(0)
            lengths = self.torch.ones(ids.numel(), dtype=self.torch.int32)
            yield dense, self.ec.KeyedJaggedTensor.from_lengths_sync(self.features, ids, lengths), labels

    def train(self) -> float:
        """Through everything drawn; seconds."""
        start = time.perf_counter()
        source: Any = self.batches()
        if self.path is not None:
            source = self.store.lookahead(source, depth=self.work["depth"], ids=lambda batch: batch[1])
        for dense, sparse, labels in source:
            loss = self.criterion(self.model(dense, sparse), labels)
            self.dense_optimizer.zero_grad()
            self.sparse_optimizer.zero_grad()
            loss.backward()
            self.dense_optimizer.step()
            self.sparse_optimizer.step()
            self.losses.append(float(loss.detach()))
            self.steps += 1
            if self.path is not None and self.steps % self.work["commit_every"] == 0:
                before = time.perf_counter()
                self.store.commit({"step": self.steps}, wait=False)
                self.stalls.append(time.perf_counter() - before)
        return time.perf_counter() - start


def build(work: dict[str, Any], path: str | None) -> dict[str, Any]:
    """Makes and warms up one contestant."""
    start = time.perf_counter()
    model = _state["model"] = Model(work, path)
    built = time.perf_counter() - start
    populated = model.populate() if path is not None else 0.0
    model.draw(0, work["warm"])
    model.train()
    model.losses.clear()
    model.stalls.clear()
    if path is not None:
        _state["split"], _state["below"] = Split(model.store), dict(model.store.durable.stats())
    return {"built_s": built, "populate_s": populated}


def run(first: int, steps: int) -> list[float]:
    """Mean seconds of a step over a round: commits are part of it."""
    model: Model = _state["model"]
    model.draw(first, steps)
    return [model.train() / steps]


def finish() -> dict[str, Any]:
    """Losses; and of the cached one: split, commit, reopening, sizes."""
    model: Model = _state["model"]
    result: dict[str, Any] = {"losses": list(model.losses), "anonymous_mb": anonymous_bytes() / 1e6}
    if model.path is None:
        return result
    steps = len(model.losses)
    result["split"] = _state["split"].end(steps)
    now, below = model.store.durable.stats(), _state["below"]
    result["disk"] = {key: now[key] - below.get(key, 0) for key in now if isinstance(now[key], int | float)}
    result["stalls_ms"] = [seconds * 1e3 for seconds in model.stalls]
    result |= _commit(model)
    start = time.perf_counter()
    model.store.close()
    result["close_s"] = time.perf_counter() - start
    result["disk_mb"] = disk_bytes(Path(model.path)) / 1e6
    tables, tiers = model.tables, model.tiers()
    ec = model.ec
    _state.clear()
    del model
    gc.collect()
    start = time.perf_counter()
    store = ec.EmbeddingStore(tables, tiers)
    result["reopen_s"] = time.perf_counter() - start
    store.close()
    return result


def _commit(model: Model) -> dict[str, Any]:
    """A commit after as many steps as lie between two, beside a plain copy of as many rows from random places."""
    model.store.commit({"step": -1})
    model.draw(10**6, model.work["commit_every"] - 1)
    held, model.work["commit_every"] = model.work["commit_every"], 1 << 60
    model.train()
    model.work["commit_every"] = held
    before = model.store.durable.stats()["rows_written"]
    start = time.perf_counter()
    model.store.commit({"step": -2}, wait=False)
    stall = time.perf_counter() - start
    model.store.checkpoints.wait()
    whole = time.perf_counter() - start
    rows = int(model.store.durable.stats()["rows_written"] - before)
    row_bytes = model.tables[0].row_bytes
    source = np.ones((max(rows, model.cache), row_bytes), np.uint8)
    at = np.sort(np.random.default_rng(0).choice(len(source), rows, replace=False))
    copies = []
    for _ in range(3):  # into new memory, as a copy that is kept needs it
        start = time.perf_counter()
        source[at]
        copies.append(time.perf_counter() - start)
    return {
        "commit": {
            "dirty_rows": rows,
            "dirty_mb": rows * row_bytes / 1e6,
            "stall_ms": stall * 1e3,
            "copy_ms": statistics.median(copies) * 1e3,
            "durable_ms": whole * 1e3,
            "threads": threading.active_count(),
        }
    }


# ---------------------------------------------------------------------------------------------------- parent's side


def compare(script: str, work: dict[str, Any]) -> dict[str, Any]:
    """Both models, their losses compared; a table and the numbers."""
    path = str(Path(work["folder"]) / "dlrm")
    if work["apart"]:
        seconds, built, plain, end = _apart(script, work, path)
        alone = statistics.median(seconds["ram"])
        ratios = sorted(value / alone for value in seconds["cached"])
        slowdown = [statistics.median(ratios), *np.quantile(ratios, [0.75, 0.25]).tolist()]
    else:
        seconds, built, plain, end = _in_turn(script, work, path)
        slowdown = [1 / value for value in ratio(seconds["cached"], seconds["ram"])]
    losses = plain.pop("losses")
    if losses != end.pop("losses")[: len(losses)]:
        raise RuntimeError("the losses of the cached and the plain model differ")
    records = {
        "ms": {name: statistics.median(values) * 1e3 for name, values in seconds.items()},
        "noise": {name: noise(values) for name, values in seconds.items()},
        "slowdown": slowdown[0],
        "slowdown_quartiles": slowdown[:0:-1],
        "rounds_ms": {name: [v * 1e3 for v in values] for name, values in seconds.items()},
        **built,
        **end,
        "ram_anonymous_mb": plain["anonymous_mb"],
    }
    return {"table": _table(work, records), "records": records}


Rounds = tuple[dict[str, list[float]], dict[str, Any], dict[str, Any], dict[str, Any]]


def _contestant(worker: Worker, work: dict[str, Any]) -> Any:
    def go(round_: int) -> list[float]:
        first = work["warm"] + round_ * work["dlrm_steps"]
        return list(worker.call("run", first=first, steps=work["dlrm_steps"]))

    return go


def _in_turn(script: str, work: dict[str, Any], path: str) -> Rounds:
    """Round by round, both in memory at once."""
    with Worker(script) as ram, Worker(script) as cached:
        ram.call("build", work=work, path=None)
        built = cached.call("build", work=work, path=path)
        both = {"ram": _contestant(ram, work), "cached": _contestant(cached, work)}
        seconds = measure(both, work["dlrm_rounds"])
        return seconds, built, ram.call("finish"), cached.call("finish")


def _apart(script: str, work: dict[str, Any], path: str) -> Rounds:
    """Half of the rounds in memory, all rounds cached, the other half in memory: each contestant has the machine's
    memory, and its page cache, for itself."""
    half = max(1, work["dlrm_rounds"] // 2)
    ram: list[float] = []
    plain: dict[str, Any] = {}
    for part in range(2):
        with Worker(script) as worker:
            worker.call("build", work=work, path=None)
            for k in range(half):
                ram += _contestant(worker, work)(k)
            plain = worker.call("finish")
        if part == 0:
            with Worker(script) as worker:
                built = worker.call("build", work=work, path=path)
                cached = [s for k in range(2 * half) for s in _contestant(worker, work)(k)]
                end = worker.call("finish")
    return {"ram": ram, "cached": cached}, built, plain, end


def _table(work: dict[str, Any], r: dict[str, Any]) -> str:
    split, commit = r["split"], r["commit"]
    quartiles = "-".join(f"{v:.2f}" for v in r["slowdown_quartiles"])
    lines = [
        ["all in memory, ms a step", f"{r['ms']['ram']:.1f}"],
        [f"cache of {work['cache']:.0%} over LMDB, ms a step", f"{r['ms']['cached']:.1f}"],
        [f"slowdown (quartiles {quartiles})", f"{r['slowdown']:.2f}x"],
        ["hits of unique ids", f"{split['hit_rate']:.1%}"],
        *([f"{what} a step", f"{split[f'{what}_per_step']:,.0f}"] for what in ("misses", "evictions", "written_back")),
        *([f"stage {name}, ms a step (beside the training)", f"{ms:.2f}"] for name, ms in split["split_ms"].items()),
        ["commit while training, median stall ms", f"{statistics.median(r['stalls_ms'] or [0]):.1f}"],
        [f"commit of {commit['dirty_rows']:,} dirty rows: stall, ms", f"{commit['stall_ms']:.1f}"],
        ["  a plain copy of those rows, ms", f"{commit['copy_ms']:.1f}"],
        ["  durable after, ms", f"{commit['durable_ms']:.1f}"],
        ["close, s", f"{r['close_s']:.2f}"],
        ["reopen, s", f"{r['reopen_s']:.2f}"],
        ["anonymous memory, MB: all in memory, cached", f"{r['ram_anonymous_mb']:,.0f}, {r['anonymous_mb']:,.0f}"],
        ["on disk, MB", f"{r['disk_mb']:,.0f}"],
    ]  # fmt: skip
    title = f"DLRM {work['tables']} x {work['rows']:,} x {work['dim']}, batch {work['batch']}"
    return format_table([title, ""], lines)
