"""Planned bytes against those of the real structures."""

import os

import numpy as np
import pytest
import torch

import embcache as ec
from embcache import planning
from embcache.cache import open_chain
from embcache.cache.policy import POLICIES
from embcache.cache.slots import SlotArrays
from embcache.errors import BadConfig
from embcache.kernels import get as get_kernels
from embcache.kernels.memory import available_bytes
from embcache.planning import base_bytes, plan
from embcache.tiers import Lmdb, Ram

# the warning that a batch does not fit its cache: these caches are tiny on purpose
pytestmark = pytest.mark.filterwarnings("ignore:.*staged batches need:UserWarning")


def table(name="t", rows=None, dim=16, **options):
    return ec.TableConfig(name, rows, dim, optimizer=ec.optim.Adagrad(), **options)


def opened(tables, tiers):
    return open_chain(tables, tiers, get_kernels("reference"))


def staged(front, t, ids, training=True):
    features = torch.tensor([[t, 2, 0, len(ids), 0, 0, 0]])
    return front.stage(features, torch.as_tensor(ids), None, training)


# in memory -------------------------------------------------------------------------------------------------------


def test_tables_that_lie_whole_in_memory():
    tables = [table("a", 1000), table("b", 77, dim=3, dtype=torch.bfloat16)]
    planned, front = plan(tables, [Ram()]), opened(tables, [Ram()])
    for t, name in enumerate(("a", "b")):
        assert planned.bytes(table=name, structure="rows") == front.arenas[t].slab.numel()
        assert planned.bytes(table=name, structure="written bits") == front.arenas[t].written.numel()
    assert planned.memory == planned.peak == planned.bytes()
    assert planned.disk == 0


def test_a_table_without_a_bound_in_memory():
    tables = [table()]
    front = opened(tables, [Ram()])
    front.load_rows(0, torch.arange(50_000), torch.zeros(50_000, tables[0].row_bytes, dtype=torch.uint8))
    planned = plan(tables, [Ram()], expected=50_000)
    assert planned.memory == pytest.approx(front.stats()["bytes"], rel=0.3)  # the index grows by half at a time
    assert planned.bytes(structure="rows") == 50_000 * tables[0].row_bytes
    unknown = plan(tables, [Ram()])
    assert unknown.bytes(structure="rows") == 0
    assert "table 't' has no bound: about 152 bytes of memory for each id used" in str(unknown)


def test_a_bounded_table_that_does_not_fit_is_hashed(monkeypatch):
    monkeypatch.setattr(planning, "available_bytes", lambda: 1 << 20)
    planned = plan([table("small", 100), table("large", 1_000_000)], [Ram()], expected={"large": 1000})
    assert planned.bytes(table="large", structure="rows") == 1000 * 128
    assert planned.bytes(table="small", structure="written bits") == 13
    assert "'large' does not fit whole" in str(planned)


@pytest.mark.parametrize("count", [2, 300])
def test_tables_with_admission_are_hashed_and_count(count):
    tables = [table("a", 1000, admission=ec.Admission(count, cells=1000)), table("b", 1000, expiry=ec.Expiry(idle=3))]
    planned, front = plan(tables, [Ram()], expected=10), opened(tables, [Ram()])
    assert planned.bytes(structure="admission counts") == front.extra_state()["a.admission"].nbytes
    for t, name in enumerate(("a", "b")):
        assert not front.direct(t)
        assert planned.bytes(table=name, structure="rows") == 10 * tables[t].row_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_cache(policy):
    tables, tiers = [table("a"), table("b", 5000, dim=4)], [Ram(rows=20_000, policy=policy), Ram()]
    front = opened(tables, tiers)
    for t, n in ((0, 20_000), (1, 5000)):
        for start in range(0, n, 1000):
            front.release(staged(front, t, np.arange(start, start + 1000)))
    planned = plan(tables, tiers, expected=0)
    assert planned.bytes(tier=0) == pytest.approx(front.stats()["bytes"], rel=0.02)
    assert planned.bytes(table="b", structure="rows") == 5000 * tables[1].row_bytes


def test_a_cache_between_two_others():
    tables, tiers = [table()], [Ram(rows=100), Ram(rows=3000, policy="lru"), Ram()]
    front = opened(tables, tiers)
    for start in range(0, 20_000, 500):
        lease = staged(front, 0, np.arange(start, start + 500))
        front.slots(lease)
        front.stepped([lease], frozenset(), [1])
        front.release(lease)
    middle = front.below[0]._tables[0]
    assert plan(tables, tiers, expected=0).bytes(tier=1) == pytest.approx(middle.nbytes, rel=0.02)


def test_a_cache_of_so_many_bytes_takes_about_as_many():
    tables = [table("a"), table("b", 100, dim=4), table("c", dim=64)]
    planned = plan(tables, [Ram(bytes=64 << 20), Ram()], expected=0)
    assert planned.bytes(tier=0) == pytest.approx(64 << 20, rel=0.15)


def test_batches_beyond_the_cache():
    tables, tiers = [table()], [Ram(rows=100), Ram()]
    front = opened(tables, tiers)
    leases = [staged(front, 0, np.arange(k * 1000, (k + 1) * 1000)) for k in range(2)]
    planned = plan(tables, tiers, batch_size=1000, depth=1, expected=0)
    need = front.stats()["overflow_peak"] * (tables[0].row_bytes + SlotArrays.BYTES)
    assert need <= planned.bytes(structure="overflow") <= 1.1 * need
    held = sum(item.bytes for item in planned.items if item.when != "growth")
    assert held == pytest.approx(front.stats()["bytes"], rel=0.1)
    assert planned.peak > held
    for lease in leases:
        front.release(lease)


