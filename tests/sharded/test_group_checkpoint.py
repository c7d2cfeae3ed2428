"""Checkpoints of a group: one generation on all ranks whatever happens, and rows that move where they must."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import ranks
import torch
from sharding import expected, gathered, one_store, open_group, rows, tables, train, warm

from embcache.sharded.layout import layout_of, narrowed, payload_bytes
from embcache.sharded.transfer import export_group
from embcache.transfer import export_store

pytestmark = pytest.mark.soak  # minutes each


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    warm(tmp_path_factory.mktemp("warm"))


def sums(folder):
    """sha256 of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def go_on(rank, at, tier, kinds, steps, admission=False, wait=True):
    """Open, load, train some steps and commit; rows before and after, and what moved. Exported at both ends."""
    declared = tables(admission)
    saved, store = open_group(rank, at / "run", kinds, tier, declared)
    step, before, moved = 0, None, None
    if saved.latest is not None:
        state = saved.load([store])
        step = state["step"]
        assert state["weight"].tolist() == [step, step + 0.5]
        assert state["random"].tolist() == [rank.rank] if saved.latest.notes["world"] == rank.world else [0]
        moved = saved.moved and saved.moved.totals()
        export_group(saved, store, at / f"before-{step}-{rank.world}-{kinds}", memory=1 << 16)
    before = rows(store)
    train(store, range(step + 1, step + steps + 1), rank.rank)
    step += steps
    state = {"step": step, "weight": torch.tensor([step, step + 0.5]), "random": torch.tensor([rank.rank])}
    if steps:
        saved.save(state, [store], notes={"step": step, "world": rank.world}, wait=wait)
        saved.wait()
        export_group(saved, store, at / f"after-{step}", memory=1 << 16)
    result = before, rows(store), moved, store.plan, list(store.local.steps)
    store.close()
    return result


def least(old, new, declared, written):
    """[rows, bytes] that must change ranks between two plans: what a rank needs of each row and has not."""
    count = size = 0
    for table in declared:
        ids = written[table.name]
        for b in layout_of(new, declared)[table.name]:
            for a in layout_of(old, declared)[table.name]:
                first, last = max(a.columns[0], b.columns[0]), min(a.columns[1], b.columns[1])
                for rank in range(new.world) if first < last else ():
                    needs = rank in b.ranks if b.replicated else b.owners(ids) == rank
                    has = rank in a.ranks if a.replicated else a.owners(ids) == rank
                    n = int((np.full(len(ids), needs) & ~np.full(len(ids), has)).sum())
                    count += n
                    size += n * (8 + payload_bytes(narrowed(table, (first, last))))
    return [count, size]


CHAIN = [(1, "rrr"), (2, "rrr"), (4, "rrr"), (3, "rrr"), (3, "rcd"), (4, "ctr"), (3, "ddt"), (2, "crc"), (1, "ttt")]


@pytest.mark.parametrize(
    ("tier", "admission"),
    [
        ("cache", True),
        pytest.param("ram", False, marks=pytest.mark.soak),
        pytest.param("hashed", True, marks=pytest.mark.soak),
    ],
)
def test_any_ranks_and_plans_go_on_with_the_same_rows(tmp_path, tier, admission):
    step, last = 0, None
    for world, kinds in CHAIN:
        declared = tables(admission)
        got = ranks.run(world, go_on, at=tmp_path, tier=tier, kinds=kinds, steps=2, admission=admission,
                        wait=world % 2 == 0)  # fmt: skip
        made = got[0][3]
        reference = one_store(step, declared)
        assert gathered([g[0] for g in got], made, declared) == expected(reference, made)
        if step:
            here = sums(tmp_path / f"before-{step}-{world}-{kinds}")
            assert here == sums(tmp_path / f"after-{step}")  # the same state on other ranks
            whole = export_store(reference.local, tmp_path / f"whole-{step}", memory=1 << 16)
            there = sums(tmp_path / f"whole-{step}")
            assert {**here, "export.json": ""} == {**there, "export.json": ""}  # whose lineage is another
            written = {t.name: torch.cat([ids for ids, _ in reference.local.raw_rows(i, 1 << 20)]).numpy()
                       for i, t in enumerate(declared)}  # fmt: skip
            assert all(len(written[part.table.name]) == part.rows for part in whole.tables)
            counts = [g[2] for g in got if g[2] is not None]
            moved = [sum(c.rows for c in counts), sum(c.bytes for c in counts)]
            must = least(last, made, declared, written)
            print(f"{last.world} -> {world} ranks, {kinds}: {moved[0]} rows, {moved[1]} bytes moved, least {must}")
            assert moved == must
        step += 2
        assert gathered([g[1] for g in got], made, declared) == expected(one_store(step, declared), made)
        assert all(set(g[4]) == {step} for g in got)
        last = made
