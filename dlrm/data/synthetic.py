"""SyntheticLog: a click log with long-tailed ids, a planted model, and the best AUC anybody could reach on it.

A click is drawn with probability ``sigmoid(scale * score + bias)`` where ``score`` adds an effect for each id, dot
products of latent factors for some pairs of tables, and a curved effect for each dense value. Ids follow the power law
of NVIDIA's benchmarks, ``floor((u (N^g - 1) + 1)^(1/g))`` with ``g = 1 - alpha``, scattered by a fixed permutation.
Every row is a pure function of (config, row number): chunks, threads and order of generation do not matter.
Nothing is stored, so tables and rows may be as many as one likes. (Powers and exponentials come from libm, so another
platform may draw a neighbouring id once in many millions.)

The score uses only what a row shows, so the true probabilities are the best predictor there is; ranking the drawn
labels of a split by them gives the best AUC, and likewise the best log loss, in expectation over labels.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dlrm.data import synthetic_kernels as sk
from dlrm.data.batch import ClickBatch
from dlrm.data.hashing import mix_python
from dlrm.data.schema import Categorical, Dense, Label, Schema, criteo
from dlrm.data.splits import last_ranges
from dlrm.data.transform import log1p_clipped
from embcache.jagged import KeyedJaggedTensor
from embcache.kernels.jit import kernel

DEFAULT_TABLES = (100_000, 50_000, 20_000, 10_000, 10_000, 5_000, 5_000, 2_000, 2_000, 2_000, 1_000, 1_000, 1_000, 500,
                  500, 300, 200, 100, 100, 50, 50, 30, 20, 10, 4, 3)  # fmt: skip
CHUNK = 32_768
OWN, PAIRS, DENSE = 0.67, 0.08, 0.25  # shares of the score's variance
PAIR_MAX = 200  # tables up to this size interact
FADE, CURVE = 0.35, 0.25  # an id's effect ~ size**-FADE; a dense value's curve against its slope


@dataclass(frozen=True)
class SyntheticConfig:
    """What to generate. ``tables``: distinct ids of each; ``alpha``: skew (one, or one a table); ``spread``: standard
    deviation of the true logit; ``drift``: share of every table's ids that the popularity order moves by in a million
    rows; ``missing``: share of absent values in every third column; ``valid``/``test``: last fractions of the rows."""

    rows: int = 1_000_000
    tables: tuple[int, ...] = DEFAULT_TABLES
    n_dense: int = 13
    alpha: float | tuple[float, ...] = 1.15
    click_rate: float = 0.25
    spread: float = 1.7
    pairs: int = 6
    rank: int = 2
    drift: float = 0.0
    missing: float = 0.1
    valid: float = 0.0
    test: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows < 0 or self.n_dense < 0 or self.pairs < 0 or self.rank < 1 or any(n < 1 for n in self.tables):
            raise ValueError("rows, n_dense and pairs must be >= 0, rank and every table's size >= 1")
        if not 0 < self.click_rate < 1 or not 0 <= self.missing < 1 or self.spread < 0 or self.drift < 0:
            raise ValueError("click_rate in (0, 1), missing in [0, 1), spread and drift >= 0 expected")
        if isinstance(self.alpha, tuple) and len(self.alpha) != len(self.tables):
            raise ValueError(f"alpha: {len(self.alpha)} values for {len(self.tables)} tables")


class Block(NamedTuple):
    """Rows as drawn: dense int64 ``[n, D]`` (MISSING_DENSE where absent), ids int64 ``[n, F]`` (-1 where absent,
    not yet scattered), labels float32 ``[n]``, probabilities float64 ``[n]``."""

    dense: np.ndarray
    ids: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray


class SyntheticLog:
    """The log of a config. Also a source for :class:`dlrm.data.Loader`: batches straight from the generator.

    >>> log = SyntheticLog(SyntheticConfig(rows=1000, tables=(50, 7), n_dense=3))
    >>> log.block(np.arange(5)).ids.shape, log.features, log.num_embeddings
    ((5, 2), ('C1', 'C2'), {'C1': 51, 'C2': 8})
    """

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.model = _plant(config)
        self.scale, self.bias = _calibrate(self.model, config)
        self.schema = _schema(config)
        ranges = last_ranges(config.rows, config.valid, config.test)
        self.splits = {name: rows for name, rows in ranges.items() if len(rows)}

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the sparse features."""
        return self.schema.features

    @property
    def n_dense(self) -> int:
        """Number of dense features."""
        return self.config.n_dense

    @property
    def rows(self) -> int:
        """Number of samples."""
        return self.config.rows

    @property
    def num_embeddings(self) -> dict[str, int | None]:
        """Rows of each table when batches come straight from here: row 0 is "missing", then one for each id."""
        return {f: n + 1 for f, n in zip(self.features, self.config.tables, strict=True)}

    @property
    def tables(self) -> dict[str, str]:
        """The table of each feature: its own."""
        return {f: f for f in self.features}

    def block(self, rows: np.ndarray) -> Block:
        """Draw any rows, in any order."""
        n = rows.shape[0]
        dense = np.empty((n, self.config.n_dense), np.int64)
        ids = np.empty((n, len(self.config.tables)), np.int64)
        raw, labels, p = np.empty(n), np.empty(n, np.float32), np.empty(n)
        rows = np.ascontiguousarray(rows, np.int64)
        sk.draw_rows(self.model, rows, dense, ids, raw)
        sk.draw_labels(self.model, rows, raw, self.scale, self.bias, labels, p)
        return Block(dense, ids, labels, p)

    def gather(self, rows: np.ndarray) -> ClickBatch:
        """The batch of these rows, ids scattered over table rows."""
        block, n = self.block(rows), rows.shape[0]
        dense = torch.empty(n, self.config.n_dense)
        narrow = max(self.config.tables, default=0) < 2**31 - 1
        values = torch.empty(len(self.config.tables), n, dtype=torch.int32 if narrow else torch.int64)
        _transform(block.dense, dense.numpy())
        sk.scatter_ids(self.model, block.ids, values.numpy())
        offsets = torch.from_numpy(np.arange(values.numel() + 1))
        strides = (n,) * len(self.features)
        sparse = KeyedJaggedTensor.trusted(list(self.features), values.view(-1), None, offsets, strides)
        return ClickBatch(dense, sparse, torch.from_numpy(block.labels))

    def best(self, split: str = "test") -> dict[str, float]:
        """AUC, log loss (nats) and NE of the true probabilities on a split's drawn labels, and its click rate."""
        p, y = [], []
        for start, stop in _chunks(self.splits[split]):
            block = self.block(np.arange(start, stop))
            p.append(block.probabilities)
            y.append(block.labels)
        return _metrics(np.concatenate(p), np.concatenate(y))

    def write(
        self, path: str | Path, threads: int = 2, progress: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """Write the log as tab-separated text (gzip if the name ends in .gz) and ``<path>.json`` beside it.

        The JSON holds the config and, for each split (last fractions of the rows), the best metrics. ``progress`` is
        called with the rows written so far. Both files appear complete or not at all.
        """
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        kept: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in self.splits}
        opener = gzip.GzipFile(temporary, "wb", 1, mtime=0) if path.suffix == ".gz" else temporary.open("wb")
        with opener as out:
            for start, text, block in self._texts(threads):
                out.write(text)
                stop = start + block.labels.shape[0]
                for name, rows in self.splits.items():
                    part = slice(max(start, rows.start) - start, max(0, min(stop, rows.stop) - start))
                    kept[name].append((block.probabilities[part], block.labels[part]))
                if progress is not None:
                    progress(stop)
        best = {name: _metrics(*(np.concatenate(a) for a in zip(*parts, strict=True))) for name, parts in kept.items()}
        facts = {"rows": self.rows, "best": best, "config": dataclasses.asdict(self.config)}
        os.replace(temporary, path)
        side = path.with_name(path.name + ".json.tmp")
        side.write_text(json.dumps(facts, indent=1))
        os.replace(side, path.with_name(path.name + ".json"))
        return facts

    def _text(self, start: int, stop: int) -> tuple[int, memoryview, Block]:
        block = self.block(np.arange(start, stop))
        out = np.empty((stop - start) * (2 + 20 * self.config.n_dense + 17 * len(self.config.tables)) + 1, np.uint8)
        size = sk.format_rows(self.model, block.labels, block.dense, block.ids, out)
        return start, out[:size].data, block

    def _texts(self, threads: int) -> Iterator[tuple[int, memoryview, Block]]:
        waiting: deque[Future[tuple[int, memoryview, Block]]] = deque()
        with ThreadPoolExecutor(threads, thread_name_prefix="dlrm-synthetic") as pool:
            for start, stop in _chunks(range(self.rows)):
                if len(waiting) > threads:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(self._text, start, stop))
            while waiting:
                yield waiting.popleft().result()


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve, ties at average rank; NaN with one class only.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
    0.875
    """
    positive = labels > 0.5
    n1 = int(positive.sum())
    n0 = labels.shape[0] - n1
    if n0 == 0 or n1 == 0:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    average_rank = np.cumsum(counts) - (counts - 1) / 2
    return float((average_rank[inverse][positive].sum() - n1 * (n1 + 1) / 2) / (n0 * n1))


def _metrics(p: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    rate = float(labels.mean()) if labels.size else float("nan")
    loss = float(-np.where(labels > 0.5, np.log(p), np.log1p(-p)).mean()) if labels.size else float("nan")
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)) if 0 < rate < 1 else float("nan")
    return {"auc": auc(p, labels), "log_loss": loss, "ne": float(loss / entropy), "click_rate": rate}


def _chunks(rows: range) -> Iterator[tuple[int, int]]:
    for start in range(rows.start, rows.stop, CHUNK):
        yield start, min(start + CHUNK, rows.stop)


def _schema(c: SyntheticConfig) -> Schema:
    if len(c.tables) == 26 and c.n_dense == 13 and max(c.tables) <= 2**32:
        return criteo()
    dense = tuple(Dense(f"I{i + 1}") for i in range(c.n_dense))
    ids = tuple(Categorical(f"C{i + 1}", "hex") for i in range(len(c.tables)))
    columns = ("label", *(d.column for d in dense), *(i.column for i in ids))
    return Schema(Label("label"), dense, ids, delimiter="\t", header=False, columns=columns, name="synthetic")


def _plant(c: SyntheticConfig) -> sk.Model:
    """Weights of the planted model, as shares of the score's variance: ids' own effects (fading with the size of the
    table, since the tail's cannot be learned from a few clicks), products of pairs, dense values."""
    cards, rng = np.array(c.tables, np.int64), np.random.Generator(np.random.PCG64(mix_python(c.seed, 1)))
    tables = len(cards)
    effect = cards.astype(np.float64) ** -FADE * (cards > 1)
    effect *= np.sqrt(OWN / max((effect**2).sum(), 1e-12))
    able = np.flatnonzero((cards >= 4) & (cards <= PAIR_MAX))
    count = c.pairs if able.size >= 2 else 0
    pairs = np.array([rng.permutation(able)[:2] for _ in range(count)], np.int64).reshape(-1, 2)
    slope, curve = rng.normal(size=c.n_dense), CURVE * rng.normal(size=c.n_dense)
    norm = np.sqrt(DENSE / max((slope**2 + 2 * curve**2).sum(), 1e-12))
    third = np.arange(max(tables, c.n_dense)) % 3 == 2
    gamma = 1.0 - np.broadcast_to(np.asarray(c.alpha, np.float64), tables)
    straight, top = gamma == 0.0, cards + 1.0
    reach = np.where(straight, np.log(top), top**gamma - 1.0)
    power = np.where(straight, 0.0, 1.0 / np.where(straight, 1.0, gamma))
    return sk.Model(
        key=np.array([mix_python(c.seed, k) for k in (2, 3, 4)], np.uint64), drift=c.drift / 1e6, cards=cards,
        reach=reach, power=power, missing=np.where(third[:tables], c.missing, 0.0), effect=effect, pairs=pairs,
        pair_effect=np.full(count, np.sqrt(PAIRS / max(count, 1) / c.rank)), rank=c.rank,
        dense_mean=rng.uniform(0.5, 5.0, c.n_dense), dense_std=rng.uniform(0.5, 1.5, c.n_dense),
        dense_missing=np.where(third[: c.n_dense], c.missing, 0.0), slope=slope * norm, curve=curve * norm)  # fmt: skip


def _calibrate(model: sk.Model, c: SyntheticConfig) -> tuple[float, float]:
    # On the first rows of the endless log, whatever config.rows: the logit's spread, then the click rate.
    rows = np.arange(CHUNK)
    dense, ids = np.empty((CHUNK, c.n_dense), np.int64), np.empty((CHUNK, len(c.tables)), np.int64)
    raw = np.empty(CHUNK)
    sk.draw_rows(model, rows, dense, ids, raw)
    scale = c.spread / max(float(raw.std()), 1e-12)
    low, high = -60.0, 60.0
    for _ in range(60):
        bias = (low + high) / 2
        above = float((1 / (1 + np.exp(-(scale * (raw - raw.mean()) + bias)))).mean()) > c.click_rate
        low, high = (low, bias) if above else (bias, high)
    return scale, (low + high) / 2 - scale * float(raw.mean())


@kernel
def _transform(raw: np.ndarray, out: np.ndarray) -> None:
    for i in range(raw.shape[0]):
        for d in range(raw.shape[1]):
            out[i, d] = 0.0 if raw[i, d] == sk.MISSING_DENSE else log1p_clipped(np.float64(raw[i, d]))
