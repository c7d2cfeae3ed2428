"""DLRM training speed beside TorchRec's DLRM and plain torch, measured in turn in one run.

Each implementation lives in a process of its own; ours and one peer are alive at a time, so that two sets of tables fit
in memory, and they run round by round. A step is what a user's step is: build the batch's inputs from raw arrays,
forward, loss, backward, both optimizers. 64 distinct batches with power-law ids; validation and non-finite checks are
on. Everybody has the same sizes and a fused torch SGD for the dense layers.

* ours: row-wise Adagrad; fp32, and bf16 dense layers
* torchrec: its DLRM over FusedEmbeddingBagCollection (FBGEMM's fused row-wise Adagrad, the fastest way it offers on
  CPU), fp32 and under bf16 autocast
* plain: nn.EmbeddingBag(sparse=True) + SGD and the same network in torch, fp32 and bf16 autocast, eager and compiled

    python scripts/bench_train.py --peer-python /path/to/python-with-torchrec --json train.json
    python scripts/bench_train.py --quick

A processor without bf16 matrix instructions (AVX512-bf16, AMX) runs bf16 layers slower than fp32: the table shows it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
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
    write_json,
    zipf_ids,
)

MODES = {
    "ours": ["fp32", "bf16"],
    "torchrec": ["fp32", "bf16"],
    "plain": ["fp32", "bf16", "compiled fp32", "compiled bf16"],
}

# ---------------------------------------------------------------------------------------------------- worker's side

_steps: dict[str, Callable[[int], float]] = {}  # mode -> step(i), returning the loss


def raw_batches(work: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
    """(dense [B, n_dense], ids int64 [F * B] feature-major, labels [B]) as torch tensors, the same for everybody."""
    import torch

    rng = np.random.default_rng(work["seed"])
    size, features = work["batch"], work["tables"]
    return [
        (
            torch.from_numpy(rng.standard_normal((size, work["n_dense"]), dtype=np.float32)),
            torch.from_numpy(zipf_ids(rng, features * size, work["rows"], work["alpha"])),
            torch.from_numpy((rng.random(size) < 0.25).astype(np.float32)),
        )
        for _ in range(work["batches"])
    ]


def build(kind: str, work: dict[str, Any]) -> list[str]:
    """Builds the implementation `kind`; returns the modes it offers."""
    import torch

    torch.manual_seed(work["seed"])
    if work["threads"]:
        torch.set_num_threads(work["threads"])
    _steps.update({"ours": build_ours, "torchrec": build_torchrec, "plain": build_plain}[kind](work))
    return list(_steps)


def run(mode: str, first: int, steps: int, seconds: float) -> list[float]:
    """Seconds of up to `steps` steps from batch `first`, fewer if they exceed `seconds`; one untimed step before."""
    step = _steps[mode]
    step(first)
    result: list[float] = []
    while len(result) < steps and sum(result) < seconds:
        start = time.perf_counter()
        loss = step(first + 1 + len(result))
        result.append(time.perf_counter() - start)
        if not math.isfinite(loss):
            raise RuntimeError(f"{mode}: loss {loss}")
    return result


def build_ours(work: dict[str, Any]) -> dict[str, Callable[[int], float]]:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import embcache as ec
    from dlrm.models import build as build_model

    features = [f"f{i}" for i in range(work["tables"])]
    tables = [
        ec.TableConfig(
            f"t{i}",
            num_embeddings=work["rows"],
            embedding_dim=work["dim"],
            features=[feature],
            optimizer=ec.optim.RowWiseAdagrad(lr=0.01),
        )
        for i, feature in enumerate(features)
    ]
    model = build_model("dlrm", tables, work["n_dense"], bottom_mlp=work["bottom"], top_mlp=work["top"])
    dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    sparse_optimizer = ec.optim.SparseOptimizer(model)
    criterion = torch.nn.BCEWithLogitsLoss()
    batches = raw_batches(work)

    def step_in(dtype: str) -> Callable[[int], float]:
        def step(i: int) -> float:
            model.dense_dtype = dtype
            dense, ids, labels = batches[i % len(batches)]
            lengths = torch.ones(ids.numel(), dtype=torch.int32)
            sparse = ec.KeyedJaggedTensor.from_lengths_sync(features, ids, lengths)
            loss = criterion(model(dense, sparse), labels)
            dense_optimizer.zero_grad()
            sparse_optimizer.zero_grad()
            loss.backward()
            dense_optimizer.step()
            sparse_optimizer.step()
            return float(loss.detach())

        return step

    return {dtype: step_in(dtype) for dtype in MODES["ours"]}


def build_torchrec(work: dict[str, Any]) -> dict[str, Callable[[int], float]]:
    import torch
    import torchrec.optim
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    features = [f"f{i}" for i in range(work["tables"])]
    collection = FusedEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"t{i}", num_embeddings=work["rows"], embedding_dim=work["dim"], feature_names=[feature]
            )
            for i, feature in enumerate(features)
        ],
        optimizer_type=torchrec.optim.RowWiseAdagrad,
        optimizer_kwargs={"lr": 0.01},
        device=torch.device("cpu"),
    )
    model = DLRM(collection, work["n_dense"], work["bottom"], work["top"])
    dense = [p for name, p in model.named_parameters() if "embedding_bag" not in name]
    optimizer = torch.optim.SGD(dense, lr=0.01, fused=True)
    criterion = torch.nn.BCEWithLogitsLoss()
    batches = raw_batches(work)

    def step_in(dtype: str) -> Callable[[int], float]:
        def step(i: int) -> float:
            dense, ids, labels = batches[i % len(batches)]
            lengths = torch.ones(ids.numel(), dtype=torch.int32)
            sparse = KeyedJaggedTensor.from_lengths_sync(features, ids, lengths)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                logits = model(dense, sparse)
            loss = criterion(logits.squeeze(1).float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return step

    return {dtype: step_in(dtype) for dtype in MODES["torchrec"]}


def build_plain(work: dict[str, Any]) -> dict[str, Callable[[int], float]]:
    import torch
    from torch import nn

    def mlp(widths: list[int], last_relu: bool) -> nn.Sequential:
        layers: list[nn.Module] = []
        for i, (inside, outside) in enumerate(itertools.pairwise(widths)):
            layers.append(nn.Linear(inside, outside))
            if last_relu or i + 2 < len(widths):
                layers.append(nn.ReLU())
        return nn.Sequential(*layers)

    n, dim = work["tables"] + 1, work["dim"]
    bags = nn.ModuleList(nn.EmbeddingBag(work["rows"], dim, mode="sum", sparse=True) for _ in range(n - 1))
    bottom = mlp([work["n_dense"], *work["bottom"]], True)
    top = mlp([dim + n * (n - 1) // 2, *work["top"]], False)
    rows, columns = torch.tril_indices(n, n, -1)

    def head(dense: Any, pooled: list[Any]) -> Any:
        x = bottom(dense)
        fields = torch.stack([x, *[p.to(x.dtype) for p in pooled]], dim=1)
        products = torch.bmm(fields, fields.transpose(1, 2))[:, rows, columns]
        return top(torch.cat([x, products], dim=1)).squeeze(1)

    optimizer = torch.optim.SGD([*bottom.parameters(), *top.parameters()], lr=0.01, fused=True)
    sparse_optimizer = torch.optim.SGD(bags.parameters(), lr=0.01)
    criterion = nn.BCEWithLogitsLoss()
    batches = raw_batches(work)
    compiled = torch.compile(head)

    def step_in(mode: str) -> Callable[[int], float]:
        function = compiled if mode.startswith("compiled") else head

        def step(i: int) -> float:
            dense, ids, labels = batches[i % len(batches)]
            offsets = torch.arange(len(labels))
            by_feature = ids.view(n - 1, -1)
            with torch.autocast("cpu", torch.bfloat16, enabled=mode.endswith("bf16")):
                pooled = [bag(by_feature[f], offsets) for f, bag in enumerate(bags)]
                logits = function(dense, pooled)
            loss = criterion(logits.float(), labels)
            optimizer.zero_grad()
            sparse_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sparse_optimizer.step()
            return float(loss.detach())

        return step

    return {mode: step_in(mode) for mode in MODES["plain"]}


# ---------------------------------------------------------------------------------------------------- parent's side


def compare(args: argparse.Namespace, work: dict[str, Any], peer: str) -> dict[str, list[float]]:
    """Seconds a step by round of ours and of `peer`, measured in turn; both end before this returns."""
    pythons = {"ours": None, peer: args.peer_python if peer == "torchrec" else None}
    contestants: dict[str, Callable[[int], list[float]]] = {}
    workers = [Worker(__file__, python) for python in pythons.values()]
    try:
        for kind, worker in zip(pythons, workers, strict=True):
            for mode in worker.call("build", kind=kind, work=work):
                if mode in args.modes:
                    contestants[f"{kind} {mode}"] = _runner(worker, mode, args)
        for name, contestant in list(contestants.items()):  # warm up: compilation, allocators, thread pools
            try:
                contestant(0)
            except WorkerError as error:
                print(f"{name}: left out, it does not run here:\n{error}", file=sys.stderr)
                del contestants[name]
        return measure(contestants, args.rounds, lambda line: print(line, file=sys.stderr))
    finally:
        for worker in workers:
            worker.close()


def _runner(worker: Worker, mode: str, args: argparse.Namespace) -> Callable[[int], list[float]]:
    def contestant(round_: int) -> list[float]:
        result: list[float] = worker.call(
            "run", mode=mode, first=round_ * (args.steps + 1), steps=args.steps, seconds=args.seconds
        )
        return result

    return contestant


def report(results: dict[str, dict[str, list[float]]], batch: int) -> tuple[str, list[dict[str, Any]]]:
    """A table and the same as records: each contestant against the fp32 of the peer it was measured beside."""
    records = []
    for peer, seconds in results.items():
        base = seconds[f"{peer} fp32"] if f"{peer} fp32" in seconds else next(iter(seconds.values()))
        for name, values in seconds.items():
            middle, low, high = ratio(values, base)
            records.append(
                {
                    "beside": peer,
                    "name": name,
                    "ms": statistics.median(values) * 1e3,
                    "samples_per_s": batch / statistics.median(values),
                    "ratio": middle,
                    "ratio_quartiles": [low, high],
                    "noise": noise(values),
                    "rounds_ms": [v * 1e3 for v in values],
                }
            )
    rows = [
        [
            f"{r['name']}",
            f"{r['ms']:.1f}",
            f"{r['samples_per_s']:,.0f}",
            f"{r['ratio']:.2f}x {r['beside']} fp32",
            f"{r['ratio_quartiles'][0]:.2f}-{r['ratio_quartiles'][1]:.2f}",
            f"{r['noise'] * 100:.0f} %",
        ]
        for r in records
    ]
    return format_table(["DLRM", "ms a step", "samples/s", "median ratio", "quartiles", "noise"], rows), records


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter that has torchrec (default: this one, if it has it)")
    parser.add_argument("--peers", nargs="*", default=["torchrec", "plain"], choices=["torchrec", "plain"])
    parser.add_argument("--modes", nargs="+", default=MODES["plain"], choices=MODES["plain"], help="default: all")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each table")
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--n-dense", type=int, default=13)
    parser.add_argument("--bottom", type=int, nargs="+", default=[512, 256, 64])
    parser.add_argument("--top", type=int, nargs="+", default=[512, 512, 256, 1])
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=64, help="distinct batches")
    parser.add_argument("--alpha", type=float, default=1.05, help="exponent of the ids' power law")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=16, help="timed steps a round")
    parser.add_argument("--seconds", type=float, default=2.5, help="no more steps in a round after this long")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (0: torch's choice)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args(argv)
    if args.quick:
        args.rows, args.tables, args.dim, args.batch, args.batches = 1000, 4, 16, 64, 4
        args.bottom, args.top, args.rounds, args.steps = [32, 16], [32, 1], 2, 2
        args.modes = [mode for mode in args.modes if not mode.startswith("compiled")]
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    keys = ("rows", "tables", "dim", "n_dense", "bottom", "top", "batch", "batches", "alpha", "threads", "seed")
    work = {key: getattr(args, key) for key in keys}
    results = {}
    for peer in args.peers:
        if peer == "torchrec" and not have_module(args.peer_python, "torchrec"):
            print("torchrec: not installed in the peer's interpreter, left out (--peer-python)", file=sys.stderr)
            continue
        results[peer] = compare(args, work, peer)
    table, records = report(results, args.batch)
    print(
        f"{args.tables} tables x {args.rows:,} rows x {args.dim}, {args.n_dense} dense, batch {args.batch}, "
        f"{args.batches} batches, power law {args.alpha}"
    )
    print(table)
    if not {"avx512_bf16", "amx_bf16", "bf16", "sve"} & set(machine().get("extensions", [])):
        print("This processor has no bf16 matrix instructions: bf16 rows are emulated.")
    if args.json:
        write_json(args.json, {"workload": work, "results": records})


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        serve({"build": build, "run": run})
    else:
        main(sys.argv[1:])
