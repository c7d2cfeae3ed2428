"""Pooled lookup + backward + sparse update beside FBGEMM and torch, measured in turn in one run.

A step is what a user's step is: offsets built from lengths, ids validated, pooled lookup, gradient checked for NaN and
infinity (ours), backward, fused update. Tables of a million rows, power-law ids, 64 distinct batches. Contestants:

* ops: our kernels called directly, row-wise Adagrad
* module: ``embcache.EmbeddingBagCollection`` + ``SparseOptimizer``, the same
* fbgemm: ``SplitTableBatchedEmbeddingBagsCodegen`` on CPU, exact row-wise Adagrad
* torch: ``nn.EmbeddingBag(sparse=True)`` + ``torch.optim.SGD``, which does less: no optimizer state

and the roofline: our lookup against a loop that only reads the same rows, with prefetch, huge pages and the same
threads, both in bytes touched per second.

    python scripts/bench_pooling.py --peer-python /path/to/python-with-fbgemm --json pooling.json
    python scripts/bench_pooling.py --quick
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _bench import (
    Worker,
    WorkerError,
    format_table,
    have_module,
    machine,
    measure,
    noise,
    ratio,
    serve,
    time_steps,
    write_json,
    zipf_ids,
)

TARGETS = {
    "fbgemm": {"D64 L1": 7.0, "D64 L20": 7.0, "D128 L20": 5.0},
    "torch": {"D64 L1": 4.0, "D64 L20": 4.0, "D128 L20": 3.5},
}
LR, EPS = 0.02, 1e-8

# ---------------------------------------------------------------------------------------------------- worker's side

_steps: dict[str, Callable[[int], object]] = {}


def raw_batches(work: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(ids int64 feature-major, lengths int64) of every batch, the same for everybody."""
    import torch

    rng = np.random.default_rng(work["seed"])
    n = work["batch"] * work["length"]
    lengths = torch.full((work["tables"] * work["batch"],), work["length"])
    return [
        (torch.from_numpy(np.concatenate([zipf_ids(rng, n, work["rows"]) for _ in range(work["tables"])])), lengths)
        for _ in range(work["distinct"])
    ]


def offsets_of(lengths: Any) -> Any:
    import torch

    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def build(who: str, work: dict[str, Any]) -> dict[str, Any]:
    """Makes the contestants of one worker; returns what they report about themselves."""
    import torch

    torch.set_num_threads(work["threads"])
    torch.manual_seed(0)
    batches = raw_batches(work)
    grads = [torch.randn(work["batch"], work["tables"] * work["dim"]) for _ in range(2)]
    _steps.clear()
    return {"ours": _ours, "fbgemm": _fbgemm, "torch": _torch}[who](work, batches, grads)


