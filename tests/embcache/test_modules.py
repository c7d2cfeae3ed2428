"""Modules against torch.nn: outputs in bits where promised, gradients, options, state dicts, devices and dtypes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from jagged_twins import Twin, close, jagged

import embcache as ec
from embcache.errors import BadConfig, BadJagged, BadJaggedType, NotSupported, UnknownFeature


def ragged(rows: int = 50, bags: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    kjt = jagged(["f"], [rows], bags, longest=9, seed=seed)
    return kjt.values(), kjt.offsets()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dim", [1, 3, 4, 7, 16, 64, 100, 1000])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_embedding_bag_gives_torchs_bits(backend: str, mode: str, dim: int, index: torch.dtype) -> None:
    theirs = torch.nn.EmbeddingBag(50, dim, mode=mode)
    ours = ec.EmbeddingBag(50, dim, mode=mode, _weight=theirs.weight, backend=backend)
    values, offsets = (x.to(index) for x in ragged())
    assert torch.equal(ours(values, offsets[:-1]), theirs(values, offsets[:-1]))
    grid = values[: values.numel() // 4 * 4].view(-1, 4)
    assert torch.equal(ours(grid), theirs(grid))


def test_include_last_offset(backend: str) -> None:
    theirs = torch.nn.EmbeddingBag(50, 8, mode="sum", include_last_offset=True)
    ours = ec.EmbeddingBag(50, 8, mode="sum", include_last_offset=True, _weight=theirs.weight, backend=backend)
    values, offsets = ragged()
    assert torch.equal(ours(values, offsets), theirs(values, offsets))


def test_weighted_sum_and_its_gradients(backend: str) -> None:
    theirs = torch.nn.EmbeddingBag(50, 8, mode="sum")
    ours = ec.EmbeddingBag(50, 8, mode="sum", _weight=theirs.weight, optimizer=ec.optim.SGD(lr=0.1), backend=backend)
    optimizer = ec.optim.SparseOptimizer(ours)
    values, offsets = ragged()
    a, b = (torch.rand(values.numel(), generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    x, y = ours(values, offsets[:-1], a), theirs(values, offsets[:-1], b)
    assert close(x, y, 1e-6)
    g = torch.randn_like(y)
    x.backward(g)
    y.backward(g)
    assert close(a.grad, b.grad, 1e-6)
    optimizer.step()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    assert close(ours.weight, theirs.weight.detach(), 1e-6)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3)])
def test_embedding_keeps_the_shape(backend: str, shape: tuple[int, ...]) -> None:
    theirs = torch.nn.Embedding(20, 6)
    ours = ec.Embedding(20, 6, _weight=theirs.weight, backend=backend)
    ids = torch.randint(0, 20, shape)
    assert torch.equal(ours(ids), theirs(ids))


def train(module: torch.nn.Module, optimizer: Any, *args: Any) -> torch.Tensor:
    out = module(*args)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return out.detach()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [
    {}, {"max_norm": 1.0}, {"max_norm": 0.7, "norm_type": 1.0}, {"padding_idx": 3}, {"padding_idx": -1},
    {"max_norm": 1.5, "padding_idx": 0}, {"sparse": True},
])  # fmt: skip
def test_embedding_bag_trains_like_torch(backend: str, mode: str, options: dict[str, Any]) -> None:
    if mode == "max" and "padding_idx" in options:
        with pytest.raises(NotSupported):
            ec.EmbeddingBag(50, 8, mode=mode, **options)
        return
    theirs = torch.nn.EmbeddingBag(50, 8, mode=mode, **{**options, "sparse": False})  # torch has no sparse max
    ours = ec.EmbeddingBag(50, 8, mode=mode, **options, _weight=theirs.weight, optimizer=ec.optim.SGD(lr=0.1),
                           backend=backend)  # fmt: skip
    a, b = ec.optim.SparseOptimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(3):
        values, offsets = ragged(seed=step)
        assert close(train(ours, a, values, offsets[:-1]), train(theirs, b, values, offsets[:-1]), 1e-6)
    assert close(ours.weight, theirs.weight.detach(), 1e-6)


@pytest.mark.parametrize("options", [
    {}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"padding_idx": 3}, {"padding_idx": -1},
    {"max_norm": 1.5, "scale_grad_by_freq": True, "padding_idx": 0},
])  # fmt: skip
def test_embedding_trains_like_torch(backend: str, options: dict[str, Any]) -> None:
    theirs = torch.nn.Embedding(50, 8, **options)
    ours = ec.Embedding(50, 8, **options, _weight=theirs.weight, optimizer=ec.optim.SGD(lr=0.1), backend=backend)
    a, b = ec.optim.SparseOptimizer(ours), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(3):
        ids = torch.randint(0, 50, (7, 5), generator=torch.Generator().manual_seed(step))
        assert close(train(ours, a, ids), train(theirs, b, ids), 1e-6)
    assert close(ours.weight, theirs.weight.detach(), 1e-6)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_scale_grad_by_freq_divides_by_each_ids_own_count(backend: str, mode: str) -> None:
    """torch's EmbeddingBag on CPU divides by the count of another id (indices[i], i counting unique ids); the rule of
    its documentation, which torch.nn.Embedding follows, is the oracle."""
    emb = torch.nn.Embedding(50, 8, scale_grad_by_freq=True)
    ours = ec.EmbeddingBag(50, 8, mode=mode, scale_grad_by_freq=True, _weight=emb.weight,
                           optimizer=ec.optim.SGD(lr=1.0), backend=backend)  # fmt: skip
    optimizer = ec.optim.SparseOptimizer(ours)
    ids = torch.randint(0, 50, (30, 6))
    before = emb.weight.detach().clone()
    pooled = emb(ids).sum(1) if mode == "sum" else emb(ids).mean(1)
    g = torch.randn_like(pooled)
    pooled.backward(g)
    ours(ids).backward(g)
    optimizer.step()
    assert close(ours.weight, before - emb.weight.grad, 1e-6)


def test_max_norm_writes_in_step_only(backend: str) -> None:
    bag = ec.EmbeddingBag(10, 4, max_norm=0.5, mode="sum", backend=backend)
    before = bag.weight.clone()
    out = bag(torch.tensor([[1], [2]]))
    assert bool((out.norm(dim=1) < 0.5001).all())
    assert torch.equal(bag.weight, before)


def test_padding_row_begins_at_zero_and_stays_under_momentum(backend: str) -> None:
    emb = ec.Embedding(10, 4, padding_idx=2, optimizer=ec.optim.LARS(lr=0.1, eta=1.0), backend=backend)
    optimizer = ec.optim.SparseOptimizer(emb)
    for _ in range(3):
        train(emb, optimizer, torch.tensor([2, 2, 5]))
    assert torch.equal(emb.weight[2], torch.zeros(4))
    assert torch.equal(emb.store.state("embedding")[2], torch.zeros(4))


TABLES = [
    ec.TableConfig("a", 30, 4, features=["a1", "a2"], pooling="sum", optimizer=ec.optim.SGD(lr=0.1)),
    ec.TableConfig("b", 20, 7, features=["b"], pooling="mean", optimizer=ec.optim.SGD(lr=0.2)),
    ec.TableConfig("c", 10, 16, features=["c"], pooling="sum", optimizer=ec.optim.SGD(lr=0.3)),
]
FEATURES, ROWS = ["c", "a2", "b", "a1"], [10, 30, 20, 30]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bags", [0, 1, 17, (3, 5, 0, 4)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_collection_against_torch(backend: str, weighted: bool, bags: Any, index: torch.dtype) -> None:
    ebc = ec.EmbeddingBagCollection(TABLES, is_weighted=weighted, backend=backend)
    twin = Twin(ebc.store)
    a, b = ec.optim.SparseOptimizer(ebc), torch.optim.SGD(
        [{"params": [twin.weights[t.name]], "lr": t.optimizer.lr} for t in TABLES])  # fmt: skip
    for step in range(3):
        kjt = jagged(FEATURES, ROWS, bags, weighted=weighted, dtype=index, seed=step)
        ours, theirs = ebc(kjt).to_dict(), twin(kjt)
        assert list(ours) == ["a1", "a2", "b", "c"]
        for name in FEATURES:
            assert ours[name].shape == theirs[name].shape
            assert close(ours[name], theirs[name], 1e-6)
        sum((x.sin().sum() for x in ours.values()), torch.zeros(())).backward()
        sum((x.sin().sum() for x in theirs.values()), torch.zeros(())).backward()
        a.step()
        b.step()
        b.zero_grad(set_to_none=False)
    for table in TABLES:
        assert close(ebc.store.weight(table.name), twin.weights[table.name].detach(), 1e-6)


def test_unpooled_collection_against_torch(backend: str) -> None:
    tables = [
        ec.TableConfig("a", 30, 4, features=["a1", "a2"], pooling="none", optimizer=ec.optim.SGD(lr=0.1)),
        ec.TableConfig("b", 20, 7, features=["b"], pooling="none", optimizer=ec.optim.SGD(lr=0.1)),
    ]
    collection = ec.EmbeddingCollection(tables, backend=backend)
    twin = Twin(collection.store)
    a, b = ec.optim.SparseOptimizer(collection), torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        kjt = jagged(["a2", "x", "b", "a1"], [30, 5, 20, 30], 6, seed=step)
        ours, theirs = collection(kjt), twin(kjt)
        for name in ("a1", "a2", "b"):
            assert close(ours[name].values(), theirs[name], 1e-6)
            assert torch.equal(ours[name].lengths(), kjt[name].lengths())
        sum(x.to_padded_dense().sin().sum() for x in ours.values()).backward()  # type: ignore[union-attr]
        sum(x.sin().sum() for x in theirs.values()).backward()  # type: ignore[union-attr]
        a.step()
        b.step()
        b.zero_grad()
    for table in tables:
        assert close(collection.store.weight(table.name), twin.weights[table.name].detach(), 1e-6)


def test_two_collections_share_a_store(backend: str) -> None:
    """A pooled and an unpooled reader of different tables, and two readers of one table, in one step."""
    tables = [*TABLES, ec.TableConfig("s", 25, 5, features=["s"], pooling="none", optimizer=ec.optim.SGD(lr=0.1))]
    store = ec.EmbeddingStore(tables, backend=backend)
    ebc = ec.EmbeddingBagCollection(TABLES, store=store)
    seq = ec.EmbeddingCollection(tables[3:], store=store)
    twin = Twin(store)
    model = torch.nn.ModuleList([ebc, seq])
    optimizer = ec.optim.SparseOptimizer(model)
    assert [g["name"] for g in optimizer.param_groups] == ["a", "b", "c", "s"]
    kjt = jagged([*FEATURES, "s"], [*ROWS, 25], 6)
    (ebc(kjt).values().sin().sum() + seq(kjt)["s"].values().sin().sum() + ebc(kjt).values().sum()).backward()
    out = twin(kjt)
    theirs = sum(x.sin().sum() for x in out.values()) + sum(x.sum() for n, x in out.items() if n != "s")
    theirs.backward()  # type: ignore[union-attr]
    optimizer.step()
    for table in tables:
        w = twin.weights[table.name]
        assert close(store.weight(table.name), (w - table.optimizer.lr * w.grad).detach(), 1e-6)


def test_handle_stands_for_its_batch() -> None:
    ebc = ec.EmbeddingBagCollection(TABLES)
    kjt = jagged(FEATURES, ROWS, 6)
    with ebc.stage(kjt) as handle:
        assert torch.equal(ebc(handle).values(), ebc(kjt).values())


def test_zero_tables_and_missing_features() -> None:
    none = ec.EmbeddingBagCollection([])
    assert none(jagged(FEATURES, ROWS, 6)).values().shape == (6, 0)
    assert ec.EmbeddingCollection([])(jagged(FEATURES, ROWS, 6)) == {}
    with pytest.raises(UnknownFeature, match=r"table 'b': feature 'b' is not in the batch, which has \['c'\]"):
        ec.EmbeddingBagCollection(TABLES[1:])(jagged(["c"], [10], 6))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: ec.EmbeddingBagCollection([ec.TableConfig("t", 4, 4, pooling="none")]), BadConfig, "EmbeddingColl"),
        (lambda: ec.EmbeddingCollection([ec.TableConfig("t", 4, 4)]), BadConfig, "table 't': pooling 'sum'"),
        (lambda: ec.EmbeddingBag(4, 4, mode="min"), BadConfig, "mode = 'min'"),
        (lambda: ec.EmbeddingBag(4, 4, device="cuda"), NotSupported, "device cuda"),
        (lambda: ec.Embedding(4, 4, padding_idx=4), BadConfig, r"padding_idx = 4, valid range \[-4, 4\)"),
        (lambda: ec.Embedding(4, 4, out_of_range="drop"), NotSupported, "drop"),
        (lambda: ec.EmbeddingBag(4, 4)(torch.tensor([1.0])), BadJaggedType, "input has dtype torch.float32"),
        (lambda: ec.EmbeddingBag(4, 4)(torch.tensor([1])), BadJagged, "needs offsets"),
        (lambda: ec.EmbeddingBag(4, 4)(torch.tensor([[1]]), None, torch.tensor([[1]])), BadJaggedType,
         "per_sample_weights has dtype torch.int64"),
        (lambda: ec.EmbeddingBag(4, 4)(torch.tensor([[1]]), None, torch.tensor([1.0])), BadJagged,
         r"per_sample_weights has shape \[1\], input \[1, 1\]"),
        (lambda: ec.EmbeddingBag(4, 4)(torch.tensor([[1]]), torch.tensor([0])), BadJagged, "offsets is given"),
        (lambda: ec.EmbeddingBag(4, 4)(torch.tensor([1]), torch.tensor([1])), BadJagged, r"offsets\[0\] = 1"),
        (lambda: ec.EmbeddingBagCollection(TABLES, is_weighted=True)(jagged(FEATURES, ROWS, 2)), BadJagged,
         "is_weighted=True but the batch has no weights"),
        (lambda: ec.EmbeddingBagCollection(TABLES)(jagged(FEATURES, ROWS, 2, weighted=True)), BadJagged,
         "is_weighted=False but the batch has weights"),
        (lambda: ec.Embedding(4, 4).reset_parameters(), NotSupported, "another seed"),
    ],
)  # fmt: skip
def test_refused(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_no_parameters_and_plain_state_dicts() -> None:
    bag = ec.EmbeddingBag(10, 4)
    assert list(bag.parameters()) == []
    assert list(bag.buffers()) == []
    torchs = torch.nn.EmbeddingBag(10, 4)
    torchs.load_state_dict(bag.state_dict())
    assert torch.equal(torchs.weight, bag.weight)
    other = torch.nn.EmbeddingBag(10, 4)
    bag.load_state_dict(other.state_dict())
    assert torch.equal(bag.weight, other.weight)
    ebc = ec.EmbeddingBagCollection(TABLES)
    model = torch.nn.ModuleDict({"sparse": ebc, "top": torch.nn.Linear(2, 2)})
    state = model.state_dict()
    assert [k for k in state if "sparse" in k] == [f"sparse.embedding_bags.{t}.weight" for t in "abc"]
    twin = torch.nn.ModuleDict({"sparse": ec.EmbeddingBagCollection(TABLES), "top": torch.nn.Linear(2, 2)})
    ebc.store.weight("a")[3] = 7.0
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin["sparse"].store.weight("a"), ebc.store.weight("a"))


def test_load_state_dict_fails_loudly() -> None:
    bag = ec.EmbeddingBag(10, 4)
    before = bag.weight.clone()
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: saved \[10, 5\], declared \[10, 4\]"):
        bag.load_state_dict({"weight": torch.zeros(10, 5)})
    with pytest.raises(RuntimeError, match="Missing key"):
        bag.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        bag.load_state_dict({"weight": before, "bias": before})
    assert torch.equal(bag.weight, before)


def test_from_pretrained_is_frozen_unless_asked(backend: str) -> None:
    rows = torch.randn(6, 3)
    bag = ec.EmbeddingBag.from_pretrained(rows, mode="sum", backend=backend)
    out = bag(torch.tensor([[1, 2]]))
    assert torch.equal(out[0], rows[1] + rows[2])
    assert not out.requires_grad
    emb = ec.Embedding.from_pretrained(rows, freeze=False, optimizer=ec.optim.SGD(lr=1.0), backend=backend)
    train(emb, ec.optim.SparseOptimizer(emb), torch.tensor([1]))
    assert not torch.equal(emb.weight[1], rows[1])
    with pytest.raises(BadConfig, match="embeddings has shape"):
        ec.Embedding.from_pretrained(rows[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_changes_the_outputs_dtype_only(backend: str, dtype: torch.dtype) -> None:
    bag = ec.EmbeddingBag(10, 4, mode="sum", optimizer=ec.optim.SGD(lr=0.5), backend=backend)
    exact = bag(torch.tensor([[1, 2]])).detach()
    optimizer = ec.optim.SparseOptimizer(bag)
    bag.to(dtype)
    out = bag(torch.tensor([[1, 2]]))
    assert out.dtype == dtype
    assert bag.weight.dtype == torch.float32
    assert torch.equal(out, exact.to(dtype))
    before = bag.weight[1].clone()
    out.sum().backward()
    optimizer.step()
    assert torch.equal(bag.weight[1], before - 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_half_storage_reads_as_its_fp32_values(backend: str, dtype: torch.dtype, mode: str) -> None:
    half = ec.EmbeddingBag(50, 9, mode=mode, dtype=dtype, backend=backend)
    whole = torch.nn.EmbeddingBag(50, 9, mode=mode, _weight=half.weight.float())
    values, offsets = ragged()
    assert half.weight.dtype == dtype
    assert torch.equal(half(values, offsets[:-1]), whole(values, offsets[:-1]))


def test_deepcopy_copies_and_the_copy_is_its_own(backend: str) -> None:
    model = torch.nn.Sequential(ec.Embedding(10, 4, optimizer=ec.optim.Adam(lr=0.1), backend=backend))
    optimizer = ec.optim.SparseOptimizer(model)
    train(model, optimizer, torch.tensor([1, 2]))
    other = copy.deepcopy(model)
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[0].store.state("embedding"), model[0].store.state("embedding"))
    train(model, optimizer, torch.tensor([1, 2]))
    assert not torch.equal(other[0].weight, model[0].weight)
    twin = ec.optim.SparseOptimizer(other)
    train(other, twin, torch.tensor([1, 2]))
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_whole_module_survives_torch_save() -> None:
    ebc = ec.EmbeddingBagCollection(TABLES)
    file = io.BytesIO()
    torch.save(ebc, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    kjt = jagged(FEATURES, ROWS, 6)
    assert torch.equal(back(kjt).values(), ebc(kjt).values())


def test_new_modules_differ_and_manual_seed_decides() -> None:
    torch.manual_seed(5)
    a, b = ec.Embedding(10, 4), ec.Embedding(10, 4)
    torch.manual_seed(5)
    c = ec.Embedding(10, 4)
    assert not torch.equal(a.weight, b.weight)
    assert torch.equal(a.weight, c.weight)


def test_reading_never_writes(backend: str) -> None:
    ebc = ec.EmbeddingBagCollection(TABLES, backend=backend)
    ebc.eval()
    before = {k: v.clone() for k, v in ebc.store.state_dict().items()}
    with torch.no_grad():
        out = ebc(jagged(FEATURES, ROWS, 6))
    assert not out.values().requires_grad
    ebc(jagged(FEATURES, ROWS, 6, seed=1))
    assert all(torch.equal(v, before[k]) for k, v in ebc.store.state_dict().items())
    assert ebc.store.stats()["tables"]["a"]["rows_written"] == 0


def test_no_grad_forward_leaves_nothing_behind(backend: str) -> None:
    """Forward without backward holds no handle, pending gradient or lease."""
    import gc

    from embcache.staged import Handle

    ebc = ec.EmbeddingBagCollection(TABLES, backend=backend)
    for seed in range(5):
        ebc(jagged(FEATURES, ROWS, 6, seed=seed))
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is Handle]
    assert not ebc.store.pending_tables()
