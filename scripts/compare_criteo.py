"""Quality on real Criteo rows: our models beside TorchRec's DLRM, paired over seeds.

The log is preprocessed once (a vocabulary of frequent values a feature, the last fifth of the rows as test set). For
each seed all contestants see the same batches in the same order, with the same sizes, epochs, initial distribution
of embeddings (uniform on +-sqrt(1 / rows)), row-wise Adagrad on embeddings and Adagrad on dense layers. Dense layers
start as each implementation starts them. Reported: test AUC by seed, its mean, and the paired difference to TorchRec's
DLRM with its standard error.

    python scripts/compare_criteo.py --data terabyte_sample.tsv.gz --peer-python /path/to/python-with-torchrec

On few clicks the test set itself is the larger uncertainty: an AUC of n clicks is known to about 0.3 / sqrt(n).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _bench import Worker, format_table, have_module, serve, write_json

ROOT = Path(__file__).resolve().parent.parent

# ---------------------------------------------------------------------------------------------------- worker's side


def train(kind: str, arrays: str, seed: int, work: dict[str, Any]) -> list[float]:
    """Trains the contestant `kind` on the arrays' train rows; returns the logits of the test rows."""
    import torch

    torch.set_num_threads(work["threads"])
    data = np.load(arrays)
    torch.manual_seed(seed)
    step, predict = (build_torchrec if kind == "torchrec" else build_ours)(kind, data["rows"].tolist(), seed, work)
    dense, ids, labels = (torch.from_numpy(data[name]) for name in ("dense", "ids", "labels"))
    n, size = int(data["n_train"]), work["batch"]
    order = np.random.default_rng(seed)
    for _ in range(work["epochs"]):
        rows = torch.from_numpy(order.permutation(n))
        for start in range(0, n, size):
            part = rows[start : start + size]
            step(dense[part], ids[part].t().reshape(-1), labels[part])
    with torch.no_grad():
        parts = [slice(i, i + 4096) for i in range(n, len(labels), 4096)]
        return torch.cat([predict(dense[part], ids[part].t().reshape(-1)) for part in parts]).tolist()


def build_ours(kind: str, rows: list[int], seed: int, work: dict[str, Any]) -> tuple[Callable, Callable]:
    import torch

    sys.path.insert(0, str(ROOT))
    import embcache as ec
    from dlrm.models import build

    features = [f"c{i}" for i in range(len(rows))]
    rule = ec.optim.RowWiseAdagrad(lr=work["lr"], eps=work["eps"])
    tables = [
        ec.TableConfig(f"t{i}", n, work["dim"], features=[f"c{i}"], optimizer=rule, init=ec.init.Uniform(), seed=seed)
        for i, n in enumerate(rows)
    ]
    sizes: dict[str, Any] = {"bottom_mlp": work["bottom"], "top_mlp": work["top"]}
    if kind == "dcnv2":
        sizes = {"deep_mlp": work["top"][:-1], "cross_layers": 2}
    model = build(kind, tables, work["n_dense"], **sizes)
    sparse_optimizer = ec.optim.SparseOptimizer(model)
    return _functions(
        lambda dense, ids: model(dense, _jagged(ec.KeyedJaggedTensor, features, ids)),
        [torch.optim.Adagrad(model.parameters(), lr=work["dense_lr"], eps=work["eps"]), sparse_optimizer],
    )


def build_torchrec(kind: str, rows: list[int], seed: int, work: dict[str, Any]) -> tuple[Callable, Callable]:
    import torch
    import torchrec.optim
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    features = [f"c{i}" for i in range(len(rows))]
    collection = FusedEmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=n, embedding_dim=work["dim"], feature_names=[f"c{i}"])
            for i, n in enumerate(rows)
        ],
        optimizer_type=torchrec.optim.RowWiseAdagrad,
        optimizer_kwargs={"lr": work["lr"], "eps": work["eps"]},
        device=torch.device("cpu"),
    )
    model = DLRM(collection, work["n_dense"], work["bottom"], work["top"])
    dense = [p for name, p in model.named_parameters() if "embedding_bag" not in name]
    return _functions(
        lambda dense, ids: model(dense, _jagged(KeyedJaggedTensor, features, ids)).squeeze(1),
        [torch.optim.Adagrad(dense, lr=work["dense_lr"], eps=work["eps"])],
    )


def _jagged(cls: Any, features: list[str], ids: Any) -> Any:
    import torch

    return cls.from_lengths_sync(features, ids, torch.ones(ids.numel(), dtype=torch.int32))