def _ours(work: dict[str, Any], batches: list[Any], grads: list[Any]) -> dict[str, Any]:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout need not be installed
    import embcache as ec
    from embcache import kernels

    tables, batch, dim = work["tables"], work["batch"], work["dim"]
    names = [f"t{i}" for i in range(tables)]
    module = ec.EmbeddingBagCollection(
        [
            ec.TableConfig(n, num_embeddings=work["rows"], embedding_dim=dim, features=[n],
                           optimizer=ec.optim.RowWiseAdagrad(lr=LR, eps=EPS), init=ec.init.Uniform(0.01))
            for n in names
        ]
    )  # fmt: skip
    optimizer = ec.optim.SparseOptimizer(module)

    def module_step(i: int) -> None:
        ids, lengths = batches[i % len(batches)]
        kjt = ec.KeyedJaggedTensor(names, ids, lengths=lengths)
        module(kjt).values().backward(grads[i % 2])
        optimizer.step()

    native = kernels.get("native")
    arenas = module.store.front.arenas
    slabs, written = [a.slab for a in arenas], [a.written for a in arenas]
    table_rows = torch.tensor([[dim, 0, 4 * dim, 2, 0, 0]] * tables)
    features = torch.tensor([[t, 0, t * batch, batch, 0, t * dim, tables * dim] for t in range(tables)])
    hyper = torch.zeros(tables, 16, dtype=torch.float64)
    hyper[:, [0, 2, 12, 13, 14]] = torch.tensor([LR, EPS, 1.0, 1.0, 1.0], dtype=torch.float64)
    limits, no_ids = torch.full((tables,), work["rows"]), [torch.empty(0, dtype=torch.int64)] * tables
    numel = batch * tables * dim

    def ops_step(i: int) -> None:
        ids, lengths = batches[i % len(batches)]
        offsets = offsets_of(lengths)
        if native.check_offsets(offsets, ids.numel()) >= 0 or native.check_ids(ids, offsets, features, limits) >= 0:
            raise RuntimeError("bad batch")
        native.pooled_lookup(slabs, table_rows, features, ids, offsets, None, numel, 0)
        grad = grads[i % 2]
        if not native.all_finite([grad]):
            raise RuntimeError("bad gradient")
        native.fused_update(slabs, written, table_rows, hyper, features, ids, offsets, None, [grad], no_ids)

    prepared = [(ids, offsets_of(lengths)) for ids, lengths in batches]

    def lookup(i: int) -> None:
        ids, offsets = prepared[i % len(prepared)]
        native.pooled_lookup(slabs, table_rows, features, ids, offsets, None, numel, 0)

    def touch(i: int) -> None:
        ids, offsets = prepared[i % len(prepared)]
        native.touch_rows(slabs, table_rows, features, ids, offsets)

    _steps.update(ops=ops_step, module=module_step, lookup=lookup, touch=touch)
    read = tables * batch * work["length"] * dim * 4
    return {"isa": native.isa(), "row_bytes": slabs[0].shape[1], "lookup_bytes": read + numel * 4, "touch_bytes": read}


def _fbgemm(work: dict[str, Any], batches: list[Any], grads: list[Any]) -> dict[str, Any]:
    import fbgemm_gpu
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(work["rows"], work["dim"], EmbeddingLocation.HOST, ComputeDevice.CPU)] * work["tables"],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LR, eps=EPS,
    )  # fmt: skip
    module.init_embedding_weights_uniform(-0.01, 0.01)

    def step(i: int) -> None:
        ids, lengths = batches[i % len(batches)]
        module(ids, offsets_of(lengths)).backward(grads[i % 2])

    _steps["fbgemm"] = step
    return {"version": fbgemm_gpu.__version__}


