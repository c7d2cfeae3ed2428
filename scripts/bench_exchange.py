"""What sharding costs: bytes and seconds of a step of the sharded DLRM on 1, 2, 4 processes of one thread, over gloo.

A step is the training loop's own, in the order ``sync``: inputs from raw arrays, ids to their owners, rows back,
forward and backward, sums of dense gradients and of rows, updates. Each rank has its own batch with power-law ids; rows
are spread by hash bucket (``--placement table_wise``: table t on rank t mod ranks).

* bytes: what the ledger counts a rank and step on each lane, beside the bytes by formula from the ids alone (rows:
  distinct remote ids x 4 bytes where they fit, distinct remote rows x width of the wire there and back; pooled: remote
  ids, lengths and sums of bags). They must be equal: the script ends with status 1 where they are not.
* seconds: a step, and how long the main thread waited in it, without a link and with emulated ones: a rank then sleeps
  in its lanes as long as its bytes take at so many Gb/s each way, with 50 us latency. Emulated numbers say so.
* TorchRec's DLRM beside it where --peer-python has it: 2 processes on gloo, table_wise (on CPU its planner offers
  table_wise and column_wise only), its bytes counted at all_to_all_single. Its bytes by count for every number of
  ranks, table_wise and row_wise: every id of the batch travels as int64 with int32 lengths, sums of bags in fp32
  come back, their gradients go the other way; nothing is deduplicated. Of its dense gradients, reduced by gloo itself,
  nothing is counted.

    python scripts/bench_exchange.py --peer-python /path/to/python-with-torchrec --json exchange.json
    python scripts/bench_exchange.py --quick

Processes share the machine's cores: step times of more processes than cores say little but for the links' share.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import _exchange_work
from _bench import Worker, WorkerError, format_table, have_module, serve, write_json
from _exchange_work import LANES, counted, dense_bytes

TRAFFIC, WIRES = ("rows", "pooled"), ("fp32", "fp16", "bf16", "int8")
TIMEOUT = "600"  # seconds: building a model is not a rank that hangs


class Group:
    """Ranks that answer calls together."""

    def __init__(self, kind: str, world: int, work: dict[str, Any], python: str | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = {"OMP_NUM_THREADS": "1", "EMBCACHE_TIMEOUT": TIMEOUT, "PYTHONWARNINGS": "ignore"}
        here = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        alone = {} if world == 1 and kind == "ours" else here
        self.workers = [
            Worker(
                __file__,
                python,
                env={**common, **alone, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if alone else {})},
            )
            for rank in range(world)
        ]
        self._pool = ThreadPoolExecutor(world)
        self.call("join", kind=kind, work=work)

    def call(self, function: str, **arguments: Any) -> list[Any]:
        """What each rank answers. Where one fails the others are ended, since they would wait for it."""
        pending = [self._pool.submit(worker.call, function, **arguments) for worker in self.workers]
        try:
            return [future.result() for future in pending]
        except WorkerError:
            for worker in self.workers:
                worker.process.kill()
            raise

    def close(self) -> None:
        """End the ranks."""
        list(self._pool.map(Worker.close, self.workers))
        self._pool.shutdown()


def record(answers: Sequence[dict[str, Any]], steps: int, case: dict[str, Any], dense: int) -> dict[str, Any]:
    """Of all ranks' answers: seconds of the slowest rank by step, means over ranks of the rest, by step."""
    world = len(answers)
    slowest = [max(seconds) for seconds in zip(*(a["seconds"] for a in answers), strict=True)]
    by_formula = {name: sum(a["formula"][name] for a in answers) for name in LANES[:3]}
    by_ledger = {name: sum(a["bytes"].get(name, 0) for a in answers) for name in LANES}
    if case["name"] == "ours":
        by_formula["dense"] = steps * dense_bytes(dense, world)
    if not all(a["finite"] for a in answers):
        raise RuntimeError(f"{case}: a loss is not finite")
    waited = {name: sum(a["waited"].get(name, 0.0) for a in answers) for name in LANES}
    share = world * steps
    return {
        **case,
        "world": world,
        "ms": statistics.median(slowest) * 1e3,
        "steps_ms": [s * 1e3 for s in slowest],
        "waited_ms": {name: value / share * 1e3 for name, value in waited.items()},
        "bytes": {name: value / share for name, value in by_ledger.items()},
        "formula": {name: value / share for name, value in by_formula.items()},
        "equal": all(by_ledger[name] == value for name, value in by_formula.items()),
        "header_bytes": sum(a["headers"] for a in answers) / share,
        "stages_ms": {name: s / steps * 1e3 for name, s in answers[0]["stages"].items()},
    }


