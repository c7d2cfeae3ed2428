"""Sections of bench_cache.py with batches: training steps (W1, W3, W4), lookups (W2), hit rates (W5).

W1 and W2 follow NVIDIA's benchmarks of HierarchicalKV and HugeCTR's parameter server, W3 those of CachedEmbedding and
BagPipe (Criteo-Kaggle's table sizes), reduced to two cores.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _bench import format_table, measure, noise, ratio, time_steps
from _cache_work import STAGES, PowerLaw, Split, chain, disk_bytes, drop_pages, folder, jagged, written_bytes

KAGGLE = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
]  # fmt: skip
RULES = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "rowwise": "RowWiseAdagrad"}


class Training:
    """A collection over some tiers that trains through given batches, look-ahead included, one step a call."""

    def __init__(self, tables: list[Any], tiers: list[Any], batches: Iterator[Any], width: int, **ahead: Any) -> None:
        import torch

        import embcache as ec

        self.model = ec.EmbeddingBagCollection(tables, tiers=tiers)
        self.store = self.model.store
        self.optimizer = ec.optim.SparseOptimizer(self.model)
        self.batches = self.store.lookahead(batches, **ahead) if ahead else batches
        self.grads: list[Any] = []
        self.checks: list[float] = []
        self.width, self.torch = width, torch

    def step(self, i: int) -> None:
        batch = next(self.batches)
        out = self.model(batch).values()
        if not self.grads:
            seeds = [self.torch.Generator().manual_seed(k) for k in range(2)]
            self.grads = [self.torch.randn(out.shape, generator=seed) * 0.01 for seed in seeds]
        self.checks.append(float(out.detach()[::97].sum()))
        out.backward(self.grads[i % 2])
        self.optimizer.step()

    def run(self, first: int, steps: int) -> list[float]:
        return time_steps(self.step, first, steps)

    def close(self) -> None:
        if hasattr(self.batches, "close"):
            self.batches.close()
        self.store.close()


def tables_of(ec: Any, rows: list[int], dim: int, rule: str) -> list[Any]:
    optimizer = getattr(ec.optim, RULES[rule])(lr=0.02)
    return [ec.TableConfig(f"t{i}", n, dim, features=[f"f{i}"], optimizer=optimizer) for i, n in enumerate(rows)]


def kjts(ec: Any, names: list[str], ids: list[np.ndarray], batch: int) -> Iterator[Any]:
    """The batches, again and again; each jagged batch is built when it is asked for."""
    return (jagged(ec, names, some, batch) for some in itertools.cycle(ids))


def split_cells(split: dict[str, Any], compute: float) -> list[str]:
    """The stages of a step and what is left of it, ms."""
    return [f"{split['split_ms'][name]:.2f}" for name in STAGES] + [f"{compute:.2f}"]


# W1 ------------------------------------------------------------------------------------------------------------------


def w1(work: dict[str, Any]) -> dict[str, Any]:
    """10 tables, 10,486 ids a table and batch, caches of a share of the rows touched: ms a step by stage."""
    import embcache as ec

    records = []
    for dim, rule, share in work["w1_cases"]:
        tables, rows, n = work["w1_tables"], work["w1_rows"], work["w1_ids"]
        laws, rng = [PowerLaw(rows, 1.05)] * tables, np.random.default_rng(1)
        count = work["w1_warm"] + work["rounds"] * work["steps"]
        ids = [np.concatenate([law.draw(rng, n) for law in laws]) for _ in range(count)]
        footprint = len(np.unique(np.concatenate([some[:n] for some in ids])))
        described, names = tables_of(ec, [rows] * tables, dim, rule), [f"f{i}" for i in range(tables)]
        with folder(work["folder"], "w1") as path:
            cache = max(1, int(share * footprint))
            runs = {
                "ram": Training(described, [ec.tiers.Ram()], kjts(ec, names, ids, n), dim),
                "depth 0": Training(described, chain(ec, path / "a", cache), kjts(ec, names, ids, n), dim),
                "depth 2": Training(
                    described, chain(ec, path / "b", cache), kjts(ec, names, ids, n), dim, depth="auto"
                ),
            }
            records.append(
                {"dim": dim, "rule": rule, "share": share, "cache": cache, **_compare(runs, work["w1_warm"], work)}
            )
            for run in runs.values():
                run.close()
    lines = [
        [
            f"D{r['dim']} {r['rule']} cache {r['share']:.0%}",
            *(f"{r['ms'][name]:.1f}" for name in ("ram", "depth 0", "depth 2")),
            f"{1 / r['ratio']['depth 2'][0]:.2f}x",
            f"{r['split']['hit_rate']:.1%}", *split_cells(r["split"], r["compute_ms"]),
        ]
        for r in records
    ]  # fmt: skip
    header = ["W1, ms a step", "ram", "no look-ahead", "look-ahead", "ahead / ram", "hits", "dedup+probe", "miss read",
              "evict write", "insert", "compute"]  # fmt: skip
    return {"table": format_table(header, lines), "records": records}


def _compare(runs: dict[str, Training], warm: int, work: dict[str, Any]) -> dict[str, Any]:
    """Warm up, then measure in turn; the split is that of depth 0, where no stage hides behind another."""
    for run in runs.values():
        run.run(0, warm)
    steps = work["steps"]
    split = Split(runs["depth 0"].store)
    spent = 0.0

    def contestant(run: Training) -> Callable[[int], list[float]]:
        def go(round_: int) -> list[float]:
            nonlocal spent
            seconds = run.run(warm + round_ * steps, steps)
            if run is runs["depth 0"]:
                spent += sum(seconds)
            return seconds

        return go

    seconds = measure({name: contestant(run) for name, run in runs.items()}, work["rounds"])
    total = split.end(steps * work["rounds"])
    total["ms"] = spent / (steps * work["rounds"]) * 1e3
    checks = [run.checks for run in runs.values()]
    if any(other != checks[0] for other in checks):
        raise RuntimeError("outputs of the stores differ")
    return {
        "ms": {name: statistics.median(values) * 1e3 for name, values in seconds.items()},
        "ratio": {name: ratio(values, seconds["ram"]) for name, values in seconds.items()},
        "noise": {name: noise(values) for name, values in seconds.items()},
        "split": total,
        "compute_ms": total["ms"] - sum(total["split_ms"].values()),
    }


# W2 ------------------------------------------------------------------------------------------------------------------


def w2(work: dict[str, Any]) -> dict[str, Any]:
    """630 k rows of 16 floats, 2,000 keys a call, power law 1.2: lookups a second by 1 and 2 threads."""
    import torch

    import embcache as ec

    torch.set_num_threads(1)
    rows, n, calls = work["w2_rows"], 2000, work["w2_calls"]
    law, rng = PowerLaw(rows, 1.2), np.random.default_rng(2)
    ids = [law.draw(rng, n) for _ in range(calls)]
    table = [ec.TableConfig("t", rows, 16, features=["f0"], pooling="none")]
    records = []
    with folder(work["folder"], "w2") as path:
        for name, tiers in (
            ("all in RAM", [ec.tiers.Ram()]),
            ("cache of all rows over LMDB", chain(ec, path / "a", rows)),
            ("cache of 10 % over LMDB", chain(ec, path / "b", rows // 10)),
        ):
            store = ec.EmbeddingStore(table, tiers)
            for some in ids:  # rows get into a cache by training only
                with store.stage(jagged(ec, ["f0"], some, n), training=True):
                    pass
            rates = {threads: _lookups(ec, store, ids, n, threads, work["rounds"]) for threads in (1, 2)}
            records.append({"name": name, "keys_per_s": rates})
            store.close()
    lines = [[r["name"], *(f"{r['keys_per_s'][t] / 1e6:.1f}" for t in (1, 2))] for r in records]
    return {"table": format_table(["W2, M keys/s", "1 thread", "2 threads"], lines), "records": records}


def _lookups(ec: Any, store: Any, ids: list[np.ndarray], n: int, threads: int, rounds: int) -> float:
    def some(part: list[np.ndarray]) -> None:
        for keys in part:
            with store.stage(jagged(ec, ["f0"], keys, n), training=False) as handle:
                store.lookup(handle)

    best = 0.0
    for _ in range(rounds):
        workers = [threading.Thread(target=some, args=(ids[k::threads],)) for k in range(threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, len(ids) * n / (time.perf_counter() - start))
    return best


# W3 ------------------------------------------------------------------------------------------------------------------


def w3(work: dict[str, Any]) -> dict[str, Any]:
    """Criteo-Kaggle's 26 tables: hit rate and step time by cache size and look-ahead window, bits equal throughout."""
    import embcache as ec

    records = []
    sizes = [max(3, n // work["w3_shrink"]) for n in KAGGLE]
    names = [f"f{i}" for i in range(len(sizes))]
    for batch, dim, share in work["w3_cases"]:
        laws, rng = [PowerLaw(n, 1.2) for n in sizes], np.random.default_rng(3)
        count = work["w3_warm"] + work["rounds"] * work["steps"] + 1
        ids = [np.concatenate([law.draw(rng, batch) for law in laws]) for _ in range(count)]
        described = tables_of(ec, sizes, dim, "rowwise")
        cache = {f"t{i}": max(8, int(share * n)) for i, n in enumerate(sizes)}
        with folder(work["folder"], "w3") as path:
            runs = {"ram": Training(described, [ec.tiers.Ram()], kjts(ec, names, ids, batch), dim)}
            for window in work["w3_windows"]:
                policy = "lookahead" if window else "lfu"
                ahead = {"depth": "auto", "window": window} if window else {"depth": 0}
                runs[f"window {window}"] = Training(
                    described, chain(ec, path / str(window), cache, policy), kjts(ec, names, ids, batch), dim, **ahead
                )
            records += _windows(runs, work, {"batch": batch, "dim": dim, "share": share})
            for run in runs.values():
                run.close()
    lines = [
        [f"batch {r['batch']} D{r['dim']} cache {r['share']:.0%} {r['name']}",
         f"{r['ms']:.1f}", f"{r['slowdown']:.2f}x",
         f"{r['hit_rate']:.2%}" if r["hit_rate"] is not None else ""]
        for r in records
    ]  # fmt: skip
    return {"table": format_table(["W3", "ms a step", "of ram", "hits"], lines), "records": records}


def _windows(runs: dict[str, Training], work: dict[str, Any], case: dict[str, Any]) -> list[dict[str, Any]]:
    warm, steps = work["w3_warm"], work["steps"]
    for run in runs.values():
        run.run(0, warm)
    splits = {name: Split(run.store) for name, run in runs.items() if name != "ram"}

    def contestant(run: Training) -> Callable[[int], list[float]]:
        return lambda round_: run.run(warm + round_ * steps, steps)

    seconds = measure({name: contestant(run) for name, run in runs.items()}, work["rounds"])
    if any(run.checks != runs["ram"].checks for run in runs.values()):
        raise RuntimeError("outputs of the stores differ")
    records = []
    for name, values in seconds.items():
        split = splits[name].end(steps * work["rounds"]) if name in splits else None
        slowdown = 1 / ratio(values, seconds["ram"])[0]
        hits = split["hit_rate"] if split else None
        ms = statistics.median(values) * 1e3
        records.append({**case, "name": name, "ms": ms, "slowdown": slowdown, "hit_rate": hits, "split": split})
    return records


# W4 ------------------------------------------------------------------------------------------------------------------


def w4(work: dict[str, Any]) -> dict[str, Any]:
    """Rows of 768 B (D64 and Adam) whose pages the system has forgotten: reads and writes of the disk by a step."""
    import embcache as ec

    rows, n, batch = work["w4_rows"], work["w4_ids"], work["w4_ids"]
    described = tables_of(ec, [rows], 64, "adam")
    records = []
    for alpha in (0.9, 1.05):
        with folder(work["folder"], "w4") as path:
            _populate(ec, described, path, rows)
            drop_pages(path)
            law, rng = PowerLaw(rows, alpha), np.random.default_rng(4)
            ids = [law.draw(rng, n) for _ in range(work["w4_steps"] + 1)]
            run = Training(described, chain(ec, path, rows // 20), kjts(ec, ["f0"], ids, batch), 64, depth=1)
            below, written = dict(run.store.durable.stats()), written_bytes()
            split, start = Split(run.store), time.perf_counter()
            run.run(0, work["w4_steps"])
            seconds = time.perf_counter() - start
            total = split.end(work["w4_steps"])
            number = run.store.commit()
            now = run.store.durable.stats()
            run.close()
            read = now["rows_read"] - below["rows_read"]
            changed = now["rows_written"] - below["rows_written"]
            records.append({
                "alpha": alpha,
                "ms": seconds / work["w4_steps"] * 1e3,
                "read_rows_per_s": read / max(1e-9, now["seconds_read"] - below["seconds_read"]),
                "mb_written_per_step": (written_bytes() - written) / work["w4_steps"] / 1e6,
                "write_amplification": (written_bytes() - written) / max(1, changed * described[0].row_bytes),
                "disk_mb": disk_bytes(path) / 1e6,
                "generation": number,
                "split": total,
            })  # fmt: skip
    lines = [
        [f"power law {r['alpha']}", f"{r['ms']:.1f}", f"{r['split']['hit_rate']:.1%}",
         f"{r['split']['misses_per_step']:,.0f}",
         f"{r['read_rows_per_s'] / 1e3:,.0f}", f"{r['mb_written_per_step']:.2f}", f"{r['write_amplification']:.1f}"]
        for r in records
    ]  # fmt: skip
    header = [
        f"W4, {rows:,} cold rows of 768 B, {n:,} ids",
        "ms a step",
        "hits",
        "misses",
        "k rows/s read",
        "MB written",
        "amplification",
    ]
    return {"table": format_table(header, lines), "records": records}


def _populate(ec: Any, described: list[Any], path: Path, rows: int, block: int = 50_000) -> None:
    """Every row in LMDB itself."""
    import torch

    store = ec.EmbeddingStore(described, chain(ec, path, 1000))
    for name in store.names:
        for start in range(0, rows, block):
            ids = torch.arange(start, min(rows, start + block))
            weights = torch.rand(len(ids), described[0].embedding_dim)
            store.load_rows(name, ids, weights)
    store.commit()
    store.durable.merge()
    store.close()


# W5 ------------------------------------------------------------------------------------------------------------------


def w5(work: dict[str, Any]) -> dict[str, Any]:
    """Hit rates of the policies, steady and drifting power law, beside the best cache that never changes."""
    import embcache as ec

    rows, n, cache = work["w5_rows"], work["w5_ids"], work["w5_rows"] // 10
    law = PowerLaw(rows, 1.05)
    records = []
    for drifting in (False, True):
        rng = np.random.default_rng(5)
        count = work["w5_warm"] + work["w5_steps"]
        shift = [int(rows * step / 100 / 100) if drifting else 0 for step in range(count)]
        ids = [law.ids_of((law.ranks(rng, n) + by) % rows) for by in shift]
        measured = [np.unique(some, return_counts=True) for some in ids[work["w5_warm"] :]]
        static = law.hottest(cache) if not drifting else _hindsight(measured, cache)
        best = _static_rate(measured, static, rows)
        for policy, window in work["w5_policies"]:
            table = [ec.TableConfig("t", rows, 1, features=["f0"])]
            store = ec.EmbeddingStore(table, [ec.tiers.Ram(rows=cache, policy=policy), ec.tiers.Ram()])
            before: dict[str, Any] = {}
            batches = store.lookahead(kjts(ec, ["f0"], ids, n), depth=0, window=window)
            start = time.perf_counter()
            for step, _ in zip(range(count), batches, strict=False):
                if step == work["w5_warm"]:
                    before = store.front.stats()
            seconds = time.perf_counter() - start
            now = store.front.stats()
            batches.close()
            unique = (now["hits"] - before["hits"]) / (now["unique_ids"] - before["unique_ids"])
            uses = (now["ids_hit"] - before["ids_hit"]) / (n * work["w5_steps"])
            store.close()
            records.append({"drifting": drifting, "policy": policy, "window": window, "unique": unique, "uses": uses,
                            "of_static_unique": unique / best[0], "of_static_uses": uses / best[1],
                            "us_per_batch": seconds / count * 1e6})  # fmt: skip
        records.append({"drifting": drifting, "policy": "best static", "window": 0, "unique": best[0], "uses": best[1],
                        "of_static_unique": 1.0, "of_static_uses": 1.0, "us_per_batch": 0.0})  # fmt: skip
    lines = [
        [f"{'drift' if r['drifting'] else 'steady'} {r['policy']}" + (f" {r['window']}" if r["window"] else ""),
         f"{r['unique']:.2%}", f"{r['of_static_unique']:.1%}", f"{r['uses']:.2%}", f"{r['of_static_uses']:.1%}",
         f"{r['us_per_batch'] / 1e3:.2f}"]
        for r in records
    ]  # fmt: skip
    header = ["W5, cache of 10 %", "hits of unique ids", "of static", "hits of uses", "of static", "ms to stage"]
    return {"table": format_table(header, lines), "records": records}


def _hindsight(measured: list[tuple[np.ndarray, np.ndarray]], cache: int) -> np.ndarray:
    """The rows that most of the batches use."""
    ids, batches = np.unique(np.concatenate([some for some, _ in measured]), return_counts=True)
    return ids[np.argsort(-batches, kind="stable")[:cache]]


def _static_rate(measured: list[tuple[np.ndarray, np.ndarray]], static: np.ndarray, rows: int) -> tuple[float, float]:
    """(share of unique ids, share of uses) that a fixed set of rows serves."""
    held = np.zeros(rows, bool)
    held[static] = True
    unique = sum(int(held[some].sum()) for some, _ in measured) / sum(len(some) for some, _ in measured)
    uses = sum(int(c[held[some]].sum()) for some, c in measured) / sum(int(c.sum()) for _, c in measured)
    return unique, uses
