"""Who leaves a cache: the contract of the score keeper, and hit rates beside the best fixed choice of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.cache.policy import POLICIES, ScoreKeeper
from embcache.errors import BadConfig
from embcache.kernels import ghosts
from embcache.kernels import score as kernels

pytestmark = pytest.mark.filterwarnings("ignore:table .* staged batches need")


def most_used(ids: np.ndarray, counts: np.ndarray, last: np.ndarray) -> np.ndarray:
    return counts.astype(np.int64) * 1000 + last


ALL: list[Any] = [*POLICIES, most_used]


def ones(n: int) -> np.ndarray:
    return np.ones(n, dtype=np.int32)


def filled(policy: Any, rows: int, tick: int = 1) -> ScoreKeeper:
    keeper = ScoreKeeper(policy, rows)
    keeper.insert(np.arange(rows), np.arange(rows) + 1000, ones(rows), tick)
    return keeper


# the contract --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("rows", [1, 2, 9, 300, 5000])
def test_victims_are_distinct_resident_and_not_pinned(policy: Any, rows: int) -> None:
    rng = np.random.default_rng(rows)
    keeper, pins = ScoreKeeper(policy, rows), np.zeros(rows + 5, dtype=np.int32)
    where: dict[int, int] = {}  # slot -> id
    free, fresh = list(range(rows)), 0
    for tick in range(1, 60):
        pins[:] = 0
        held = rng.permutation(list(where))[: len(where) // 3].astype(np.int32)
        pins[held] = 1
        want = int(rng.integers(0, rows + 2))
        before = keeper.score.copy()
        found = keeper.victims(want, pins)
        assert len(found) == min(want, len(where) - len(held))
        assert len(set(found.tolist())) == len(found)
        assert set(found.tolist()) <= where.keys() - set(held.tolist())
        if isinstance(policy, str) and policy != "lookahead":
            assert np.array_equal(before, keeper.score)
        left = found[: len(found) // 2]  # the others stayed after all
        keeper.drop(left, np.array([where.pop(s) for s in left.tolist()], dtype=np.int64))
        free += left.tolist()
        come = rng.permutation(free)[: len(free) // 2].astype(np.int32)
        keeper.insert(come, np.arange(fresh, fresh + len(come)), ones(len(come)), tick)
        where.update(zip(come.tolist(), range(fresh, fresh + len(come)), strict=True))
        fresh += len(come)
        free = [s for s in free if s not in where]
        keeper.hit(held, ones(len(held)) * 3, tick)
        assert sorted(np.flatnonzero(keeper.score)) == sorted(where)
        some = np.array(list(where)[:4], dtype=np.int32)
        keeper.announce(np.array([where[s] for s in some.tolist()], dtype=np.int64), some, tick + 2)


@pytest.mark.parametrize("policy", ALL)
def test_empty_calls_and_clear(policy: Any) -> None:
    none, ids = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)
    keeper, pins = filled(policy, 20), np.zeros(20, dtype=np.int32)
    keeper.hit(none, ones(0), 2)
    keeper.insert(none, ids, ones(0), 2)
    keeper.drop(none, ids)
    keeper.announce(ids, none, 3)
    assert len(keeper.victims(0, pins)) == 0
    keeper.clear()
    assert len(keeper.victims(5, pins)) == 0
    assert len(filled(policy, 0).victims(3, pins)) == 0
    assert ScoreKeeper.bytes_for(policy, 20) == keeper.nbytes > 160


@pytest.mark.parametrize("policy", ALL)
def test_a_reused_slot_knows_nothing_of_the_row_before(policy: Any) -> None:
    keeper, pins = filled(policy, 8), np.zeros(8, dtype=np.int32)
    for tick in range(2, 40):
        keeper.hit(np.array([3]), ones(1) * 5, tick)
    for tick in range(40, 43):  # all but the one that was used most, which is deleted
        keeper.hit(np.array([0, 1, 2, 4, 5, 6, 7]), ones(7), tick)
    keeper.announce(np.array([1003]), np.array([3]), 60)
    keeper.drop(np.array([3]), np.array([1003]))
    keeper.insert(np.array([3]), np.array([2000]), ones(1), 42)
    if policy in ("lru", "lookahead"):
        keeper.hit(np.array([0, 1, 2, 4, 5, 6, 7]), ones(7), 43)
    assert keeper.victims(1, pins).tolist() == [3]


@pytest.mark.parametrize("policy", ["lfu", "lfu_decay", "lookahead"])
def test_what_an_absent_id_was_worth_is_remembered(policy: str) -> None:
    keeper, pins = filled(policy, 8), np.zeros(8, dtype=np.int32)
    for tick in range(2, 10):
        keeper.hit(np.array([3]), ones(1) * 5, tick)
        keeper.hit(np.array([0, 1, 2, 4, 5, 6]), ones(6), tick)
    keeper.drop(np.array([3]), np.array([1003]))
    keeper.insert(np.array([3]), np.array([2000]), ones(1), 10)
    keeper.drop(np.array([3, 7]), np.array([2000, 1007]))
    keeper.insert(np.array([7, 3]), np.array([1003, 3000]), ones(2), 11)
    assert keeper.victims(2, pins)[0] == 3
    assert keeper.score[7] > keeper.score[0]
    keeper.insert(np.array([100]), np.array([4000]), ones(1) * 9, 12)  # beyond the cache: no row, but a use
    keeper.drop(np.array([100, 3]), np.array([4000, 3000]))
    keeper.insert(np.array([3]), np.array([4000]), ones(1), 13)
    assert keeper.score[3] == 10 * kernels.USE


def test_lru_is_exact() -> None:
    keeper, pins = ScoreKeeper("lru", 50), np.zeros(50, dtype=np.int32)
    rng, order = np.random.default_rng(0), list(range(50))
    for tick in range(1, 51):
        keeper.insert(np.array([tick - 1]), np.array([tick]), ones(1), tick)
    for tick in range(51, 800):
        if rng.random() < 0.7:
            slot = int(rng.integers(50))
            order.remove(slot)
            keeper.hit(np.array([slot]), ones(1), tick)
        else:
            slot = order.pop(0)
            assert keeper.victims(1, pins).tolist() == [slot]
            keeper.drop(np.array([slot]), np.array([0]))
            keeper.insert(np.array([slot]), np.array([tick]), ones(1), tick)
        order.append(slot)


def test_announced_rows_stay_the_soonest_longest() -> None:
    keeper, pins = filled("lookahead", 100), np.zeros(100, dtype=np.int32)
    for tick in range(2, 12):  # rows that were used much, but are not needed
        keeper.hit(np.arange(80, 100), ones(20), tick)
    for ahead, part in enumerate(np.array_split(np.arange(80), 4)):
        keeper.announce(part + 1000, part, 12 + ahead)
    assert set(keeper.victims(20, pins).tolist()) == set(range(80, 100))
    assert set(keeper.victims(40, pins).tolist()) == set(range(60, 100))
    keeper.hit(np.arange(20), ones(20), 12)  # their batch came, and they are not needed again
    assert set(keeper.victims(20, pins).tolist()) == set(range(20))
    keeper.announce(np.array([77_777]), np.array([-1]), 14)  # not here yet
    keeper.drop(np.array([0]), np.array([1000]))
    keeper.insert(np.array([0]), np.array([77_777]), ones(1), 13)
    assert 0 not in keeper.victims(19, pins)
    keeper.hit(np.array([99]), ones(1), 20)  # batches 13 to 15 passed without their rows
    assert set(keeper.victims(80, pins).tolist()) == set(range(80))


def test_callables_see_what_is_resident_and_are_checked() -> None:
    seen: list[tuple[list[int], list[int], list[int]]] = []

    def oldest_id(ids: np.ndarray, counts: np.ndarray, last: np.ndarray) -> np.ndarray:
        seen.append((ids.tolist(), counts.tolist(), last.tolist()))
        return ids

    pins = np.zeros(4, dtype=np.int32)
    keeper = ScoreKeeper(oldest_id, 4)
    keeper.insert(np.array([2, 0, 9]), np.array([-(2**63), 2**63 - 1, 5]), np.array([1, 2, 3], dtype=np.int32), 7)
    keeper.hit(np.array([0]), ones(1), 8)
    assert keeper.victims(2, pins).tolist() == [2, 0]
    assert seen[-1] == ([2**63 - 1, -(2**63)], [3, 1], [8, 7])
    bad: list[Callable[..., Any]] = [lambda i, c, l: i[:1], lambda i, c, l: i * 0.5, lambda i, c, l: None]
    for wrong in bad:
        keeper = filled(wrong, 4)
        with pytest.raises(BadConfig, match="must be int64"):
            keeper.victims(1, pins)
    for policy in ("mru", "", 3, None):
        with pytest.raises(BadConfig, match="policy"):
            ScoreKeeper(policy, 4)  # type: ignore[arg-type]


def test_a_callable_that_raises_leaves_the_store_as_it_was() -> None:
    broken = [False]

    def scorer(ids: np.ndarray, counts: np.ndarray, last: np.ndarray) -> np.ndarray:
        if broken[0]:
            raise ArithmeticError("no score today")
        return counts.astype(np.int64)

    table = ec.TableConfig("t", None, 4)
    store = ec.EmbeddingStore([table], [ec.tiers.Ram(rows=8, policy=scorer), ec.tiers.Ram()])

    def outputs(first: int) -> torch.Tensor:
        batch = ec.KeyedJaggedTensor(["t"], torch.arange(first, first + 6), lengths=torch.ones(6, dtype=torch.int64))
        with store.stage(batch) as handle:
            return store.lookup(handle)["t"]

    before = outputs(0), outputs(3)
    broken[0] = True
    with pytest.raises(ArithmeticError):
        outputs(100)
    assert store.front.pins() == 0
    broken[0] = False
    assert torch.equal(outputs(0), before[0])
    assert outputs(100).shape == (6, 4)


def test_the_memory_of_absent_ids_keeps_the_most_used() -> None:
    table = ghosts.lines(64)
    assert table.shape == (4, 16)
    rng = np.random.default_rng(0)
    often, once = rng.integers(-(2**63), 2**63 - 1, 24), rng.integers(-(2**63), 2**63 - 1, 2000)
    for key in often:
        ghosts.put(table, key, 500)
    for key in once:
        ghosts.put(table, key, 16)
    ghosts.put(table, often[0], 10**9)
    ghosts.fade(table)
    worth = [int(ghosts.take(table, key)) for key in often]
    assert worth[0] == ghosts.MOST // 2
    assert worth[1:].count(250) >= 22  # as far as a line of 16 is not full of them
    assert all(ghosts.take(table, key) == 0 for key in often)
    assert sum(ghosts.take(table, key) == 8 for key in once[-20:]) >= 10


# hit rates -----------------------------------------------------------------------------------------------------------

ROWS, CACHE, BATCH = 20_000, 1_000, 256


def power_law(alpha: float, batches: int, drift: float = 0.0, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(popularity ranks, ids) of each batch; ``drift``: share of the ids that change their rank at every 50th."""
    rng = np.random.default_rng(seed)
    places, gamma = rng.permutation(ROWS), 1.0 - alpha
    for b in range(batches):
        u = rng.random(BATCH)
        ranks = (((u * (ROWS**gamma - 1) + 1) ** (1 / gamma)) - 1).astype(np.int64)
        if drift and b % 50 == 49:
            moved = rng.permutation(ROWS)[: int(ROWS * drift)]
            places[moved] = places[np.roll(moved, 1)]
        yield ranks, places[ranks]


