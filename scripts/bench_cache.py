"""Tables larger than memory: what a cache over LMDB costs, beside all rows in memory and other ways to store rows.

Sections (``--sections``; each in processes of its own):

* index: probes of the index, keys a second and thread
* storage: rows a second of tiers.Lmdb, a py-lmdb loop, np.memmap and a dict; bytes written for each byte changed
* w1: training step by stage, caches of 10, 80 and 100 % of the rows touched, three optimizers
* w2: lookups a second, 630 k rows of 16 floats, 2,000 keys a call
* w3: Criteo-Kaggle's tables, caches of 1 and 2 %, look-ahead windows; equal bits
* w4: rows whose pages are not in memory
* w5: hit rates of the policies beside the best cache that never changes, steady and drifting
* dlrm: DLRM in fp32 with a cache of 10 % over LMDB, look-ahead, evictions and commits included, against all in memory;
  how long a commit stalls beside copying the dirty rows; reopening

    python scripts/bench_cache.py --json cache.json
    python scripts/bench_cache.py --quick
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from typing import Any

from _bench import Worker, serve, write_json

SECTIONS = ["index", "storage", "w1", "w2", "w3", "w4", "w5", "dlrm"]

# ---------------------------------------------------------------------------------------------------- worker's side


def section(name: str, work: dict[str, Any]) -> dict[str, Any]:
    """Runs one section; returns its table and its records."""
    import _cache_rows
    import _cache_steps
    import torch

    if work["threads"]:
        torch.set_num_threads(work["threads"])
    functions = {name: getattr(_cache_steps, name) for name in ("w1", "w2", "w3", "w4", "w5")}
    functions |= {"index": _cache_rows.index, "storage": _cache_rows.storage}
    result: dict[str, Any] = functions[name](work)
    return result


def dlrm_handlers() -> dict[str, Any]:
    import _cache_dlrm

    return {"build": _cache_dlrm.build, "run": _cache_dlrm.run, "finish": _cache_dlrm.finish}


# ---------------------------------------------------------------------------------------------------- parent's side

FULL: dict[str, Any] = {
    "rounds": 5, "steps": 20,
    "index_rows": [1_000_000, 16_000_000], "probes": 8_000_000, "probe_block": 65_536,
    "storage_rows": 2_000_000, "row_bytes": 256, "storage_block": 100_000,
    "w1_tables": 10, "w1_rows": 1_000_000, "w1_ids": 10_486, "w1_warm": 60,
    "w1_cases": [
        (64, "sgd", 0.1), (64, "adagrad", 0.1), (64, "adagrad", 0.8), (64, "adagrad", 1.0), (64, "adam", 0.1),
        (128, "adagrad", 0.1),
    ],
    "w2_rows": 630_000, "w2_calls": 1000,
    "w3_shrink": 1, "w3_warm": 40, "w3_windows": [0, 1, 2, 16, 200],
    "w3_cases": [(2048, 16, 0.01), (2048, 48, 0.02), (16_384, 16, 0.02)],
    "w4_rows": 4_000_000, "w4_ids": 8192, "w4_steps": 60,
    "w5_rows": 1_000_000, "w5_ids": 10_486, "w5_warm": 400, "w5_steps": 200,
    "w5_policies": [("lru", 0), ("lfu", 0), ("lfu_decay", 0), ("lookahead", 0), ("lookahead", 16)],
    "tables": 26, "rows": 1_000_000, "dim": 64, "n_dense": 13, "batch": 2048, "alpha": 1.05, "cache": 0.1,
    "bottom": [512, 256, 64], "top": [512, 512, 256, 1], "warm": 150, "dlrm_rounds": 8, "dlrm_steps": 50,
    "commit_every": 100,
}  # fmt: skip
QUICK: dict[str, Any] = {
    "rounds": 2, "steps": 4,
    "index_rows": [1_000_000], "probes": 500_000, "storage_rows": 100_000, "storage_block": 20_000,
    "w1_rows": 100_000, "w1_tables": 4, "w1_ids": 2000, "w1_warm": 10,
    "w1_cases": [(64, "sgd", 0.1), (64, "adam", 0.8)],
    "w2_rows": 100_000, "w2_calls": 50,
    "w3_shrink": 1000, "w3_warm": 4, "w3_windows": [0, 2, 16], "w3_cases": [(512, 16, 0.02)],
    "w4_rows": 100_000, "w4_ids": 1000, "w4_steps": 10,
    "w5_rows": 100_000, "w5_ids": 2000, "w5_warm": 40, "w5_steps": 20,
    "tables": 4, "rows": 20_000, "dim": 16, "batch": 256, "bottom": [32, 16], "top": [32, 1],
    "warm": 10, "dlrm_rounds": 2, "dlrm_steps": 10, "commit_every": 5,
}  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=SECTIONS, choices=SECTIONS, help="default: all")
    parser.add_argument("--folder", help="where stores are put (default: a temporary folder); up to 20 GB are needed")
    parser.add_argument("--rows", type=int, help="rows of each of DLRM's tables")
    parser.add_argument("--cache", type=float, help="share of DLRM's rows in the cache")
    parser.add_argument("--depth", default="auto", help="look-ahead of DLRM: a number, or auto")
    parser.add_argument("--policy", default="lfu", help="of DLRM's cache")
    parser.add_argument("--dlrm-rounds", type=int)
    parser.add_argument("--apart", action="store_true", help="DLRM: one contestant after the other, alone in memory")
    parser.add_argument("--warm", type=int, help="steps of DLRM before anything is measured")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (0: torch's choice)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    work = {**FULL, **(QUICK if args.quick else {})}
    for name in ("rows", "cache", "dlrm_rounds", "warm"):
        if getattr(args, name) is not None:
            work[name] = getattr(args, name)
    work |= {"depth": args.depth if args.depth == "auto" else int(args.depth), "policy": args.policy}
    work |= {"threads": args.threads, "seed": args.seed, "apart": args.apart}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="embcache-bench-", dir=args.folder) as folder:
        work["folder"] = folder
        for name in args.sections:
            start = time.monotonic()
            if name == "dlrm":
                import _cache_dlrm

                results[name] = _cache_dlrm.compare(__file__, work)
            else:
                with Worker(__file__) as worker:
                    results[name] = worker.call("section", name=name, work=work)
            print(results[name].pop("table"), end="\n\n", flush=True)
            print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
            if args.json:
                write_json(args.json, {"workload": work, "results": results})


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        serve({"section": section, **dlrm_handlers()})
    else:
        main(sys.argv[1:])
