"""Stores that hold some columns of a table each: together they are the store that holds the whole table."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import embcache as ec
from embcache import records, schema
from embcache.config import Columns, TableConfig

INITS = [
    ec.init.Constant(0.3), ec.init.Uniform(), ec.init.Uniform(0.2, 1.0), ec.init.Normal(0.5),
    ec.init.TruncatedNormal(0.5), ec.init.XavierUniform(2.0),
]  # fmt: skip
RULES = [
    ec.optim.SGD(weight_decay=0.1),
    ec.optim.Adagrad(initial_accumulator_value=0.1),
    ec.optim.RowWiseAdagrad(weight_decay=0.1, initial_accumulator_value=0.1),
    ec.optim.RowWiseAdagrad(max_norm=0.4, weight_decay=0.1, weight_decay_mode="decoupled"),
    ec.optim.Adam(per_row_step=True),
    ec.optim.RowWiseAdam(weight_decay=0.1),
    ec.optim.RowWiseAdam(per_row_step=True),
    ec.optim.LAMB(weight_decay=0.1),
    ec.optim.LARS(eta=0.1, weight_decay=0.1),
    ec.optim.FTRL(l1=0.01, initial_accumulator_value=0.1),
]


class Meeting:
    """What stores on threads of their own ask each other: each call returns when all have called."""

    def __init__(self, stores: list[ec.EmbeddingStore]) -> None:
        self._barrier = threading.Barrier(len(stores), timeout=20)
        self._given: list[Any] = [None] * len(stores)
        self.asked: list[str] = []
        for k, store in enumerate(stores):
            store.row_parts.exchange = lambda what, mine, k=k: self._ask(k, what, mine)

    def _ask(self, k: int, what: str, mine: Mapping[int, Tensor]) -> dict[int, Tensor]:
        self._given[k] = (what, mine)
        self._barrier.wait()
        given = list(self._given)
        assert len({what for what, _ in given}) == 1
        if k == 0:
            self.asked.append(what)
        self._barrier.wait()
        return {t: torch.stack([mine[t] for _, mine in given]) for t in mine}


def together(stores: list[ec.EmbeddingStore]) -> None:
    """One step of every store."""
    errors: list[BaseException] = []

    def step(store: ec.EmbeddingStore) -> None:
        try:
            store.step()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=step, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def table(rule: ec.optim.Rule = RULES[0], **changes: Any) -> TableConfig:
    given = {
        "num_embeddings": 40,
        "embedding_dim": 11,
        "features": ["f"],
        "optimizer": rule,
        "init": ec.init.Normal(0.5),
    }
    return TableConfig("t", **{**given, **changes})


CUTS = ((0, 3), (3, 4), (4, 11))


def train(whole: TableConfig, tiers: Any, *, steps: int = 6, weighted: bool = False) -> tuple[Any, list[Any], Meeting]:
    """(store of the whole table, stores of its columns, their meeting) after the same steps of pooled bags."""
    parts = [ec.EmbeddingStore([whole.part(*cut)], tiers()) for cut in CUTS]
    store, meeting = ec.EmbeddingStore([whole], tiers()), Meeting(parts)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(0, 40, (14,), generator=generator)
        weights = torch.rand(14, generator=generator) if weighted else None
        batch = ec.KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([3, 0, 5, 6]), weights=weights)
        grad = torch.randn(4, 11, generator=generator)
        for micro in range(2):  # two lookups, one step
            with store.stage(batch) as handle:
                pooled = store.lookup(handle)["f"]
                store.update(handle, {"f": grad + micro})
            for part, (first, last) in zip(parts, CUTS, strict=True):
                with part.stage(batch) as handle:
                    out = part.lookup(handle)["f"]
                    if whole.max_norm is None:
                        assert torch.allclose(out, pooled[:, first:last], rtol=1e-4, atol=1e-5)
                    part.update(handle, {"f": (grad + micro)[:, first:last]})
        store.step()
        together(parts)
    return store, parts, meeting


def rows_of(store: ec.EmbeddingStore, whole: TableConfig) -> tuple[Tensor, Tensor]:
    ids, rows = zip(*store.raw_rows(0, 7), strict=True)
    return torch.cat(ids), torch.cat(rows)


def joined(parts: list[ec.EmbeddingStore], whole: TableConfig) -> tuple[Tensor, Tensor]:
    each = [rows_of(part, whole) for part in parts]
    assert all(torch.equal(ids, each[0][0]) for ids, _ in each)
    return each[0][0], records.glue(whole, [(p.tables[0], rows) for p, (_, rows) in zip(parts, each, strict=True)])


def ram() -> list[Any]:
    return [ec.tiers.Ram()]


def cached() -> list[Any]:
    return [ec.tiers.Ram(rows=4), ec.tiers.Ram()]


@pytest.mark.parametrize("tiers", [ram, cached])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.row_sums}")
def test_parts_are_the_columns_of_the_whole(rule: ec.optim.Rule, tiers: Any) -> None:
    whole = table(rule)
    store, parts, meeting = train(whole, tiers, weighted=True)
    ids, rows = joined(parts, whole)
    wanted_ids, wanted = rows_of(store, whole)
    assert torch.equal(ids, wanted_ids)
    if rule.row_sums == 0:
        assert torch.equal(rows, wanted)
        assert meeting.asked == []
    else:
        for view in (records.weights, records.states):
            assert torch.allclose(view(whole, rows), view(whole, wanted), rtol=2e-5, atol=2e-6)
        expected = ["sums", "squares"] if getattr(rule, "max_norm", 0) else ["sums"]
        assert meeting.asked == expected * 6


@pytest.mark.parametrize("rule", [RULES[0], RULES[2], RULES[7]], ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_that_of_the_column(rule: ec.optim.Rule, dtype: torch.dtype) -> None:
    whole = table(rule, dtype=dtype, num_embeddings=None)
    store, parts, _ = train(whole, ram, steps=2)
    (ids, rows), (wanted_ids, wanted) = joined(parts, whole), rows_of(store, whole)
    assert torch.equal(ids, wanted_ids)
    same = records.weights(whole, rows) == records.weights(whole, wanted)
    assert bool(same.all()) if rule.row_sums == 0 else float(same.float().mean()) > 0.99


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
@pytest.mark.parametrize("tiers", [ram, cached])
def test_max_norm_of_the_table_is_that_of_whole_rows(norm_type: float, tiers: Any) -> None:
    whole = table(RULES[0], max_norm=0.8, norm_type=norm_type)
    store, parts, meeting = train(whole, tiers, steps=3)
    (ids, rows), (wanted_ids, wanted) = joined(parts, whole), rows_of(store, whole)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(records.weights(whole, rows), records.weights(whole, wanted), rtol=1e-5, atol=1e-6)
    assert meeting.asked == ["norms"] * 3


def test_admission_padding_and_expiry_keep_the_parts_together() -> None:
    whole = table(
        RULES[5],
        num_embeddings=None,
        admission=ec.Admission(3, cells=4096),
        padding_idx=5,
        expiry=ec.Expiry(idle=2, every=2),
    )
    store, parts, _ = train(whole, cached, steps=8)
    (ids, rows), (wanted_ids, wanted) = joined(parts, whole), rows_of(store, whole)
    assert torch.equal(ids, wanted_ids)
    assert 0 < ids.numel() < 40
    assert torch.allclose(records.weights(whole, rows), records.weights(whole, wanted), rtol=2e-5, atol=2e-6)
    assert torch.equal(records.metas(whole, rows), records.metas(whole, wanted))


def test_frozen_parts_ask_nothing() -> None:
    parts = [ec.EmbeddingStore([table(RULES[7]).part(*cut)]) for cut in CUTS]
    meeting = Meeting(parts)
    batch = ec.KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    for part in parts:
        with part.stage(batch) as handle:
            part.update(handle, {"f": torch.ones(1, part.tables[0].embedding_dim)})
        part.freeze()
    together(parts)
    assert meeting.asked == []


@pytest.mark.parametrize("changes", [{"optimizer": RULES[2]}, {"max_norm": 1.0}])
def test_a_part_alone_is_not_trained(changes: dict[str, Any]) -> None:
    store = ec.EmbeddingStore([table(**changes).part(3, 4)])
    before = store.weight("t").clone()
    batch = ec.KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    with store.stage(batch) as handle:
        store.update(handle, {"f": torch.ones(1, 1)})
    with pytest.raises(
        ec.errors.NotSupported, match=r"table 't' is Columns\(first=3, of=11, table='t'\) with 1 of them"
    ):
        store.step()
    assert torch.equal(store.weight("t"), before)
    assert store.steps == [0]


@pytest.mark.parametrize("start", INITS, ids=repr)
@pytest.mark.parametrize("rows", [40, None])
@pytest.mark.parametrize("tiers", [ram, cached])
def test_initial_rows_are_the_columns_of_the_whole(start: ec.init.Initializer, rows: int | None, tiers: Any) -> None:
    if rows is None and isinstance(start, ec.init.XavierUniform):
        pytest.skip("it needs to know the number of rows")
    for dtype in (torch.float32, torch.float16):
        whole = table(init=start, num_embeddings=rows, dtype=dtype, padding_idx=2)
        ids = torch.arange(40) if rows else torch.tensor([2, -(2**63), 2**63 - 1, -1, 77])
        wanted = ec.EmbeddingStore([whole], tiers()).read_rows("t", ids)[0]
        for first, last in CUTS:
            part = ec.EmbeddingStore([whole.part(first, last, f"part{first}")], tiers())
            assert torch.equal(part.read_rows(part.names[0], ids)[0], wanted[:, first:last])


def test_a_part_says_so_wherever_it_is_saved(tmp_path: Path) -> None:
    whole = table()
    part = whole.part(3, 4)
    assert (part.columns, part.embedding_dim, part.whole_dim) == (Columns(3, 11, "t"), 1, 11)
    assert part.part(0, 1) is part
    assert whole.part(2, 9).part(1, 3) == whole.part(3, 5)
    assert schema.restore(json.loads(json.dumps(schema.describe(part)))) == part
    assert "columns" not in schema.describe(whole)  # as it was before there were parts
    assert schema.restore(json.loads(json.dumps(schema.describe(whole)))) == whole
    with pytest.raises(ec.errors.SchemaMismatch, match=r"Columns\(first=3, of=11, table='t'\)"):
        schema.agree([part], [whole.part(4, 5)])
    store = ec.EmbeddingStore([part], [ec.tiers.Ram(rows=4), ec.tiers.Lmdb(tmp_path / "store")])
    store.load_rows("t", torch.tensor([7]), torch.tensor([[3.0]]))
    store.commit()
    store.close()
    again = ec.EmbeddingStore.open(tmp_path / "store", readonly=True)
    assert again.tables == [part]
    again.close()
    with pytest.raises(ec.errors.SchemaMismatch):
        ec.EmbeddingStore([table(embedding_dim=1)], [ec.tiers.Ram(rows=4), ec.tiers.Lmdb(tmp_path / "store")])


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (3, 3), (4, 3), (0, 12), (11, 12)])
def test_columns_that_are_not_there(first: int, last: int) -> None:
    with pytest.raises(ec.errors.BadConfig, match=r"valid range \[0, 11\)"):
        table().part(first, last)


def test_columns_are_checked() -> None:
    for columns in (Columns(8, 11, "t"), Columns(0, 3, "t")):
        with pytest.raises(ec.errors.BadConfig, match="has no room for embedding_dim = 4"):
            table(embedding_dim=4, columns=columns)
    with pytest.raises(ec.errors.BadConfig, match=r"Columns: first = -1"):
        Columns(-1, 4, "t")
    with pytest.raises(ec.errors.BadConfig, match=r"Columns: table = ''"):
        Columns(0, 4, "")
    broken = schema.describe(table().part(3, 5))
    broken["columns"]["of"] = 4
    with pytest.raises(ec.errors.CorruptStore, match="has no room"):
        schema.restore(broken)