def hit_rate(
    policy: Any, batches: Iterator[tuple[np.ndarray, np.ndarray]], warm: int, window: int = 0
) -> tuple[float, float]:
    """(share of occurrences that were hits, that of the ``CACHE`` most popular ranks) after ``warm`` batches."""
    whole = list(batches)
    keeper, pins = ScoreKeeper(policy, CACHE), np.zeros(CACHE, dtype=np.int32)
    where, slot_ids = np.full(ROWS, -1), np.zeros(CACHE, dtype=np.int64)
    free, hits, best, total = np.arange(CACHE), 0, 0, 0
    for b, (ranks, ids) in enumerate(whole):
        for later in range(b + window if b else 0, min(b + window + 1, len(whole) if window else 0)):
            coming = np.unique(whole[later][1])
            keeper.announce(coming, where[coming], later + 1)
        keys, counts = np.unique(ids, return_counts=True)
        counts, slots = counts.astype(np.int32), where[keys]
        here = slots >= 0
        if b >= warm:
            hits, best, total = hits + counts[here].sum(), best + (ranks < CACHE).sum(), total + len(ids)
        pins[slots[here]] = 1
        missing = keys[~here]
        if len(missing) > len(free):
            left = keeper.victims(len(missing) - len(free), pins)
            where[slot_ids[left]] = -1
            keeper.drop(left, slot_ids[left])
            free = np.concatenate([free, left])
        new, free = free[: len(missing)], free[len(missing) :]
        where[missing], slot_ids[new] = new, missing
        keeper.hit(slots[here], counts[here], b + 1)
        keeper.insert(new, missing, counts[~here], b + 1)
        pins[:] = 0
    return hits / total, best / total


