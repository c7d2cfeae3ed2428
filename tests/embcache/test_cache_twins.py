"""A store with a cache, of one row up to all of them, equals a store that holds every row in memory: weights, optimizer
state and outputs, bit for bit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_twins import (
    EDGES,
    FEATURES,
    ROWS,
    RULES,
    evaluate,
    gradient,
    jagged,
    learn,
    rows_of,
    same_outputs,
    same_rows,
    settled,
    stream,
    three_tables,
    train,
    written_of,
)

import embcache as ec

pytestmark = pytest.mark.filterwarnings("ignore:table .* staged batches need")  # small caches are the point

POLICIES: list[Any] = ["lru", "lfu", "lfu_decay", "lookahead", lambda ids, counts, last: (ids * 31) % 17 - counts]
CHAINS = ["ram", "lmdb", "ram,ram", "ram,lmdb"]  # what is below the cache


def chain(name: str, path: Path, cache: Any, policy: Any = "lfu") -> list[Any]:
    below: dict[str, Callable[[], list[Any]]] = {
        "ram": lambda: [ec.tiers.Ram()],
        "lmdb": lambda: [ec.tiers.Lmdb(path / "store")],
        "ram,ram": lambda: [ec.tiers.Ram(rows=30), ec.tiers.Ram()],
        "ram,lmdb": lambda: [ec.tiers.Ram(rows=30), ec.tiers.Lmdb(path / "store")],
    }
    return [ec.tiers.Ram(rows=cache, policy=policy), *below[name]()]


def pair(
    tmp_path: Path, cache: Any, below: str = "ram", policy: Any = "lfu", backend: str = "auto", **tables: Any
) -> tuple[ec.EmbeddingStore, ec.EmbeddingStore]:
    """(all in memory, cached)."""
    declared = three_tables(**tables)
    return (
        ec.EmbeddingStore(declared, [ec.tiers.Ram()], backend=backend),
        ec.EmbeddingStore(declared, chain(below, tmp_path, cache, policy), backend=backend),
    )


def twins(
    tmp_path: Path, kind: str, steps: int, cache: Any, ahead: int = 0, seed: int = 0, **options: Any
) -> dict[str, Any]:
    """Train both; compare everything; the cached store's counters."""
    plain, cached = pair(tmp_path, cache, **options)
    assert len(cached.front.below) == options.get("below", "ram").count(",") + 1
    same_outputs(
        train(plain, stream(kind, steps, seed)),
        train(cached, stream(kind, steps, seed), ahead),
    )
    bounded = plain.tables[0].num_embeddings is not None
    touched = [np.concatenate([written_of(plain, t)[0], EDGES, np.arange(50)]) for t in range(len(plain.tables))]
    same_rows(plain, cached, None if bounded else np.unique(np.concatenate(touched)))
    stats = settled(cached)
    cached.close()
    return stats


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_rule(tmp_path: Path, rule: ec.optim.Rule) -> None:
    for cache, ahead, kind in ((1, 0, "zipf"), (9, 8, "fresh"), (40, 1, "drift"), (ROWS, 1, "zipf")):
        twins(tmp_path, kind, 10, cache, ahead, rule=rule)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p if isinstance(p, str) else "callable")
@pytest.mark.parametrize("kind", ["zipf", "drift", "hits", "misses", "large", "reuse", "fresh", "empty"])
def test_every_policy_on_every_stream(tmp_path: Path, policy: Any, kind: str) -> None:
    for cache, ahead in ((1, 1), (24, 0), (60, 8)):
        stats = twins(tmp_path, kind, 8, cache, ahead, seed=cache, policy=policy)
        if kind == "hits" and cache == 24:
            assert stats["misses"] == 6 * 3  # of each table once
        if kind == "large" and cache == 24:
            assert stats["evictions"] > 0


@pytest.mark.parametrize("below", CHAINS)
@pytest.mark.parametrize("cache", [1, 17, {"a": 3, "b": 200, "c": 40}], ids=["one", "some", "each its own"])
def test_every_chain(tmp_path: Path, below: str, cache: Any) -> None:
    twins(tmp_path, "drift", 25, cache, 1, below=below)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("below", ["ram", "ram,lmdb"])
