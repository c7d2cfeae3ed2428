"""Random operations on a cached store against a dict: batches staged, read, trained, dropped in any order, rows loaded
and deleted, flushes, commits, rewinds, reopenings, chains of exported deltas."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import embcache as ec
from embcache.transfer import export_store, import_exports

pytestmark = pytest.mark.filterwarnings("ignore:table .* staged batches need")  # small caches are the point

LR, EPS, BEGIN = np.float32(0.5), np.float32(1e-8), np.float32(0.25)
TABLES = [
    ec.TableConfig(
        "t", None, 2, pooling="none", optimizer=ec.optim.Adagrad(lr=0.5, initial_accumulator_value=0.25), seed=5
    ),
    ec.TableConfig("u", 12, 3, optimizer=ec.optim.Adagrad(lr=0.5, initial_accumulator_value=0.25), seed=6),
]
ANY = st.sampled_from([-(2**63), 2**63 - 1, -1, 0, 1, 2, 3, 4, 5, 6, 2**32, 2**32 + 1, -(2**32)])
IDS = [st.lists(ANY, max_size=7), st.lists(st.integers(0, 11), max_size=5)]
POLICIES = ["lru", "lfu", "lfu_decay", "lookahead"]
Row = tuple[np.ndarray, np.ndarray]  # weights, state


def initial(t: int, id: int) -> Row:
    table = TABLES[t]
    weights = ec.init.rows(
        table.init, table.seed, table.name, torch.tensor([id]), table.embedding_dim, table.num_embeddings
    )
    return weights[0].numpy(), np.full(table.embedding_dim, BEGIN)


def stepped(row: Row, grad: np.ndarray) -> Row:
    """Adagrad in numpy."""
    state = row[1] + grad * grad
    return row[0] - LR * grad / (np.sqrt(state) + EPS), state


class Model:
    """What the store must hold."""

    def __init__(self) -> None:
        self.rows: list[dict[int, Row]] = [{}, {}]

    def get(self, t: int, id: int) -> Row:
        return self.rows[t].get(id) or initial(t, id)

    def weights(self, t: int, ids: list[int]) -> torch.Tensor:
        dim = TABLES[t].embedding_dim
        return torch.from_numpy(np.array([self.get(t, id)[0] for id in ids], np.float32).reshape(-1, dim))

    def copy(self) -> Model:
        other = Model()
        other.rows = [dict(rows) for rows in self.rows]
        return other


class StoreMachine(RuleBasedStateMachine):
    """A store over memory."""

    disk = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="embcache-stateful-"))
        self.model, self.committed = Model(), Model()
        self.staged: list[tuple[ec.Handle, list[list[int]]]] = []
        self.pending: list[tuple[int, int, np.ndarray]] = []

    @initialize(cache=st.sampled_from([1, 2, 5, 40]), middle=st.sampled_from([0, 3]), policy=st.sampled_from(POLICIES))
    def open(self, cache: int, middle: int, policy: str) -> None:
        self.shape = cache, middle, policy
        self.store = self.make()
        self.generation = 0

    def make(self) -> ec.EmbeddingStore:
        cache, middle, policy = self.shape
        chain: list[Any] = [ec.tiers.Ram(rows=cache, policy=policy)]
        if middle:
            chain.append(ec.tiers.Ram(rows=middle, policy=policy))
        chain.append(ec.tiers.Lmdb(self.folder / "store", overlay_bytes=600) if self.disk else ec.tiers.Ram())
        return ec.EmbeddingStore(TABLES, chain)

    def batch(self, ids: list[list[int]]) -> ec.KeyedJaggedTensor:
        bags = max(len(some) for some in ids)  # one id a bag, then empty ones
        lengths = [1 if k < len(some) else 0 for some in ids for k in range(bags)]
        values = torch.tensor([id for some in ids for id in some], dtype=torch.int64)
        return ec.KeyedJaggedTensor(["t", "u"], values, lengths=torch.tensor(lengths, dtype=torch.int64))

    def check(self, out: dict[str, torch.Tensor], ids: list[list[int]]) -> None:
        for t, name in enumerate("tu"):
            assert torch.equal(out[name][: len(ids[t])], self.model.weights(t, ids[t])), (name, ids[t])

    # batches ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.staged) < 4)
    @rule(t=IDS[0], u=IDS[1])
    def stage(self, t: list[int], u: list[int]) -> None:
        self.staged.append((self.store.stage(self.batch([t, u]), training=True), [t, u]))

    @precondition(lambda self: self.staged)
    @rule(k=st.integers(0, 3), seed=st.integers(0, 10**6))
    def learn(self, k: int, seed: int) -> None:
        handle, ids = self.staged[k % len(self.staged)]
        out = self.store.lookup(handle)
        self.check(out, ids)
        rng = np.random.default_rng(seed)
        grads = {
            name: torch.from_numpy(rng.integers(-3, 4, rows.shape).astype(np.float32)) for name, rows in out.items()
        }
        self.store.update(handle, grads)
        self.pending += [(t, id, grads["tu"[t]][i].numpy()) for t in range(2) for i, id in enumerate(ids[t])]

    @precondition(lambda self: self.staged)
    @rule(k=st.integers(0, 3))
    def look(self, k: int) -> None:
        handle, ids = self.staged[k % len(self.staged)]
        self.check(self.store.lookup(handle), ids)

    @precondition(lambda self: self.staged)
    @rule(k=st.integers(0, 3))
    def release(self, k: int) -> None:
        self.staged.pop(k % len(self.staged))[0].release()

    @rule()
    def step(self) -> None:
        self.store.step()
        sums: dict[tuple[int, int], np.ndarray] = {}
        for t, id, grad in self.pending:
            sums[t, id] = sums.get((t, id), np.float32(0)) + grad
        for (t, id), grad in sums.items():
            self.model.rows[t][id] = stepped(self.model.get(t, id), grad)
        self.pending = []

    @rule(t=IDS[0], u=IDS[1])
    def evaluate(self, t: list[int], u: list[int]) -> None:
        with self.store.stage(self.batch([t, u]), training=False) as handle:
            self.check(self.store.lookup(handle), [t, u])

    @rule()
    def discard(self) -> None:
        self.store.discard()
        self.pending = []

    # rows -------------------------------------------------------------------------------------------------------

    @rule(t=st.integers(0, 1), data=st.data())
    def read(self, t: int, data: st.DataObject) -> None:
        ids = data.draw(IDS[t])
        weights, state = self.store.read_rows("tu"[t], torch.tensor(ids, dtype=torch.int64))
        assert torch.equal(weights, self.model.weights(t, ids))
        assert all(np.array_equal(state[i].numpy(), self.model.get(t, id)[1]) for i, id in enumerate(ids))

    @precondition(lambda self: not self.pending)
    @rule(t=st.integers(0, 1), data=st.data())
    def delete(self, t: int, data: st.DataObject) -> None:
        ids = data.draw(IDS[t])
        self.store.delete("tu"[t], torch.tensor(ids, dtype=torch.int64))
        for id in ids:
            self.model.rows[t].pop(id, None)

    @precondition(lambda self: not self.pending)
    @rule(t=st.integers(0, 1), value=st.integers(0, 9), data=st.data())
    def load(self, t: int, value: int, data: st.DataObject) -> None:
        ids = sorted(set(data.draw(IDS[t])))
        dim = TABLES[t].embedding_dim
        weights = torch.arange(len(ids) * dim, dtype=torch.float32).view(-1, dim) + value
        self.store.load_rows("tu"[t], torch.tensor(ids, dtype=torch.int64), weights, weights + 1)
        for id, row in zip(ids, weights.numpy(), strict=True):
            self.model.rows[t][id] = row, row + 1

    @rule()
    def flush(self) -> None:
        self.store.front.flush()

    @invariant()
    def written_rows_are_counted(self) -> None:
        if hasattr(self, "store"):
            assert [self.store.count_written(name) for name in "tu"] == [len(rows) for rows in self.model.rows]

    def compare_all(self) -> None:
        for t, name in enumerate("tu"):
            found: dict[int, Row] = {}
            for ids, weights, state in self.store.written_rows(name, 3):
                pairs = zip(ids.tolist(), weights.numpy(), state.numpy(), strict=True)
                found.update({id: (w.copy(), s.copy()) for id, w, s in pairs})
            assert list(found) == sorted(self.model.rows[t], key=lambda id: id % 2**64)
            for id, (weights, state) in self.model.rows[t].items():
                assert np.array_equal(found[id][0], weights)
                assert np.array_equal(found[id][1], state)

    def drop_handles(self) -> None:
        for handle, _ in self.staged:
            handle.release()
        self.staged, self.pending = [], []
        self.store.discard()
        assert self.store.front.pins() == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.compare_all()
            self.drop_handles()
            stats = self.store.front.stats()
            assert stats["hits"] + stats["misses"] == stats["unique_ids"]
            self.store.close()
        shutil.rmtree(self.folder)


class DiskMachine(StoreMachine):
    """A store over LMDB: besides, what is committed comes back and nothing else does."""

    disk = True

    def __init__(self) -> None:
        super().__init__()
        self.exports: list[Path] = []

    @precondition(lambda self: not self.pending)
    @rule(wait=st.booleans())
    def commit(self, wait: bool) -> None:
        number = self.store.commit({"count": len(self.model.rows[0])}, wait=wait)
        assert number == self.generation + 1
        self.generation, self.committed = number, self.model.copy()

    @precondition(lambda self: not self.pending)
    @rule()
    def commit_and_export(self) -> None:
        self.commit(wait=True)
        target = self.folder / f"export{len(self.exports)}"
        export_store(self.store, target, since=self.exports[-1] if self.exports else None)
        self.exports.append(target)
        self.exported = self.model.copy()

    @precondition(lambda self: self.exports)
    @rule()
    def replay(self) -> None:
        other = ec.EmbeddingStore(TABLES, [ec.tiers.Ram(rows=2), ec.tiers.Ram()])
        import_exports(other, *self.exports)
        self.compare_other(other, self.exported)

    def compare_other(self, other: ec.EmbeddingStore, model: Model) -> None:
        mine, self.store, self.model, now = self.store, other, model, self.model
        try:
            self.compare_all()
        finally:
            self.store, self.model = mine, now
            other.close()

    @precondition(lambda self: self.generation)
    @rule()
    def rewind(self) -> None:
        self.drop_handles()
        assert self.store.restore() == {"count": len(self.committed.rows[0])}
        self.model = self.committed.copy()
        self.compare_all()

    @rule()
    def reopen(self) -> None:
        self.drop_handles()
        self.store.close()
        self.store = self.make()
        assert self.store.generation == self.generation
        assert self.store.recovered_from == (self.generation or None)
        self.model = self.committed.copy()
        self.compare_all()

    @precondition(lambda self: self.generation)
    @rule()
    def read_beside_the_writer(self) -> None:
        self.store.checkpoints.wait()
        self.compare_other(ec.EmbeddingStore.open(self.folder / "store", readonly=True, rows=4), self.committed)


@pytest.mark.parametrize("machine", [StoreMachine, DiskMachine])
def test_random_operations_against_a_dict(machine: type[StoreMachine]) -> None:
    case = machine.TestCase
    case.settings = settings(
        max_examples=40 if machine is StoreMachine else 25,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()