def _torch(work: dict[str, Any], batches: list[Any], grads: list[Any]) -> dict[str, Any]:
    import torch

    bags = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(work["rows"], work["dim"], mode="sum", sparse=True, include_last_offset=True)
        for _ in range(work["tables"])
    )
    optimizer = torch.optim.SGD(bags.parameters(), lr=LR)
    n, batch = work["batch"] * work["length"], work["batch"]

    def step(i: int) -> None:
        ids, lengths = batches[i % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        outs = []
        for t, bag in enumerate(bags):
            outs.append(bag(ids[t * n : (t + 1) * n], offsets_of(lengths[t * batch : (t + 1) * batch])))
        torch.cat(outs, 1).backward(grads[i % 2])
        optimizer.step()

    _steps["torch"] = step
    return {"version": torch.__version__}


def run(name: str, first: int, steps: int) -> list[float]:
    return time_steps(_steps[name], first, steps)


# ---------------------------------------------------------------------------------------------------- parent's side


def bench(work: dict[str, Any], rounds: int, steps: int, peer_python: str | None, say: Any) -> dict[str, Any]:
    """One configuration: every contestant in turn, `rounds` rounds of `steps` steps."""
    workers: dict[str, Worker] = {}
    about: dict[str, Any] = {}
    try:
        for who in ("ours", "torch", "fbgemm"):
            python = peer_python if who == "fbgemm" else None
            if who == "fbgemm" and not have_module(python, "fbgemm_gpu"):
                say("fbgemm: not installed in this interpreter (--peer-python names another), left out")
                continue
            worker = Worker(__file__, python=python)
            try:
                about[who] = worker.call("build", who=who, work=work)
                workers[who] = worker
            except WorkerError as error:
                worker.close()
                if who == "ours":
                    raise
                say(f"{who}: left out: {error}")
        names = {
            "ops": "ours",
            "module": "ours",
            "lookup": "ours",
            "touch": "ours",
            "torch": "torch",
            "fbgemm": "fbgemm",
        }
        contestants = {
            name: partial(_round, workers[who], name, steps) for name, who in names.items() if who in workers
        }
        for name in contestants:  # warm: memory is committed, threads are up
            contestants[name](-1)
        return {"work": work, "about": about, "seconds": measure(contestants, rounds, say)}
    finally:
        for worker in workers.values():
            worker.close()


def _round(worker: Worker, name: str, steps: int, round_: int) -> list[float]:
    return worker.call("run", name=name, first=(round_ + 1) * steps, steps=steps)


def report(label: str, result: dict[str, Any]) -> list[list[str]]:
    """Table rows of one configuration; adds the ratios to `result`."""
    seconds, ratios = result["seconds"], {}
    rows = []
    for ours in ("ops", "module"):
        for peer in ("fbgemm", "torch"):
            if peer not in seconds:
                continue
            middle, low, high = ratio(seconds[ours], seconds[peer])
            ratios[f"{ours} vs {peer}"] = {
                "median": middle,
                "quartiles": [low, high],
                "target": TARGETS[peer].get(label),
            }
            rows.append([
                f"{label} {ours} vs {peer}", f"{statistics.median(seconds[ours]) * 1e3:.2f}",
                f"{statistics.median(seconds[peer]) * 1e3:.2f}", f"{middle:.2f}x [{low:.2f}, {high:.2f}]",
                f"{TARGETS[peer].get(label, '')}", f"{noise(seconds[ours]):.0%} / {noise(seconds[peer]):.0%}",
            ])  # fmt: skip
    about = result["about"]["ours"]
    share = [
        (about["lookup_bytes"] / a) / (about["touch_bytes"] / b)
        for a, b in zip(seconds["lookup"], seconds["touch"], strict=True)
    ]
    ratios["lookup of roofline"] = {"median": statistics.median(share), "target": 0.85}
    rates = [
        about["lookup_bytes"] / statistics.median(seconds["lookup"]),
        about["touch_bytes"] / statistics.median(seconds["touch"]),
    ]
    rows.append([
        f"{label} lookup vs reading only, GB/s", f"{rates[0] / 1e9:.1f}", f"{rates[1] / 1e9:.1f}",
        f"{statistics.median(share):.0%}", "85%", f"{noise(seconds['lookup']):.0%} / {noise(seconds['touch']):.0%}",
    ])  # fmt: skip
    result["ratios"] = ratios
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter that has fbgemm_gpu")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--quick", action="store_true", help="tiny tables, two rounds: does it run?")
    parser.add_argument("--only", default="", help="labels to run, comma separated: 'D64 L1', 'D64 L20', 'D128 L20'")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=16, help="steps a contestant runs in one round")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are processors")
    args = parser.parse_args()
    threads = args.threads or machine()["cpus"]
    shapes = {"D64 L1": (64, 4096, 1), "D64 L20": (64, 2048, 20), "D128 L20": (128, 2048, 20)}
    rounds, steps, rows = (2, 2, 5000) if args.quick else (args.rounds, args.steps, args.rows)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    table, results = [], {}
    for label, (dim, batch, length) in shapes.items():
        if args.only and label not in [x.strip() for x in args.only.split(",")]:
            continue
        work = {"tables": args.tables, "rows": rows, "dim": dim, "batch": 64 if args.quick else batch, "length": length}
        work |= {"distinct": 4 if args.quick else 64, "seed": 1, "threads": threads}
        results[label] = bench(work, rounds, steps, args.peer_python, say)
        table += report(label, results[label])
    print(format_table(["case", "ours ms", "peer ms", "ratio [quartiles]", "target", "noise"], table))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.json, {"results": results})


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        serve({"build": build, "run": run})
    else:
        main()