def ours(args: argparse.Namespace, work: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """Every kind of traffic, wire and link on so many ranks; of one rank, which sends nothing, one of each."""
    records = []
    cases = list(itertools.product(args.traffic, args.wires))[: None if world > 1 else 1]
    links = args.links if world > 1 else [0.0]
    group = Group("ours", world, work)
    try:
        for traffic, wire in cases:
            dense = group.call("build", placement=args.placement, traffic=traffic, wire=wire)[0]
            for k, link in enumerate(links):
                answers = group.call(
                    "run", warm=args.warm if k == 0 else 1, steps=args.steps, gigabits=link if link else None
                )
                case = {"name": "ours", "placement": args.placement, "traffic": traffic, "wire": wire, "gigabits": link}
                records.append(record(answers, args.steps, case, dense + 1))  # and the one that DDP needs (dense.py)
                print(f"{world} ranks, {traffic} {wire}, {_link(link)}: {records[-1]['ms']:.1f} ms", file=sys.stderr)
    finally:
        group.close()
    return records


def torchrec(args: argparse.Namespace, work: dict[str, Any]) -> list[dict[str, Any]]:
    """TorchRec on two ranks, or nothing and why."""
    if not have_module(args.peer_python, "torchrec"):
        print("torchrec: not installed in the peer's interpreter, counted only (--peer-python)", file=sys.stderr)
        return []
    group = None
    try:
        group = Group("torchrec", 2, work, args.peer_python)
        dense = group.call("build", placement="table_wise")[0]
        answers = group.call("run", warm=args.warm, steps=args.steps, gigabits=None)
        case = {"name": "torchrec", "placement": "table_wise", "traffic": "pooled", "wire": "fp32", "gigabits": 0.0}
        return [record(answers, args.steps, case, dense)]
    except WorkerError as error:
        print(f"torchrec: left out, it does not run here:\n{error}", file=sys.stderr)
        return []
    finally:
        if group is not None:
            group.close()


def _link(gigabits: float) -> str:
    return f"{gigabits:g} Gb/s emulated" if gigabits else "no link"


def _case(r: dict[str, Any]) -> str:
    return f"{r['name']} {r['placement']} {r['traffic']} {r['wire']}"


def bytes_table(records: Sequence[dict[str, Any]], by_count: Sequence[dict[str, Any]]) -> str:
    """kB a rank and step by lane: the ledger's and the formula's, which do not depend on links."""
    rows, seen = [], set()
    for r in records:
        key = (_case(r), r["world"])
        if key in seen or (r["world"] == 1 and r["name"] == "ours"):
            continue
        seen.add(key)
        cells = [
            f"{r['bytes'][name] / 1e3:,.1f} / {r['formula'][name] / 1e3:,.1f}" if name in r["formula"] else "-"
            for name in LANES
        ]
        same = all(o["equal"] for o in records if (_case(o), o["world"]) == key)
        rows.append([_case(r), r["world"], *cells, "yes" if same else "NO"])
    for c in by_count:
        cells = [f"{c['formula'][name] / 1e3:,.1f}" for name in LANES[:3]]
        rows.append([f"torchrec {c['placement']} by count", c["world"], *cells, "-", "-"])
    return format_table(["kB a rank and step: counted / by formula", "ranks", *LANES, "equal"], rows)


def time_table(records: Sequence[dict[str, Any]], links: Sequence[float]) -> str:
    """ms a step (ms the main thread waited in it) by link."""
    found = {(_case(r), r["world"], r["gigabits"]): r for r in records}
    rows = []
    for case, world in dict.fromkeys((_case(r), r["world"]) for r in records):
        cells = []
        for link in links:
            r = found.get((case, world, link))
            cells.append("-" if r is None else f"{r['ms']:.1f} ({sum(r['waited_ms'].values()):.1f})")
        rows.append([case, world, *cells])
    return format_table(["ms a step (of them waited)", "ranks", *map(_link, links)], rows)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter that has torchrec (default: this one, if it has it)")
    parser.add_argument("--no-peer", action="store_true", help="do not run torchrec, count its bytes only")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--links", type=float, nargs="+", default=[0, 1, 10, 100], help="Gb/s; 0: no emulated link")
    parser.add_argument("--traffic", nargs="+", default=list(TRAFFIC), choices=TRAFFIC)
    parser.add_argument("--wires", nargs="+", default=list(WIRES), choices=WIRES)
    parser.add_argument("--placement", default="row_wise", choices=["row_wise", "table_wise"])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each table")
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--n-dense", type=int, default=13)
    parser.add_argument("--bottom", type=int, nargs="+", default=[512, 256, 64])
    parser.add_argument("--top", type=int, nargs="+", default=[512, 512, 256, 1])
    parser.add_argument("--batch", type=int, default=2048, help="samples a rank")
    parser.add_argument("--bag", type=int, default=1, help="ids of a sample and table")
    parser.add_argument("--batches", type=int, default=16, help="distinct batches of a rank")
    parser.add_argument("--alpha", type=float, default=1.05, help="exponent of the ids' power law")
    parser.add_argument("--warm", type=int, default=4, help="steps of each model before any is timed")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each model and link")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args(argv)
    if args.quick:
        args.rows, args.tables, args.dim, args.batch, args.batches = 1000, 4, 16, 64, 4
        args.bottom, args.top, args.warm, args.steps = [32, 16], [32, 1], 1, 3
        args.worlds, args.links = [w for w in args.worlds if w <= 2], [g for g in args.links if g in (0, 10)]
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    keys = ("rows", "tables", "dim", "n_dense", "bottom", "top", "batch", "bag", "batches", "alpha", "seed")
    work = {key: getattr(args, key) for key in keys}
    records: list[dict[str, Any]] = []
    for world in args.worlds:
        records += ours(args, work, world)
    if not args.no_peer:
        records += torchrec(args, work)
    by_count = [
        {"placement": kind, "world": world, "formula": counted(kind, work, world)}
        for kind in ("table_wise", "row_wise")
        for world in args.worlds
        if world > 1
    ]
    print(
        f"{args.tables} tables x {args.rows:,} rows x {args.dim}, batch {args.batch} a rank, {args.bag} ids a sample "
        f"and table, power law {args.alpha}, {os.cpu_count()} cores"
    )
    print(bytes_table(records, by_count), end="\n\n")
    print(time_table(records, args.links))
    if any(args.links):
        print("Links are emulated: lanes sleep as long as their bytes would take.")
    if args.json:
        write_json(args.json, {"workload": work, "results": records, "torchrec_by_count": by_count})
    return 0 if all(r["equal"] for r in records if r["name"] == "ours") else 1


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        serve({name: getattr(_exchange_work, name) for name in ("join", "build", "run")})
    else:
        sys.exit(main(sys.argv[1:]))