def _functions(forward: Callable, optimizers: list[Any]) -> tuple[Callable, Callable]:
    import torch

    def step(dense: Any, ids: Any, labels: Any) -> None:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(forward(dense, ids), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    return step, forward


# ---------------------------------------------------------------------------------------------------- parent's side


def prepare(data: str, folder: Path, ids: str) -> tuple[Path, dict[str, Any]]:
    """Preprocesses the log and saves it as plain arrays that any interpreter with numpy reads."""
    sys.path.insert(0, str(ROOT))
    from dlrm.data import preprocess

    cache = preprocess(data, folder / "cache", "criteo", ids=ids, split="last:0.2")
    train_rows, test_rows = (np.asarray(cache.splits[name]) for name in ("train", "test"))
    rows = np.concatenate([train_rows, test_rows])
    arrays = {
        "dense": np.asarray(cache.dense)[rows],
        "ids": np.asarray(cache.ids)[rows].astype(np.int64),
        "labels": np.asarray(cache.labels)[rows],
        "rows": np.array([cache.num_embeddings[feature] for feature in cache.features]),
        "n_train": np.array(len(train_rows)),
    }
    path = folder / "arrays.npz"
    np.savez(path, **arrays)
    return path, {"labels": arrays["labels"][len(train_rows) :], "n_dense": cache.n_dense, "n_train": len(train_rows)}


def summary(aucs: dict[str, list[float]], base: str) -> list[list[str]]:
    """Rows of the table: contestant, AUC by seed, mean, paired difference to `base` with its standard error.

    >>> summary({"a": [0.7, 0.72], "b": [0.69, 0.70]}, "b")[0][-2:]
    ['+0.0150', '0.0050']
    """
    rows = []
    for name, values in aucs.items():
        row = [name, " ".join(f"{v:.4f}" for v in values), f"{statistics.mean(values):.4f}", "", ""]
        if name != base and base in aucs:
            differences = [a - b for a, b in zip(values, aucs[base], strict=True)]
            row[3] = f"{statistics.mean(differences):+.4f}"
            if len(differences) > 1:
                row[4] = f"{statistics.stdev(differences) / math.sqrt(len(differences)):.4f}"
        rows.append(row)
    return rows


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="Criteo log: tab-separated text, plain or gz, or Parquet")
    parser.add_argument("--peer-python", help="interpreter that has torchrec (default: this one, if it has it)")
    parser.add_argument("--out", help="keep the preprocessed log here (default: a temporary folder)")
    parser.add_argument("--ids", default="vocab:2", help="how ids become rows, as in scripts/preprocess.py")
    parser.add_argument("--models", nargs="+", default=["dlrm", "dcnv2"], choices=["dlrm", "dcnv2"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--bottom", type=int, nargs="+", default=[128, 64, 16])
    parser.add_argument("--top", type=int, nargs="+", default=[128, 64, 1])
    parser.add_argument("--lr", type=float, default=0.02, help="of embeddings")
    parser.add_argument("--dense-lr", type=float, default=0.01)
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--threads", type=int, default=1, help="torch threads: small layers gain nothing from more")
    parser.add_argument("--json", help="write the results here")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as temporary:
        arrays, data = prepare(args.data, Path(args.out or temporary), args.ids)
        keys = ("epochs", "batch", "dim", "bottom", "top", "lr", "dense_lr", "eps", "threads")
        work = {**{key: getattr(args, key) for key in keys}, "n_dense": data["n_dense"]}
        aucs = compare(args, str(arrays), data["labels"], work)
    clicks = int(data["labels"].sum())
    print(
        f"{data['n_train']:,} train rows, {len(data['labels']):,} test rows with {clicks} clicks, {args.epochs} epochs"
    )
    rows = summary(aucs, "torchrec dlrm")
    print(format_table(["", "test AUC by seed", "mean", "minus torchrec dlrm", "standard error"], rows))
    if args.json:
        write_json(args.json, {"work": work, "auc": aucs, "test_clicks": clicks})


def compare(args: argparse.Namespace, arrays: str, labels: np.ndarray, work: dict[str, Any]) -> dict[str, list[float]]:
    """Test AUC by contestant and seed."""
    from embcache.train.metrics import auc

    contestants: dict[str, tuple[str, Worker]] = {}
    workers = [Worker(__file__)]
    contestants = {f"ours {model}": (model, workers[0]) for model in args.models}
    if have_module(args.peer_python, "torchrec"):
        workers.append(Worker(__file__, args.peer_python))
        contestants["torchrec dlrm"] = ("torchrec", workers[1])
    else:
        print("torchrec: not installed in the peer's interpreter, left out (--peer-python)", file=sys.stderr)
    result: dict[str, list[float]] = {name: [] for name in contestants}
    try:
        for seed in range(args.seeds):
            for name, (kind, worker) in contestants.items():
                logits = np.array(worker.call("train", kind=kind, arrays=arrays, seed=seed, work=work))
                result[name].append(float(auc(labels, logits)))
                print(f"seed {seed} {name}: {result[name][-1]:.4f}", file=sys.stderr)
    finally:
        for worker in workers:
            worker.close()
    return result


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        serve({"train": train})
    else:
        main(sys.argv[1:])
