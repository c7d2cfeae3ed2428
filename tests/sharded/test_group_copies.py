"""Exports, imports and copies of a group's rows; folders that are lost, foreign or old; errors on one rank."""

from __future__ import annotations

import shutil

import pytest
import ranks
import torch
from sharding import expected, gathered, one_store, open_group, rows, tables, train, warm

import embcache as ec
from embcache import statefile
from embcache.errors import BadConfig, RemoteFault, StorageFull
from embcache.sharded.copies import Copies
from embcache.sharded.manifest import GroupManifest
from embcache.sharded.transfer import export_group, import_group
from embcache.transfer import import_exports

pytestmark = pytest.mark.soak  # minutes each


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    warm(tmp_path_factory.mktemp("warm"))


def steps(rank, at, tier, kinds, count, copies=None, admission=True, which="latest", best=False):
    """Load, train ``count`` steps, commit; (step, rows found, rows left, plan, generations, lines told)."""
    declared, told = tables(admission), []
    saved, store = open_group(rank, at, kinds, tier, declared, copies=None if copies is None else Copies(copies, 3),
                              tell=told.append)  # fmt: skip
    step = saved.load([store], which)["step"] if saved.latest is not None else 0
    found = rows(store)
    chain = []
    for _ in range(count):
        step += 1
        train(store, range(step, step + 1), rank.rank)
        saved.save({"step": step, "random": torch.tensor([rank.rank])}, [store], notes={"step": step}, best=best,
                   wait=False)  # fmt: skip
        saved.wait()
        chain.append([] if saved.copies is None else [len(c.chain) for c in saved.copies.copies])
    result = step, found, rows(store), store.plan, chain, told
    store.close()
    return result


def check(got, step, what=1, admission=True):
    made, declared = got[0][3], tables(admission)
    assert gathered([g[what] for g in got], made, declared) == expected(one_store(step, declared), made)


def deltas(rank, at, kinds, tier, out, first):
    """Train and export, in full first and then deltas; all steps so far."""
    declared = tables(True)
    saved, store = open_group(rank, at, kinds, tier, declared)
    step = saved.load([store])["step"] if saved.latest is not None else 0
    for k in range(2):
        train(store, range(step + 1, step + 3), rank.rank)
        step += 2
        saved.save({"step": step}, [store])
        since = None if first and k == 0 else out / str(step - 2)
        manifest = export_group(saved, store, out / str(step), since=since)
        assert (manifest.parent is None) == (since is None)
    store.close()
    return step


def fetch(rank, at, kinds, tier, chain):
    """A chain into a group that holds something else."""
    declared = tables(True)
    saved, store = open_group(rank, at, kinds, tier, declared)
    train(store, range(50, 52), rank.rank)
    import_group(saved, store, *chain, state={"step": 1})
    found = rows(store), store.plan, list(store.local.steps)
    store.close()
    saved, store = open_group(rank, at, kinds, tier, declared, lanes=store.lanes)
    assert saved.load([store]) == {"step": 1}
    assert rows(store) == found[0]
    store.close()
    return found


@pytest.mark.soak
def test_chains_of_deltas_go_on_across_moves(tmp_path):
    """Two ranks, then three, then another plan; imported by one store, and by groups of other sizes and plans."""
    out = tmp_path / "out"
    for k, (world, kinds) in enumerate([(2, "rrr"), (3, "rrd"), (2, "tcr")]):
        last = ranks.run(world, deltas, at=tmp_path / "a", kinds=kinds, tier="cache", out=out, first=k == 0)
    assert last == [12, 12]
    declared, chain = tables(True), [out / str(step) for step in range(2, 13, 2)]
    reference = one_store(12, declared)
    single = ec.EmbeddingStore(declared)
    import_exports(single, *chain)
    for t in range(len(declared)):
        for (ids, block), (other, wanted) in zip(single.raw_rows(t, 10**6), reference.local.raw_rows(t, 10**6),
                                                 strict=True):  # fmt: skip
            assert torch.equal(ids, other)
            assert torch.equal(block, wanted)
    assert single.steps == [12, 12, 12]
    for key, value in reference.local.extra_state().items():
        assert torch.equal(single.extra_state()[key], value), key
    for world, kinds, tier in [(3, "rct", "hashed"), (1, "ttt", "ram")]:
        got = ranks.run(world, fetch, at=tmp_path / f"b{world}", kinds=kinds, tier=tier, chain=chain)
        assert gathered([g[0] for g in got], got[0][1], declared) == expected(reference, got[0][1])
        assert set(got[0][2]) == {12}


