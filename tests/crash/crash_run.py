"""The training that is killed: small tables over a disk store, look-ahead, evictions, flushes, commits and merges, its
batches made by two loader processes. Every state it may come back with is known beforehand from a run in memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import embcache as ec
from embcache.tiers.overlay import Overlay

warnings.filterwarnings("ignore", "table .* staged batches need")  # small caches are the point
STEPS, ROWS, BAGS, WIDTH = 120, 400, 16, 12
FAR = np.array([-(2**63), 2**63 - 1, -1, 2**40], np.int64)


@dataclass(frozen=True)
class Job:
    """How one run is stored; what it computes does not depend on it."""

    cache: int
    middle: int
    depth: int | str
    commit_every: int
    flush_every: int
    wait: bool
    overlay_bytes: int
    slow: float = 0.0
    """Seconds that a commit's thread sleeps before and after it writes a table's rows."""


JOBS = [
    Job(cache=75, middle=0, depth=1, commit_every=5, flush_every=1000, wait=True, overlay_bytes=1),
    Job(cache=45, middle=0, depth="auto", commit_every=3, flush_every=1000, wait=False, overlay_bytes=1, slow=0.01),
    Job(cache=1, middle=0, depth=0, commit_every=9, flush_every=4, wait=True, overlay_bytes=1 << 30),
    Job(cache=25, middle=60, depth="auto", commit_every=4, flush_every=7, wait=False, overlay_bytes=1),
    Job(cache=500, middle=0, depth=4, commit_every=6, flush_every=1000, wait=False, overlay_bytes=1 << 15),
]


def tables() -> list[ec.TableConfig]:
    """A bounded table and one that takes any id, with state of different kinds."""
    return [
        ec.TableConfig("a", ROWS, 8, features=["a"], optimizer=ec.optim.Adagrad(lr=0.1), dtype=torch.bfloat16),
        ec.TableConfig("b", None, 4, features=["b"], optimizer=ec.optim.Adam(lr=0.05), pooling="mean"),
    ]


class Batches(torch.utils.data.Dataset[tuple[np.ndarray, np.ndarray, np.ndarray]]):
    """Batch i of the stream: ids, lengths and labels, a function of i alone."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng([7, i])
        lengths = rng.integers(0, 4, 2 * BAGS)
        n_a, n_b = lengths[:BAGS].sum(), lengths[BAGS:].sum()
        a = (rng.zipf(1.2, n_a) + 5 * i) % ROWS
        b = np.where(rng.random(n_b) < 0.2, rng.choice(FAR, n_b), rng.zipf(1.3, n_b) % 150 - 75)
        return np.concatenate([a, b]).astype(np.int64), lengths, rng.random(BAGS).astype(np.float32)


class Training:
    """Model, optimizers and store; ``save`` and the constructor move all of it through one generation."""

    def __init__(self, tiers: list[Any]) -> None:
        torch.manual_seed(3)
        self.bags = ec.EmbeddingBagCollection(tables(), store=ec.EmbeddingStore(tables(), tiers))
        self.head = torch.nn.Linear(WIDTH, 1)
        self.dense = torch.optim.Adam(self.head.parameters(), lr=0.01)
        self.sparse = ec.optim.SparseOptimizer(self.bags)
        self.store = self.bags.store
        self.step = 0

    def learn(self, batch: ec.KeyedJaggedTensor, labels: torch.Tensor) -> None:
        out = self.head(self.bags(batch).values()).squeeze(1)
        loss = torch.nn.functional.mse_loss(out, labels)
        self.dense.zero_grad()
        loss.backward()
        self.dense.step()
        self.sparse.step()
        self.step += 1

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "head": self.head.state_dict(), "dense": self.dense.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.head.load_state_dict(state["head"])
        self.dense.load_state_dict(state["dense"])

    def bits(self) -> np.ndarray:
        """Everything that was learned, as bytes."""
        parts = [parameter.detach().numpy().view(np.uint8).ravel() for parameter in self.head.parameters()]
        parts += [row_bits(self.store, t, ids) for t, ids in enumerate(all_ids())]
        return np.concatenate(parts)