def test_ids_of_a_sample_by_feature():
    tables = [table("a", features=["x", "y"]), table("b", 10)]
    planned = plan(tables, [Ram(rows=1), Ram()], batch_size=100, depth=0, ids_per_sample={"x": 20.5}, expected=0)
    row = tables[0].row_bytes + SlotArrays.BYTES
    assert planned.bytes(table="a", structure="overflow") == (2050 + 100) * row
    assert planned.bytes(table="b", structure="overflow") == 10 * row  # never more than there are
    assert plan(tables, [Ram(rows=1), Ram()], expected=0).bytes(structure="overflow") == 0


def test_all_rows_below_a_cache_in_memory():
    tables, tiers = [table()], [Ram(rows=100), Ram()]
    front = opened(tables, tiers)
    front.load_rows(0, torch.arange(30_000), torch.zeros(30_000, tables[0].row_bytes, dtype=torch.uint8))
    below = front.below[0]._tables[0]
    planned = plan(tables, tiers, expected=30_000)
    assert planned.bytes(tier=1, structure="rows") == below.high * tables[0].row_bytes
    assert planned.bytes(tier=1, structure="index") == pytest.approx(below.index.nbytes, rel=0.5)


# on disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [16, 64, 96, 128, 250, 256, 512])  # with Adagrad: twice 4 bytes a column
def test_pages_of_the_base_against_a_real_file(tmp_path, dim):
    tables = [ec.TableConfig("t", None, dim, optimizer=ec.optim.Adagrad())]
    n = 4000
    tier = Lmdb(tmp_path / "store")
    tier.open(tables)
    tier.restore(None)
    rows = np.random.default_rng(0).integers(0, 255, (n, tables[0].row_bytes), dtype=np.uint8)
    tier.write(0, np.arange(n), rows)
    index = tier.stats()["index_bytes"]
    planned = plan(tables, [Ram(rows=1), tier], expected=n)
    assert planned.bytes(tier=1, structure="overlay index") == pytest.approx(index, rel=0.5)
    segments = sum(path.stat().st_size for path in (tmp_path / "store" / "segments").iterdir())
    assert planned.bytes(structure="segments", disk=True) == pytest.approx(segments, rel=0.02)
    tier.freeze(1)
    tier.sync()
    tier.sealed(1, 1)
    tier.merge()
    real = tier.stats()["base_bytes"]
    tier.close()
    full = base_bytes(n, tables[0].row_bytes, 1.0)
    assert full + planning.FEW_PAGES * planning.PAGE == pytest.approx(real, rel=0.03)
    assert planned.bytes(structure="base", disk=True) >= full
    assert os.path.getsize(tmp_path / "store" / "data.mdb") >= real


def test_pages_of_rows_that_came_in_no_order(tmp_path):
    tables = [table()]
    tier = Lmdb(tmp_path / "store")
    tier.open(tables)
    tier.restore(None)
    draw = np.random.default_rng(1)
    keys = draw.permutation(40_000)
    for g in range(20):
        part = np.sort(keys[g * 2000 : (g + 1) * 2000])
        tier.write(0, part, np.zeros((len(part), tables[0].row_bytes), dtype=np.uint8))
        tier.freeze(g + 1)
        tier.sync()
        tier.sealed(g + 1, g + 1)
        tier.merge()
    real = tier.stats()["base_bytes"]
    tier.close()
    planned = plan(tables, [Ram(rows=1), Lmdb("nowhere")], expected=40_000)
    live = planned.bytes(structure="base", disk=True)
    assert live <= real <= live + planned.bytes(structure="base, free pages", disk=True)


def test_a_declared_trillion_costs_nothing_until_it_is_used():
    tables = [ec.TableConfig(f"t{k}", 307_692_307, 128, optimizer=ec.optim.RowWiseAdagrad()) for k in range(26)]
    before = available_bytes()
    planned = plan(tables, [Ram(bytes=2 << 30), Lmdb("nowhere")], batch_size=2048, depth=1, expected=100_000)
    assert planned.memory < 3 << 30
    assert planned.disk < 30 << 30
    assert plan(tables, [Ram(bytes=2 << 30), Lmdb("nowhere")]).disk > 4 << 40
    after = available_bytes()
    if before is not None and after is not None:
        assert before - after < 1 << 30
    assert not os.path.exists("nowhere")


# reading it ------------------------------------------------------------------------------------------------------


def test_it_reads_as_a_table():
    tables = [table("a", 1000), table("b", 2000)]
    lines = str(plan(tables, [Ram(rows=100, policy="lru"), Lmdb("nowhere")], batch_size=64)).splitlines()
    assert lines[0].split() == ["tier", "structure", "where", "tables", "bytes"]
    assert any(line.split()[:5] == ["0", "Ram", "rows", "memory", "2"] for line in lines)
    assert any(line.startswith("1 Lmdb  base") and " disk" in line for line in lines)
    assert any(line.startswith("memory ") and ", at most " in line for line in lines)
    assert any(line.startswith("disk   ") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([table()], [Ram()]), {"expected": -1}, "expected = -1"),
        (([table()], [Ram()]), {"expected": {"x": 1}}, r"expected names \['x'\]"),
        (([table()], [Ram()]), {"expected": 1.5}, r"expected = 1\.5"),
        (([table()], [Ram()]), {"batch_size": -1}, "batch_size = -1"),
        (([table()], [Ram()]), {"depth": "auto"}, "depth = 'auto'"),
        (([table()], ["ram"]), {}, "= 'ram': the last tier holds every row"),
        (([table(), table()], [Ram()]), {}, "declared twice"),
    ],
)
def test_what_cannot_be_planned(arguments, options, message):
    with pytest.raises(BadConfig, match=message):
        plan(*arguments, **options)
