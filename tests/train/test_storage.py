"""Storage: its flags, and training whose rows live in caches, over memory and on disk, to the same bits."""

import threading

import pytest
import torch
from toy import Recorder, ToyData, bits, trainer

import embcache as ec
from embcache.errors import CacheTooSmall, StorageFull
from embcache.statefile import equal_states
from embcache.tiers import Lmdb, Ram
from embcache.train.flags import parse
from embcache.train.optimizers import OptimizerConfig
from embcache.train.state import seed_all
from embcache.train.storage import StorageConfig, Traffic, disk_bytes, parse_bytes

ADAM = OptimizerConfig(dense_optimizer="adam", sparse_optimizer="adam", lr=0.01, warmup_steps=5, lr_schedule="cosine")


def storage(tiers="ram,lmdb", rows="9", **settings):
    flags = ["--tiers", tiers] + (["--cache-rows", rows] if "," in tiers else [])
    return parse(StorageConfig, flags + [x for k, v in settings.items() for x in (f"--{k}", str(v))])


def alive():
    return {t.name for t in threading.enumerate() if t.name.startswith("embcache")}


# flags -----------------------------------------------------------------------------------------------------------


def test_flags_become_tiers(tmp_path):
    def chain(*flags):
        return [(type(t), getattr(t, "rows", None), getattr(t, "bytes", None), getattr(t, "policy", None))
                for t in parse(StorageConfig, flags).chain(tmp_path)]  # fmt: skip

    assert chain() == [(Ram, None, None, Ram().policy)]
    assert chain("--tiers", "ram,lmdb", "--cache-rows", "1_000", "--policy", "lru") == [
        (Ram, 1000, None, "lru"),
        (Lmdb, None, None, None),
    ]
    assert chain("--tiers", "ram,ram,lmdb", "--cache-bytes", "2MiB,1GB")[:2] == [
        (Ram, None, 2 << 20, "lfu"),
        (Ram, None, 10**9, "lfu"),
    ]


def test_checkpoints_lie_with_the_rows(tmp_path):
    assert StorageConfig().folder(tmp_path) == tmp_path / "checkpoints"
    assert storage("ram,ram").folder(tmp_path) == tmp_path / "checkpoints"
    assert storage().folder(tmp_path) == tmp_path / "store"
    assert storage(store=tmp_path / "x").folder(tmp_path) == tmp_path / "x"
    assert storage().chain(tmp_path)[-1].folder == tmp_path / "store"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tiers lmdb", "a cache stands over lmdb: ram,lmdb"),
        ("--tiers lmdb,ram", "--tiers lmdb,ram: expected ram, or caches of ram over ram or lmdb"),
        ("--tiers disk", "--tiers disk: expected"),
        ("--tiers ,", "--tiers : expected"),
        ("--tiers ram,lmdb", "--tiers ram,lmdb needs --cache-rows or --cache-bytes"),
        ("--tiers ram,lmdb --cache-rows 5 --cache-bytes 1MB", "give one of them"),
        ("--tiers ram,lmdb --cache-rows 5,6", "--cache-rows gives 2 sizes, --tiers has 1 caches"),
        ("--tiers ram,ram,lmdb --cache-bytes 5MB", "--cache-bytes gives 1 sizes, --tiers has 2 caches"),
        ("--tiers ram,lmdb --cache-rows 0", "--cache-rows must be at least 1, got 0"),
        ("--tiers ram,lmdb --cache-bytes much", "'much' is not a size such as 500MB or 2GiB"),
        ("--tiers ram,lmdb --cache-bytes 0GB", "--cache-bytes must be at least 1"),
        ("--cache-rows 5", "--cache-rows gives 1 sizes, --tiers has 0 caches"),
        ("--store x", "--store x: --tiers ram keeps no rows on disk"),
        ("--policy lru", "--policy lru: there is no cache"),
        ("--policy fifo", "invalid choice: 'fifo'"),
        ("--window 9", "--window 9: the policy lfu looks at no later batch"),
        ("--tiers ram,ram --cache-rows 5 --policy lookahead --window 0", "--window must be at least 1, got 0"),
        ("--depth -1", "--depth -1: expected a number of batches or auto"),
        ("--depth all", "--depth all: expected"),
    ],
)
def test_contradictions_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse(StorageConfig, flags.replace("--depth -1", "--depth=-1").split())
    assert message in capsys.readouterr().err


