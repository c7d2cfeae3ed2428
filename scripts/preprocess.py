"""Turn click logs (text, .gz, Parquet; one or many files) into a column cache that training maps into memory.

    python scripts/preprocess.py --schema criteo --data day_0.gz day_1.gz --out cache --ids vocab:10 --split last:0.1
    python scripts/preprocess.py --schema mine.yaml --train a.parquet --test b.parquet --out cache --ids hash:1000000

Kill it whenever you like: the same command goes on where it stopped, and the result is the same to the last byte.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrm.data import ColumnCache, Limits, preprocess
from dlrm.data.pipeline import input_errors


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--schema", required=True, help="criteo, avazu, or a YAML/JSON schema file")
    p.add_argument("--data", nargs="+", default=[], metavar="FILE", help="input files, in order")
    for name in ("train", "valid", "test"):
        p.add_argument(
            f"--{name}", nargs="+", default=[], metavar="FILE", help=f"{name} files, instead of --data/--split"
        )
    p.add_argument("--out", required=True, type=Path, help="folder of the cache (made here)")
    p.add_argument("--ids", default="vocab:2", help="vocab:MIN_COUNT, hash:SIZE or raw (default vocab:2)")
    p.add_argument("--split", default="last:0.1", help="last:V,T  random:V,T,SEED  time:V,T (days)  (default last:0.1)")
    p.add_argument("--max-bad-rows", type=int, default=0, help="malformed lines to leave out and count (default 0)")
    p.add_argument("--threads", type=int, default=2, help="parsing threads (default 2)")
    p.add_argument("--memory-mb", type=int, default=1024, help="budget of the vocabulary stages (default 1024)")
    p.add_argument("--chunk-mb", type=int, default=16, help="input read at a time (default 16)")
    return p


class Meter:
    """A line of progress: stage, rows, share done, rows a second."""

    def __init__(self) -> None:
        self.begun = self.last = time.monotonic()
        self.stage, self.shown = "", 0.0

    def __call__(self, stage: str, rows: int, fraction: float) -> None:
        now = time.monotonic()
        if stage != self.stage:
            self._end()
            self.stage, self.begun, self.shown = stage, self.last, 0.0
        self.last = now
        if now - self.shown < 0.5 and fraction < 1:
            return
        self.shown = now
        speed = rows / max(now - self.begun, 1e-9)
        sys.stderr.write(f"\r{stage:6s} {rows:>13,} rows {100 * fraction:5.1f} %  {speed:>11,.0f} rows/s ")
        sys.stderr.flush()

    def _end(self) -> None:
        if self.stage:
            sys.stderr.write("\n")

    close = _end


def summary(cache: ColumnCache, seconds: float) -> str:
    """What was made, in a few lines."""
    rows, bad = cache.rows, cache.info["bad_rows"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    size = sum(f.stat().st_size for f in Path(cache.path or ".").iterdir())
    tables = [n for n in cache.num_embeddings.values() if n is not None]
    lines = [
        f"rows         {rows:,}" + (f"  (clicks {100 * cache.info['click_rate']:.2f} %)" if rows else ""),
        f"bad rows     {bad:,}",
        "splits       " + ", ".join(f"{n} {len(r):,}" for n, r in cache.splits.items()),
        f"features     {cache.n_dense} dense, {len(cache.features)} sparse, "
        + (f"{sum(tables):,} table rows" if tables else "raw ids"),
        f"time         {seconds:.1f} s, {rows / max(seconds, 1e-9):,.0f} rows/s",
        f"peak memory  {peak / 2**30:.2f} GiB",
        f"cache        {size / 2**20:,.1f} MiB in {cache.path}",
    ]
    return "\n".join(lines + [f"  left out: {report}" for report in cache.info["bad_examples"]])


def main(argv: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    args = parser().parse_args(argv)
    named = {n: getattr(args, n) for n in ("train", "valid", "test") if getattr(args, n)}
    if bool(named) == bool(args.data):
        parser().error("give either --data or --train/--valid/--test")
    begun, meter = time.monotonic(), Meter()
    try:
        limits = Limits(args.threads, args.memory_mb << 20, args.chunk_mb << 20, args.max_bad_rows)
        split = "files" if named else args.split
        cache = preprocess(named or args.data, args.out, args.schema, args.ids, split, limits=limits, progress=meter)
    except input_errors() as error:
        meter.close()
        print(f"error: {error}", file=sys.stderr)
        return 1
    meter.close()
    print(summary(cache, time.monotonic() - begun))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # nothing here uses torch's threads
    sys.exit(main())