def test_lfu_nears_the_best_fixed_choice_and_passes_lru() -> None:
    for alpha, least in ((0.9, 0.94), (1.05, 0.97), (1.2, 0.985)):
        (lfu, best), (lru, _) = (hit_rate(policy, power_law(alpha, 1500), 1000) for policy in ("lfu", "lru"))
        assert lfu >= least * best
        assert lfu > lru + 0.02


def test_what_is_announced_lifts_the_hit_rate_above_every_fixed_choice() -> None:
    rates = [hit_rate("lookahead", power_law(1.05, 500), 300, window) for window in (0, 8, 63)]
    assert rates[0][0] < rates[1][0] < rates[2][0]
    assert rates[2][0] > rates[2][1] + 0.02


def test_a_window_beyond_what_a_keeper_notes_is_told_in_time() -> None:
    rates = {}
    for window in (0, 63, 150):
        store = ec.EmbeddingStore(
            [ec.TableConfig("t", None, 4)], [ec.tiers.Ram(rows=CACHE, policy="lookahead"), ec.tiers.Ram()]
        )
        length = torch.ones(BATCH, dtype=torch.int64)
        batches = (
            ec.KeyedJaggedTensor(["t"], torch.from_numpy(ids), lengths=length) for _, ids in power_law(1.05, 400)
        )
        for _ in store.lookahead(batches, 0, window=window):
            pass
        stats = store.front.stats()
        rates[window] = stats["ids_hit"] / stats["ids"]
    assert rates[0] + 0.02 < rates[63]
    assert abs(rates[63] - rates[150]) < 0.01


def test_decay_follows_a_drift_that_lfu_lags_behind() -> None:
    rates = {p: hit_rate(p, power_law(1.05, 2400, drift=0.1), 1200)[0] for p in ("lfu", "lfu_decay")}
    assert rates["lfu_decay"] > rates["lfu"]