def test_sizes():
    sizes = {"7": 7, "1kB": 1000, "1KiB": 1024, "2 GiB": 2 << 30, "0.5 tb": 5 * 10**11, "3M": 3 * 10**6}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GiB", "1 GiBs", "-1", "1e9", "1..2"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_bytes(text)


def test_bytes_of_a_folder(tmp_path):
    assert disk_bytes(tmp_path) == 0
    (tmp_path / "a").mkdir()
    with (tmp_path / "a" / "b").open("wb") as file:
        file.write(bytes(8192))
        file.truncate(1 << 30)
    assert 8192 <= disk_bytes(tmp_path) < 1 << 20


# the same bits ---------------------------------------------------------------------------------------------------

SETTINGS = {"opt": ADAM, "dropout": 0.3, "checkpoint_every": 5, "eval_every": 8}
CHAINS = [
    ("ram", {"depth": 3}),
    ("ram,ram", {"rows": "1"}),
    ("ram,ram", {"rows": "50", "depth": 8, "policy": "lru"}),
    ("ram,lmdb", {"rows": "9"}),
    ("ram,lmdb", {"rows": "24", "depth": 1, "policy": "lfu_decay"}),
    ("ram,lmdb", {"rows": "9", "depth": 0}),
    ("ram,lmdb", {"rows": "20", "policy": "lookahead", "window": 2}),
    ("ram,ram,lmdb", {"rows": "7,15"}),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Number of micro-batches -> (the end of a run with all rows in memory, its evaluations)."""
    ends = {}
    for parts in (1, 3):
        recorder = Recorder()
        folder = tmp_path_factory.mktemp("plain")
        t = trainer(folder, valid=ToyData(2), observers=[recorder], micro_batches=parts, **SETTINGS)
        t.fit()
        ends[parts] = bits(t), [p for p in recorder.points if p["kind"] == "eval"]
    return ends


@pytest.mark.parametrize(
    ("parts", "tiers", "settings"),
    [*((1, *chain) for chain in CHAINS), (3, "ram", {"depth": 2}), (3, "ram,lmdb", {}), (3, "ram,lmdb", {"depth": 0})],
    ids=lambda x: str(x),
)
def test_training_ends_in_the_same_bits(tmp_path, plain, parts, tiers, settings):
    end, evals = plain[parts]
    recorder, data = Recorder(), ToyData()
    t = trainer(
        tmp_path, data=data, valid=ToyData(2), observers=[recorder], micro_batches=parts,
        storage=storage(tiers, **settings), **SETTINGS
    )  # fmt: skip
    t.fit()
    here = bits(t)
    for part in end:
        assert equal_states(here[part], end[part]), part
    assert [p for p in recorder.points if p["kind"] == "eval"] == evals
    assert data.given == [(e, b) for e in range(3) for b in range(8)]
    assert alive() <= {"embcache-merge"}
    for store in t.stores:
        assert store.front.pins() == 0
    t.close()


@pytest.mark.parametrize(
    ("tiers", "rows", "after"),
    [
        ("ram,lmdb", "9", 0),
        ("ram,lmdb", "9", 5),
        ("ram,lmdb", "9", 16),
        ("ram,ram,lmdb", "5,20", 23),
        ("ram,ram", "9", 8),
    ],
)
def test_interrupted_anywhere_equals_uninterrupted(tmp_path, tiers, rows, after):
    chosen = {**SETTINGS, "storage": storage(tiers, rows), "valid": ToyData(2)}
    whole = trainer(tmp_path / "a", **chosen)
    whole.fit()
    died = trainer(tmp_path / "b", **chosen)
    step, done = died.train_step, [0]

    def dying(batch):
        if done[0] == after:
            raise ZeroDivisionError
        done[0] += 1
        return step(batch)

    died.train_step = dying
    with pytest.raises(ZeroDivisionError):
        died.fit()
    assert alive() <= {"embcache-merge", "embcache-commit"}
    died.close()
    seed_all(999)
    again = trainer(tmp_path / "b", resume=True, **chosen)
    again.fit()
    a, b = bits(whole), bits(again)
    for part in a:
        assert equal_states(a[part], b[part]), part
    whole.close()
    again.close()


def test_the_best_weights_come_back(tmp_path):
    t = trainer(tmp_path, valid=ToyData(2), values=[2.0, 1.0, 3.0, 4.0], epochs=4, storage=storage())
    kept = {}

    def remember(original=t.save):
        if t.progress.step == 16:
            kept.update(model=bits(t)["model"], stores=bits(t)["stores"])
        original()

    t.save = remember
    t.fit()
    assert not equal_states(kept["stores"], bits(t)["stores"])
    t.restore("best")
    assert equal_states(kept["model"], bits(t)["model"])
    assert equal_states(kept["stores"], bits(t)["stores"])
    t.close()


def test_unbounded_ids_train_like_bounded_ones(tmp_path):
    """Every int64 is an id; the rows are those of a table that declares 2^63."""

    class Wide(ToyData):
        def __iter__(self):
            for ids, target in super().__iter__():
                yield ids * (2**57) - 2**62, target

    ends = []
    for k, chain in enumerate([StorageConfig(), storage("ram,ram"), storage("ram,lmdb")]):
        seed_all(0)
        model_init = ec.init.Uniform(0.1)
        t = trainer(tmp_path / str(k), data=Wide(), rows=None, init=model_init, storage=chain)
        t.fit()
        ends.append(bits(t))
        assert t.stores[0].count_written("t") == 50
        t.close()
    for other in ends[1:]:
        assert equal_states(ends[0]["stores"], other["stores"])
        assert equal_states(ends[0]["model"], other["model"])


def test_a_depth_that_does_not_fit_is_refused_at_its_batch(tmp_path):
    t = trainer(tmp_path, storage=storage("ram,lmdb", "13", depth=4))
    with pytest.raises(CacheTooSmall, match=r"the cache holds 13: .* depth='auto'"):
        t.fit()
    assert t.stores[0].front.pins() == 0
    t.close()


def test_an_evaluation_leaves_no_pin_and_writes_nothing(tmp_path):
    t = trainer(tmp_path, valid=ToyData(3), epochs=1, storage=storage())
    t.fit()
    before, store = bits(t), t.stores[0]
    resident = store.traffic()["cache"]["resident"]
    t.evaluate()
    assert store.front.pins() == 0
    assert store.traffic()["cache"]["resident"] <= resident  # rows beyond the cache leave
    assert equal_states(before["stores"], bits(t)["stores"])
    t.close()


def test_a_full_disk_ends_the_run_with_its_error(tmp_path, monkeypatch):
    t = trainer(tmp_path, checkpoint_every=2, storage=storage())
    store, synced = t.stores[0], []

    def full():
        synced.append(1)
        if len(synced) > 1:
            raise StorageFull(10, 5, str(tmp_path))

    monkeypatch.setattr(store.durable, "sync", full)
    with pytest.raises(StorageFull, match="no room for 10 bytes"):
        t.fit()
    assert [g.notes["step"] for g in store.checkpoints.generations] == [2]


# what the report is told -----------------------------------------------------------------------------------------


def test_curves_hold_hit_rates_and_traffic(tmp_path):
    recorder = Recorder()
    t = trainer(tmp_path, observers=[recorder], storage=storage())
    t.fit()
    points = [p for p in recorder.points if p["kind"] == "train"]
    assert all(0 <= p["hit_rate"] <= 1 for p in points)
    assert points[0]["hit_rate"] < 1
    cache, last = t.stores[0].traffic()["cache"], t.stores[0].traffic()["tiers"][-1]
    for name in ("bytes_read", "bytes_written"):
        assert sum(p[name] for p in points) == pytest.approx(last[name], rel=0.5)
        assert all(p[name] >= 0 for p in points)
    assert sum(p["seconds_miss_read"] for p in points) <= cache["seconds"]["miss_read"]
    t.close()
    plain = Recorder()
    trainer(observers=[plain]).fit()
    assert "hit_rate" not in plain.points[0]


def test_traffic_counts_from_where_it_was_asked():
    store = ec.EmbeddingStore([ec.TableConfig("t", 50, 4)], [Ram(rows=10), Ram()], backend="reference")
    traffic = Traffic([store])
    batch = ec.KeyedJaggedTensor(["t"], torch.arange(8), lengths=torch.ones(8, dtype=torch.int64))
    for expected in (0.0, 1.0):
        store.stage(batch, training=True).release()
        assert traffic.point()["hit_rate"] == expected
    assert Traffic([]).point() == {}