@pytest.mark.parametrize("tier", ["cache", pytest.param("ram", marks=pytest.mark.soak)])
def test_the_loss_of_folders_loses_nothing_that_was_copied(tmp_path, tier):
    at, copies = tmp_path / "run", tmp_path / "copies"
    arguments = {"at": at, "copies": copies, "tier": tier, "kinds": "rrd"}
    got = ranks.run(2, steps, count=5, **arguments)
    lengths = [chains[-1] for chains in got[0][4]]  # a chain begins anew where deltas are larger than a full export
    assert lengths[:2] == ([1, 2] if tier == "cache" else [1, 1])
    assert max(lengths) <= (3 if tier == "cache" else 1)
    shutil.rmtree(at / "rank-00001")  # a node is lost
    got = ranks.run(2, steps, count=1, **arguments)
    check(got, 5)
    assert "comes from" in got[0][5][0]
    shutil.rmtree(at)  # all are, and one rank more comes
    got = ranks.run(3, steps, count=1, **arguments)
    check(got, 6)
    shutil.rmtree(at / "rank-00000")
    (at / "manifest.json").unlink()  # rank 0's node, with the manifest
    got = ranks.run(2, steps, count=1, **{**arguments, "kinds": "tcr"})
    check(got, 7)
    got = ranks.run(2, steps, count=0, **{**arguments, "kinds": "tcr"})
    check(got, 8)
    assert got[0][5] == []  # from its own folders again
    assert len([p for p in copies.iterdir() if p.name.startswith("export")]) <= 4


def broken(rank, at, what):
    """What opening and loading says of folders that are not what they should be."""
    try:
        saved, store = open_group(rank, at, "rrd", "cache")
    except Exception as error:
        return type(error).__name__, str(error)
    try:
        saved.load([store])
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        store.close()
    return "fine", ""


def test_folders_that_are_not_what_the_manifest_names_are_refused(tmp_path):
    at, other = tmp_path / "run", tmp_path / "other"
    plain = {"tier": "cache", "kinds": "rrd", "admission": False}
    ranks.run(2, steps, at=at, count=1, **plain)
    shutil.copytree(at, tmp_path / "old")
    ranks.run(2, steps, at=at, count=3, **plain)
    ranks.run(2, steps, at=other, count=4, **plain)

    def said(change, text, kind="CorruptStore"):
        case = tmp_path / "case"
        shutil.copytree(at, case)
        change(case)
        found = ranks.run(2, broken, at=case, what=text)
        assert all(text in message for _, message in found), found
        assert {name for name, _ in found} <= {kind, "Lost", "RemoteFault"}
        shutil.rmtree(case)

    def replaced(name, source):
        def change(case):
            shutil.rmtree(case / name)
            shutil.copytree(source / name, case / name)

        return change

    said(lambda case: shutil.rmtree(case / "rank-00001"), "rank 1 of generation 4")
    said(replaced("rank-00001", tmp_path / "old"), "holds generations [1], the group's manifest names 4")
    said(replaced("rank-00000", other), "another manifest")
    said(lambda case: (case / "manifest.json").unlink(), "no manifest.json")
    said(lambda case: shutil.copy(tmp_path / "old" / "manifest.json", case), "names 1")
    said(lambda case: (case / "manifest.json").write_bytes(b"{}"), "not the manifest of a group")
    assert [kind for kind, _ in ranks.run(2, broken, at=at, what="")] == ["fine", "fine"]


