"""Reads of several tables, in turn and side by side."""

import threading
import time

import pytest
import torch

import embcache as ec
from embcache.cache import fetching as module
from embcache.cache.fetching import READERS, Fetching


@pytest.fixture
def faults(monkeypatch):
    """Page faults as the test counts them."""
    count = [0]
    monkeypatch.setattr(module, "_faults", lambda: count[0])
    return count


def call(reads):
    """A part is a function here."""
    for read in reads:
        read()


def test_reads_that_wait_for_a_disk_run_side_by_side_and_others_in_turn(faults):
    def read(pages=0):
        faults[0] += pages

    fetching = Fetching()
    fetching.run(call, [read] * 3, rows=30)
    assert not fetching.parallel
    fetching.run(call, [lambda: read(1)] * 3, rows=30)
    assert fetching.parallel
    together = threading.Barrier(4, timeout=30)  # ends only if all four run at once
    fetching.run(call, [lambda: read(together.wait() * 0 + 1)] * 4, rows=200)
    assert fetching.parallel
    fetching.run(call, [lambda: read(1)] * 4, rows=1000)
    assert not fetching.parallel
    seen = set()
    fetching.run(call, [lambda: seen.add(threading.get_ident())] * 4, rows=10)
    assert seen == {threading.get_ident()}
    fetching.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("embcache-read")]


def test_an_error_is_raised_when_all_have_ended():
    fetching = Fetching()
    fetching.parallel = True
    ended = []

    def slow():
        time.sleep(0.05)
        ended.append(1)

    def wrong():
        raise OSError("no such page")

    with pytest.raises(OSError, match="no such page"):
        fetching.run(call, [wrong, *[slow] * READERS], rows=1)
    assert len(ended) == READERS
    fetching.close()
    fetching.close()


def test_side_by_side_gives_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MANY", -1.0)  # always
    monkeypatch.setattr(module, "FEW", -1.0)
    names = [f"t{i}" for i in range(5)]
    tables = [ec.TableConfig(name, 200, 3, optimizer=ec.optim.Adam(lr=0.1)) for name in names]
    generator = torch.Generator().manual_seed(0)
    with ec.EmbeddingStore(tables, [ec.tiers.Ram(rows=20), ec.tiers.Lmdb(tmp_path)]) as cached:
        plain = ec.EmbeddingStore(tables)
        for _ in range(40):
            ids = torch.randint(0, 200, (60,), generator=generator)
            batch = ec.KeyedJaggedTensor(names, ids, lengths=torch.full((5,), 12))
            for store in (plain, cached):
                with store.stage(batch, training=True) as handle:
                    store.update(handle, {k: torch.sin(v) for k, v in store.lookup(handle).items()})
                store.step()
        assert cached.front._fetching.parallel
        for name in names:
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    cached.read_rows(name, torch.arange(200)), plain.read_rows(name, torch.arange(200)), strict=True
                )
            )