def test_stochastic_rounding_is_a_function_of_the_ids(tmp_path: Path, dtype: torch.dtype, below: str) -> None:
    for cache, ahead in ((1, 0), (20, 1)):
        twins(tmp_path / str(cache), "fresh", 15, cache, ahead, dtype=dtype, below=below, rule=ec.optim.Adam(lr=0.05))


@pytest.mark.parametrize("below", CHAINS)
def test_unbounded_tables_take_every_int64(tmp_path: Path, below: str) -> None:
    for cache, ahead in ((1, 0), (8, 8), (500, 1)):
        twins(tmp_path / str(cache), "edge", 12, cache, ahead, rows=None, below=below)


def test_the_plain_torch_kernels_serve_a_cache_too(tmp_path: Path, backend: str) -> None:
    twins(tmp_path, "drift", 10, 5, 1, backend=backend, rule=ec.optim.Adam(lr=0.1))


OPTIONS: dict[str, dict[str, Any]] = {
    "admission": {"admission": ec.Admission(min_count=3)},
    "idle": {"expiry": ec.Expiry(idle=4, every=3)},
    "rare": {"expiry": ec.Expiry(below=2, every=5)},
    "both": {"admission": ec.Admission(min_count=2, cells=64), "expiry": ec.Expiry(idle=2, every=1)},
    "padding": {"padding_idx": 7},
    "max_norm": {"max_norm": 0.4, "optimizer": ec.optim.SGD(lr=0.5)},
    "by frequency": {"scale_grad_by_freq": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("below", ["ram", "ram,lmdb"])
def test_options_of_tables(tmp_path: Path, options: dict[str, Any], below: str) -> None:
    rule = options.get("optimizer", ec.optim.Adagrad(lr=0.1))
    more = {key: value for key, value in options.items() if key != "optimizer"}
    for cache, ahead, kind in ((1, 0, "zipf"), (25, 1, "drift"), (ROWS, 8, "fresh")):
        twins(tmp_path / kind, kind, 14, cache, ahead, below=below, rule=rule, **more)


@pytest.mark.parametrize("options", ["admission", "both", "padding"])
@pytest.mark.parametrize("wait", [True, False])
def test_commits_rewinds_and_reopenings_are_invisible(tmp_path: Path, options: str, wait: bool) -> None:
    plain, cached = pair(tmp_path, 18, below="ram,lmdb", dtype=torch.bfloat16, **OPTIONS[options])
    batches = list(stream("drift", 30))
    for step, batch in enumerate(batches):
        train(plain, [batch], first=step)
        train(cached, [batch], first=step)
        if step % 7 == 3:
            cached.commit({"step": step}, wait=wait)
            train(cached, batches[:2])  # what is not to be
            if step % 2:
                assert cached.restore() == {"step": step}
            else:
                cached.close()
                _, cached = pair(tmp_path, 31, below="ram,lmdb", dtype=torch.bfloat16, **OPTIONS[options])
            same_rows(plain, cached)
    same_rows(plain, cached)
    settled(cached)
    cached.close()


# order of calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [1, 20])
def test_forwards_without_a_backward_change_nothing(tmp_path: Path, cache: int) -> None:
    plain, cached = pair(tmp_path, cache)
    batches = list(stream("fresh", 12, 3))
    for step, batch in enumerate(batches):
        for store in (plain, cached):  # a lookup that is dropped, one that is kept, one of a batch to come
            dropped = store.stage(batch, training=True)
            store.lookup(dropped)
            with store.stage(batch, training=True) as handle:
                learn(store, handle, step)
                evaluate(store, batches[(step + 3) % 12])
            dropped.release()
            store.step()
        same_outputs([evaluate(plain, batches[step - 2])], [evaluate(cached, batches[step - 2])])
    same_rows(plain, cached)
    settled(cached)


@pytest.mark.parametrize("cache", [1, 20])
def test_several_forwards_before_one_step(tmp_path: Path, cache: int) -> None:
    plain, cached = pair(tmp_path, cache, rule=ec.optim.Adam(lr=0.1))
    for store in (plain, cached):
        for step in range(8):
            handles = [store.stage(batch, training=True) for batch in stream("reuse", 3, step)]
            outputs = [store.lookup(handle) for handle in handles]
            for k in (2, 0, 1):  # gradients come in another order than lookups
                store.update(handles[k], {name: gradient(step, name, rows) for name, rows in outputs[k].items()})
            del handles
            store.step()
    same_rows(plain, cached)
    settled(cached)


@pytest.mark.parametrize("cache", [1, 12])
def test_rows_may_leave_between_forward_and_backward(tmp_path: Path, cache: int) -> None:
    plain, cached = pair(tmp_path, cache)
    batches = list(stream("misses", 20, n=10))
    for k in range(0, 20, 2):
        results = []
        for store in (plain, cached):
            handle = store.stage(batches[k], training=True)
            out = store.lookup(handle)
            train(store, [batches[k + 1]], first=k)  # staged, stepped and released in between
            store.update(handle, {name: gradient(k, name, rows) for name, rows in out.items()})
            again = store.lookup(handle)
            store.step()
            handle.release()
            results.append([out, again])
        same_outputs(*results)
    same_rows(plain, cached)
    settled(cached)


def test_a_batch_staged_long_ago_reads_the_rows_of_now(tmp_path: Path) -> None:
    plain, cached = pair(tmp_path, 4)
    batch, *others = stream("reuse", 9, 5)
    results = []
    for store in (plain, cached):
        early = store.stage(batch, training=True)
        outputs = train(store, others)
        with early:
            outputs.append(learn(store, early, 50))
        store.step()
        results.append(outputs)
    same_outputs(*results)
    same_rows(plain, cached)
    settled(cached)


def test_frozen_tables_keep_their_rows(tmp_path: Path) -> None:
    plain, cached = pair(tmp_path, 6)
    for store in (plain, cached):
        train(store, stream("zipf", 4))
        store.freeze("a")
        train(store, stream("zipf", 4, 1))
        store.freeze("a", "b", "c")
        train(store, stream("zipf", 2, 2))
        store.freeze(frozen=False)
        train(store, stream("zipf", 4, 3))
    same_rows(plain, cached)
    settled(cached)


def test_refused_gradients_leave_both_alike(tmp_path: Path) -> None:
    plain, cached = pair(tmp_path, 3)
    for store in (plain, cached):
        for step, batch in enumerate(stream("zipf", 6)):
            with store.stage(batch, training=True) as handle:
                out = store.lookup(handle)
                bad = {name: torch.full_like(rows, float("nan")) for name, rows in out.items()}
                if out["a1"].numel():
                    with pytest.raises(ec.errors.NonFiniteGradient):
                        store.update(handle, bad)
                if step % 2:
                    store.update(handle, {name: gradient(step, name, rows) for name, rows in out.items()})
                    store.discard()
                learn(store, handle, step)
            store.step()
    same_rows(plain, cached)
    settled(cached)


@pytest.mark.parametrize("below", ["ram", "ram,lmdb"])
def test_flushing_at_any_step_is_invisible(tmp_path: Path, below: str) -> None:
    plain, cached = pair(tmp_path, 12, below=below)
    for step, batch in enumerate(stream("drift", 20)):
        train(plain, [batch], first=step)
        train(cached, [batch], first=step)
        if step % 3 == 0:
            cached.front.flush()
            cached.front.flush()
        if step % 5 == 0:
            same_rows(plain, cached)
    same_rows(plain, cached)
    settled(cached)
    cached.close()


def test_handles_may_be_dropped_anywhere(tmp_path: Path) -> None:
    plain, cached = pair(tmp_path, 10)
    for step, batch in enumerate(stream("fresh", 12)):
        train(plain, [batch], first=step)
        kept = [cached.stage(batch, training=bool(k % 2)) for k in range(3)]
        cached.lookup(kept[2])
        away = threading.Thread(target=kept.pop().release)
        away.start()
        train(cached, [batch], first=step)
        away.join()
        circle: list[Any] = [kept]
        circle.append(circle)
        del kept, circle
    gc.collect()
    same_rows(plain, cached)
    settled(cached)


# reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["ram", "ram,lmdb"])
def test_evaluation_never_writes_inserts_or_moves_a_row(tmp_path: Path, below: str) -> None:
    plain, cached = pair(tmp_path, 15, below=below)
    for store in (plain, cached):
        train(store, stream("zipf", 6))
    evaluate(cached, next(stream("zipf", 1)))  # what training left in the overflow extent goes down with the next batch
    before = settled(cached)
    resident = [arena.slot_ids[:15].clone() for arena in cached.front.arenas]
    for batch in stream("large", 5, 7):
        same_outputs([evaluate(plain, batch)], [evaluate(cached, batch)])
    with torch.no_grad():  # what decides where nothing is said
        handle = cached.stage(next(stream("zipf", 1)))
    with pytest.raises(ec.errors.StaleLookup, match="reading only"):
        learn(cached, handle, 0)
    handle.release()
    after = settled(cached)
    assert (after["evictions"], after["rows_written_back"]) == (before["evictions"], before["rows_written_back"])
    assert all(torch.equal(a, arena.slot_ids[:15]) for a, arena in zip(resident, cached.front.arenas, strict=True))
    same_rows(plain, cached)
    cached.close()


def test_unseen_ids_read_as_their_initial_value_twice_the_same(tmp_path: Path) -> None:
    plain, cached = pair(tmp_path, 2, rows=None)
    far = [EDGES] * len(FEATURES)
    batch = jagged(far, np.random.default_rng(0))
    first = evaluate(cached, batch)
    same_outputs([evaluate(plain, batch), first], [evaluate(cached, batch), evaluate(cached, batch)])
    for t in range(3):
        assert cached.front.count_written(t) == plain.front.count_written(t) == 0
        assert np.array_equal(rows_of(plain, t, EDGES), rows_of(cached, t, EDGES))


def test_a_cache_over_bounded_tables_starts_as_the_eager_one_does(tmp_path: Path) -> None:
    plain, cached = pair(tmp_path, 2)
    same_rows(plain, cached)
    assert settled(cached)["misses"] == 0


# through modules -----------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A pooled and an unpooled collection that share a store."""

    def __init__(self, tiers: list[Any], rule: ec.optim.Rule) -> None:
        super().__init__()
        tables = three_tables(rule)
        self.pooled = ec.EmbeddingBagCollection(tables[:2], store=ec.EmbeddingStore(tables, tiers))
        self.single = ec.EmbeddingCollection(tables[2:], store=self.pooled.store)

    def forward(self, batch: ec.KeyedJaggedTensor) -> torch.Tensor:
        return self.pooled(batch).values().sin().sum() + self.single(batch)["c"].values().cos().sum()


@pytest.mark.parametrize("below", ["ram", "lmdb"])
@pytest.mark.parametrize("depth", [0, 1, 8, "auto"])
def test_modules_with_look_ahead(tmp_path: Path, below: str, depth: Any) -> None:
    models = []
    for tiers in ([ec.tiers.Ram()], chain(below, tmp_path, 20 if depth in (0, "auto") else 200)):
        model = Model(tiers, ec.optim.RowWiseAdagrad(lr=0.1))
        optimizer = ec.optim.SparseOptimizer(model)
        losses = []
        for batch in model.pooled.store.lookahead(stream("drift", 20), depth=depth if models else 0):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        models.append((model, torch.stack(losses)))
    (plain, mine), (cached, other) = models
    assert torch.equal(mine, other)
    same_rows(plain.pooled.store, cached.pooled.store)
    settled(cached.pooled.store)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("embcache")]
    cached.pooled.store.close()