def all_ids() -> list[np.ndarray]:
    """Every id of table a, and every one of table b that the stream can draw."""
    return [np.arange(ROWS), np.concatenate([np.arange(-75, 75), FAR])]


def row_bits(store: ec.EmbeddingStore, t: int, ids: np.ndarray) -> np.ndarray:
    """Weights and state of rows, without the bytes that only fill them up."""
    table = store.tables[t]
    rows = np.asarray(store.front.read_rows(t, torch.from_numpy(ids)))
    state = rows[:, table.state_offset : table.state_offset + 4 * table.state_floats]
    return np.concatenate([rows[:, : table.embedding_dim * table.dtype.itemsize], state], axis=1).ravel()


def control() -> list[np.ndarray]:
    """``Training.bits`` after 0, 1, ... STEPS steps of a run in memory that nobody disturbs."""
    run = Training([ec.tiers.Ram()])
    result = [run.bits()]
    data = Batches()
    for i in range(STEPS):
        run.learn(*as_tensors(data[i]))
        result.append(run.bits())
    return result


def as_tensors(item: tuple[np.ndarray, np.ndarray, np.ndarray]) -> tuple[ec.KeyedJaggedTensor, torch.Tensor]:
    ids, lengths, labels = (torch.as_tensor(part) for part in item)
    return ec.KeyedJaggedTensor(["a", "b"], ids, lengths=lengths), labels


def chain(folder: Path, job: Job) -> list[Any]:
    """The tiers of a job."""
    middle = [ec.tiers.Ram(rows=job.middle)] if job.middle else []
    return [ec.tiers.Ram(rows=job.cache), *middle, ec.tiers.Lmdb(folder, overlay_bytes=job.overlay_bytes)]


def check(run: Training, expected: list[np.ndarray]) -> None:
    """The run holds exactly the bits of its step."""
    mine = run.bits()
    if not np.array_equal(mine, expected[run.step]):
        as_of = [step for step, bits in enumerate(expected) if np.array_equal(bits, mine)]
        differing = int((mine != expected[run.step]).sum())
        raise AssertionError(
            f"generation {run.store.generation} says step {run.step}: {differing} bytes differ; equal to {as_of}"
        )


def opened(folder: Path, job: Job, expected: list[np.ndarray]) -> Training:
    """The run as its last generation left it, verified."""
    run = Training(chain(folder, job))
    if run.store.generation:
        run.load(run.store.restore())
    check(run, expected)
    return run


def land_slowly(seconds: float) -> None:
    """In this process, from now on."""
    land = Overlay.land

    def slowly(self: Overlay, keys: np.ndarray, rows: np.ndarray) -> int:
        time.sleep(seconds)
        written = land(self, keys, rows)
        time.sleep(seconds)
        return written

    Overlay.land = slowly  # type: ignore[method-assign]


def go_on(folder: Path, job: Job, expected: list[np.ndarray], report: Callable[..., None]) -> None:
    """Open, verify, train to the end, verify, close; ``report`` tells how far it is."""
    if job.slow:
        land_slowly(job.slow)
    run = opened(folder, job, expected)
    report("opened", run.store.generation, run.step)
    for batch, labels in run.store.lookahead(batches(run.step), depth=job.depth, ids=lambda pair: pair[0]):
        run.learn(batch, labels)
        report("step", 0, run.step)
        if run.step % job.flush_every == 0:
            run.store.front.flush()
        if run.step % job.commit_every == 0 or run.step == STEPS:
            report("committing", 0, run.step)
            wait = job.wait or run.step == STEPS
            number = run.store.commit(run.state(), notes={"step": run.step}, wait=wait)
            report("committed" if wait else "begun", number, run.step)
    check(run, expected)
    report("closing", int(run.store.durable.stats()["merges"]), run.step)
    run.store.close()


def batches(first: int) -> Iterator[tuple[ec.KeyedJaggedTensor, torch.Tensor]]:
    """Batches from ``first`` on, made by two processes."""
    loader = torch.utils.data.DataLoader(
        Batches(),
        batch_size=None,
        sampler=range(first, STEPS),
        num_workers=2,
        multiprocessing_context="fork",
        collate_fn=lambda item: item,
    )
    return map(as_tensors, loader)
