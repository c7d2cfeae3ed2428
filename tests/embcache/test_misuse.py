"""Arguments that cannot work: each is refused with an error of its own type, and the store goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.cli import main
from embcache.errors import BadConfig, BadJaggedType, StoreClosed


@pytest.fixture
def store(tmp_path: Path) -> Any:
    table = ec.TableConfig("t", None, 4)
    with ec.EmbeddingStore([table], [ec.tiers.Ram(rows=9), ec.tiers.Lmdb(tmp_path / "store")]) as opened:
        yield opened


def batch(*ids: int) -> ec.KeyedJaggedTensor:
    return ec.KeyedJaggedTensor(["t"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([], r"tiers = \[\], must have at least one tier"),
        (ec.tiers.Ram(), r"tiers = Ram\(\), must be a list of tiers"),
        ([ec.tiers.Ram(rows=5), "x"], r"tiers\[1\] = 'x': the last tier holds every row"),
        (
            [ec.tiers.Ram(rows=2**31), ec.tiers.Ram()],
            "a cache of 2,147,483,648 rows of table 't', at most 2,147,483,645",
        ),
        ([ec.tiers.Ram(rows=9), ec.tiers.Ram(rows=2**70), ec.tiers.Ram()], "rows of table 't', at most"),
        ([ec.tiers.Ram(bytes=2**62), ec.tiers.Ram()], r"Ram\(bytes=4611686018427387904, .* of table 't', at most"),
    ],
)
def test_chains_that_cannot_be(tiers: Any, message: str) -> None:
    for build in (ec.EmbeddingStore, ec.plan):
        with pytest.raises(BadConfig, match=message):
            build([ec.TableConfig("t", None, 4)], tiers)


def test_a_cache_larger_than_its_table_is_as_large_as_the_table() -> None:
    store = ec.EmbeddingStore([ec.TableConfig("t", 10, 4)], [ec.tiers.Ram(rows=2**40), ec.tiers.Ram()])
    with store.stage(batch(9), training=True) as handle:
        assert torch.equal(store.lookup(handle)["t"], store.read_rows("t", torch.tensor([9]))[0])


@pytest.mark.parametrize("ids", [torch.tensor([1.7]), torch.tensor([True]), [1], np.array([1])], ids=str)
def test_ids_that_are_no_integers(store: ec.EmbeddingStore, ids: Any) -> None:
    store.load_rows("t", torch.tensor([1]), torch.ones(1, 4))
    calls: list[Callable[[], Any]] = [
        lambda: store.read_rows("t", ids),
        lambda: store.delete("t", ids),
        lambda: store.load_rows("t", ids, torch.zeros(1, 4)),
    ]
    for call in calls:
        with pytest.raises(BadJaggedType, match=r"ids of table 't' have .*, must be torch.int32 or torch.int64"):
            call()
    assert torch.equal(store.read_rows("t", torch.tensor([1], dtype=torch.int32))[0], torch.ones(1, 4))


def test_a_generation_that_is_not_one_is_not_taken_for_the_latest(store: ec.EmbeddingStore, tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        store.load_rows("t", torch.tensor([1]), torch.full((1, 4), value))
        store.commit(value)
    for which in ("newest", None, 1.0, True):
        with pytest.raises(BadConfig, match="must be 'latest', 'best' or a number"):
            store.restore(which)  # type: ignore[arg-type]
    assert store.restore(np.int64(1)) == 1.0  # type: ignore[arg-type]
    assert store.read_rows("t", torch.tensor([1]))[0].tolist() == [[1.0] * 4]
    assert main(["export", str(tmp_path / "store"), str(tmp_path / "out"), "--generation", "1st"]) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "notes", [{2: 0, 10: 0}, {"auc": {3: 0.5, 20: 0.6}, "best": (1, 2)}, {None: True}, {}], ids=str
)
def test_notes_come_back_as_json_gives_them(store: ec.EmbeddingStore, tmp_path: Path, notes: Any) -> None:
    store.commit("first", notes)
    store.commit("second", {"step": 1})
    store.close()
    with ec.EmbeddingStore.open(tmp_path / "store") as again:
        first, second = again.checkpoints.generations
        assert again.restore(1) == "first"
    assert second.notes == {"step": 1}
    assert first.notes.keys() == {"null" if key is None else str(key) for key in notes}


@pytest.mark.parametrize("notes", [{"a": torch.zeros(1)}, {"a": {1}}, {"loss": float("nan")}, "text", [1]], ids=str)
@pytest.mark.parametrize("wait", [True, False])
def test_notes_that_json_cannot_hold_raise_at_once(store: ec.EmbeddingStore, notes: Any, wait: bool) -> None:
    with pytest.raises(BadConfig, match=r"notes = .*, must be"):
        store.commit(None, notes, wait=wait)
    assert store.commit() == 1


def test_blocks_have_a_row_at_least(store: ec.EmbeddingStore) -> None:
    for walk in (store.scan, store.written_rows):
        for block in (0, -1):
            with pytest.raises(BadConfig, match=f"block = {block}, must be at least 1"):
                list(walk("t", block))


def test_look_ahead_names_what_is_no_batch(store: ec.EmbeddingStore) -> None:
    for ids in (None, lambda one: None):
        with pytest.raises(BadJaggedType, match="is no KeyedJaggedTensor"):
            list(store.lookahead([5], ids=ids))


def test_counters_of_a_closed_store(store: ec.EmbeddingStore) -> None:
    store.close()
    for call in (store.stats, store.traffic):
        with pytest.raises(StoreClosed):
            call()