def full(rank, at, tier, where):
    """The disk of one rank is full in a commit; the same call works again; what is raised on each rank."""
    declared = tables()
    saved, store = open_group(rank, at, "rrd", tier, declared)
    train(store, range(1, 3), rank.rank)
    saved.save({"step": 2}, [store])
    said, original = [], (statefile.write_file, GroupManifest.write)
    for wait in (True, False):
        train(store, range(3, 4) if wait else range(4, 5), rank.rank)

        def no_room(folder, name, data):
            if rank.rank == 1 and name.startswith("state.json"):
                raise StorageFull(len(data), 0, str(folder))
            return original[0](folder, name, data)

        def no_manifest(self, folder):
            raise StorageFull(1, 0, str(folder))

        if where == "state":
            statefile.write_file = no_room
        else:
            GroupManifest.write = no_manifest
        try:
            saved.save({"step": 9}, [store], wait=wait)
            saved.wait()
        except (StorageFull, RemoteFault) as error:
            said.append((type(error).__name__, isinstance(error, OSError), str(error)))
        statefile.write_file, GroupManifest.write = original
        assert saved.latest.number == len(said)
        saved.save({"step": 3 if wait else 4}, [store], wait=wait)
        saved.wait()
        assert saved.latest.number == 1 + len(said)
    train(store, range(9, 10), rank.rank)
    with pytest.raises(BadConfig):
        export_group(saved, store, at.parent / "no")
    store.close()
    saved, store = open_group(rank, at, "rrd", tier, declared, lanes=store.lanes)
    state = saved.load([store])
    found = rows(store)
    store.close()
    return said, state, found, store.plan


@pytest.mark.parametrize(
    ("tier", "where"), [("cache", "state"), pytest.param("ram", "manifest", marks=pytest.mark.soak)]
)
def test_a_full_disk_of_one_rank_is_raised_by_all_and_the_same_call_works_again(tmp_path, tier, where):
    got = ranks.run(2, full, at=tmp_path / "run", tier=tier, where=where)
    failing, other = (1, 0) if where == "state" else (0, 1)
    assert [name for name, *_ in got[failing][0]] == ["StorageFull"] * 2
    assert [name for name, *_ in got[other][0]] == ["RemoteFault"] * 2
    assert all(os_error and "no room" in text for g in got for _, os_error, text in g[0])
    assert [g[1] for g in got] == [{"step": 4}] * 2
    assert gathered([g[2] for g in got], got[0][3], tables()) == expected(one_store(4), got[0][3])


def best(rank, at, tier):
    """The best generation was made by two ranks; three go back to it, and on to the newest again."""
    saved, store = open_group(rank, at, "rrd", tier)
    newest = saved.load([store])
    first = rows(store)
    assert (saved.latest.number, saved.best.number) == (5, 2)
    state = saved.load([store], "best")
    found = rows(store)
    assert saved.load([store]) == newest
    assert rows(store) == first
    with pytest.raises(FileNotFoundError):
        saved.find(3)
    store.close()
    return state, found, store.plan


@pytest.mark.soak
@pytest.mark.parametrize("tier", ["cache", "ram"])
def test_the_best_generation_is_kept_across_moves(tmp_path, tier):
    common = {"at": tmp_path, "tier": tier, "kinds": "rrd", "admission": False}
    ranks.run(2, steps, count=1, **common)
    ranks.run(2, steps, count=1, best=True, **common)
    ranks.run(4, steps, count=3, **common)
    got = ranks.run(3, best, at=tmp_path, tier=tier)
    assert gathered([g[1] for g in got], got[0][2], tables()) == expected(one_store(2), got[0][2])
    assert all(g[0]["step"] == 2 for g in got)
    there = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert there == [f"rank-0000{r}" for r in range(4)]  # the generation before the newest is of four
