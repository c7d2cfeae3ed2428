"""Small logs for the tests of the data path, and an oracle that reads them with nothing but the standard library."""

from __future__ import annotations

import csv
import gzip
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np

from dlrm.data import Categorical, Dense, Label, Schema, SyntheticConfig, SyntheticLog

SMALL = SyntheticConfig(rows=4000, tables=(300, 40, 5), n_dense=3, missing=0.2, seed=3)


def small_log(folder: Path, config: SyntheticConfig = SMALL) -> tuple[Path, Schema]:
    """A synthetic TSV and its schema."""
    log, path = SyntheticLog(config), folder / "log.tsv"
    log.write(path)
    return path, log.schema


def finished(folder: Path) -> dict[str, bytes]:
    """Every file of a cache."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def same_but_inputs(a: Path, b: Path) -> None:
    """Two caches of the same rows from differently named or packed inputs: equal but for the manifest's job."""
    one, two = finished(a), finished(b)
    assert one.keys() == two.keys()
    assert all(one[n] == two[n] for n in one if n != "manifest.json")


def read_columns(path: Path, schema: Schema) -> dict[str, list[str]]:
    """All columns as texts."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="") as f:
        rows = list(csv.reader(f, delimiter=schema.delimiter, quoting=csv.QUOTE_NONE))
    names = rows.pop(0) if schema.header else schema.columns
    return {n: [r[i] for r in rows] for i, n in enumerate(names)}


def dense_oracle(texts: list[str]) -> np.ndarray:
    """float32: log1p of the value clipped at 0, missing = 0."""
    return np.array([math.log1p(max(float(t), 0.0)) if t else 0.0 for t in texts], np.float32)


def vocabulary_oracle(texts: list[str], train: range, min_count: int, base: int = 16) -> dict[str, int]:
    """Text -> row: by falling count in the training rows, then by signed value; rows from 2."""

    def signed(t: str) -> int:
        v = int(t, base)
        return v - 2**64 if v >= 2**63 else v

    counts = Counter(texts[i] for i in train if texts[i])
    kept = sorted((t for t, c in counts.items() if c >= min_count), key=lambda t: (-counts[t], signed(t)))
    return {t: 2 + i for i, t in enumerate(kept)}


def ids_oracle(texts: list[str], rows: dict[str, int]) -> np.ndarray:
    """Rows of a column: 0 unknown, 1 missing."""
    return np.array([rows.get(t, 0) if t else 1 for t in texts])


def bag_csv(folder: Path, rows: int = 500, seed: int = 0) -> tuple[Path, Schema, list[list[str]]]:
    """A CSV with a header, a quoted string id, a bag of ids and another table shared with a single id."""
    rng = random.Random(seed)
    path, bags = folder / "bags.csv", []
    with path.open("w") as f:
        f.write("price,who,items,item,clicked,noise\n")
        for _ in range(rows):
            bag = [str(rng.randrange(-5, 40)) for _ in range(rng.choice([0, 0, 1, 3, 7]))]
            bags.append(bag)
            who = f'"name, {rng.randrange(30)}"' if rng.random() < 0.5 else f"n{rng.randrange(30)}"
            price = rng.choice(["", "NA", f"{rng.uniform(-3, 90):.4f}"])
            f.write(f"{price},{who},{'|'.join(bag)},{rng.randrange(-5, 40)},{rng.randrange(2)},x\n")
    schema = Schema(
        Label("clicked"),
        (Dense("price", "identity"),),
        (
            Categorical("who"),
            Categorical("items", "decimal", separator="|", table="item"),
            Categorical("item", "decimal"),
        ),
        missing=("NA",),
        quote='"',
    )
    return path, schema, bags
