"""What all click-through models promise: shapes, precision, learning, saving, compiling, clear refusals."""

from __future__ import annotations

import copy
import doctest
import importlib

import pytest
import torch
from click_inputs import batch, tables

import embcache as ec
from dlrm import models
from dlrm.models import build, options, published_init

SMALL: dict[str, dict] = {
    "dlrm": {"bottom_mlp": (16, 8), "top_mlp": (16, 1)},
    "dcnv2": {"cross_layers": 2, "deep_mlp": (16, 8)},
    "deepfm": {"deep_mlp": (16, 8)},
    "finalmlp": {"mlp1": (16, 8), "mlp2": (8,), "heads": 2},
}
NAMES = sorted(SMALL)
VARIANTS = [
    ("dcnv2", {"low_rank": 3}),
    ("dcnv2", {"structure": "stacked", "dense_mlp": (6, 4)}),
    ("finalmlp", {"gate_hidden": None}),
    ("finalmlp", {"gate_hidden": (5,), "gate_context": (["f1"], ["f0", "f2"])}),
]


def small(name: str, n_dense: int = 4, dims: tuple[int, ...] = (8, 8, 8), **more: object) -> models.ClickModel:
    torch.manual_seed(0)
    return build(name, tables(list(dims)), n_dense, **{**SMALL[name], **more})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize("n_dense", [0, 4])
@pytest.mark.parametrize("n_tables", [2, 3])
def test_one_fp32_logit_a_sample(name: str, size: int, n_dense: int, n_tables: int) -> None:
    model = small(name, n_dense, (8,) * n_tables)
    dense, sparse = batch(n_tables, size, n_dense)
    optimizer = ec.optim.SparseOptimizer(model)
    logits = model(dense, sparse)
    assert logits.shape == (size,)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_no_dense_features_may_be_none(name: str) -> None:
    model = small(name, 0)
    _, sparse = batch(3, 5)
    assert torch.equal(model(None, sparse), model(torch.zeros(5, 0), sparse))


@pytest.mark.parametrize("name", NAMES)
def test_one_table(name: str) -> None:
    dense, sparse = batch(1, 5)
    assert small(name, 4, (8,))(dense, sparse).shape == (5,)


@pytest.mark.parametrize("name", ["dcnv2", "finalmlp"])
def test_mixed_dims_where_the_model_permits(name: str) -> None:
    dense, sparse = batch(3, 5)
    assert small(name, 4, (4, 1, 7))(dense, sparse).shape == (5,)


@pytest.mark.parametrize("name", ["dlrm", "deepfm"])
def test_mixed_dims_are_refused_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match="same embedding_dim in all tables, got f0: 4, f1: 8"):
        small(name, 4, (4, 8))


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_independent(name: str) -> None:
    model = small(name)
    dense, sparse = batch(3, 6, bag=2)
    whole = model(dense, sparse)
    ids = sparse.values().view(3, 6, 2)
    part = ec.KeyedJaggedTensor.from_lengths_sync(
        sparse.keys(), ids[:, 2:4].reshape(-1), torch.full((6,), 2, dtype=torch.int32)
    )
    torch.testing.assert_close(model(dense[2:4], part), whole[2:4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "more"), [(name, {}) for name in NAMES] + VARIANTS)
def test_training_finds_a_planted_rule(name: str, more: dict) -> None:
    torch.manual_seed(0)
    model = build(name, tables([8, 8, 8], rows=20), 2, **{**SMALL[name], **more})
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    sparse_optimizer = ec.optim.SparseOptimizer(model)
    losses = []
    for i in range(30):
        dense, sparse = batch(3, 256, 2, rows=20, seed=i)
        first, second, _ = sparse.values().view(3, 256)
        labels = (first % 2 == second % 2).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)
        for optimizer in (dense_optimizer, sparse_optimizer):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (dense_optimizer, sparse_optimizer):
            optimizer.step()
        losses.append(loss.item())
    assert min(losses[:3]) > 0.6
    assert losses[-1] < 0.3, losses


def test_slow_bf16_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.warns(UserWarning, match="DLRM: this processor has no bf16 products, dense_dtype='bf16' is slower"):
        small("dlrm", dense_dtype="bf16")


@pytest.mark.filterwarnings("ignore:.*no bf16 products")
@pytest.mark.parametrize("name", NAMES)
def test_bf16_dense_part(name: str) -> None:
    model = small(name, dense_dtype="bf16")
    reference = small(name)
    dense, sparse = batch(3, 64)
    logits = model(dense, sparse)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference(dense, sparse), rtol=0.05, atol=0.05)
    seen = []
    optimizer = ec.optim.SparseOptimizer(model)
    pooled = model.sparse_arch(sparse)
    assert pooled.dtype == torch.float32
    pooled.register_hook(lambda grad: seen.append(grad.dtype))
    model.sparse_arch.forward = lambda _: pooled
    model(dense, sparse).sum().backward()
    optimizer.step()
    assert seen == [torch.float32]
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name: str) -> None:
    model, dense_sparse = small(name), batch(3, 7)
    torch.manual_seed(1)
    other = build(name, tables([8, 8, 8], init=ec.init.Uniform(0.1)), 4, **SMALL[name])
    assert not torch.equal(other(*dense_sparse), model(*dense_sparse))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(other(*dense_sparse), model(*dense_sparse))


@pytest.mark.parametrize(("name", "more"), [(name, {}) for name in NAMES if name != "deepfm"] + VARIANTS[:3])
def test_dense_part_compiles_without_graph_breaks(name: str, more: dict) -> None:
    model = small(name, **more)
    dense, sparse = batch(3, 6)
    pooled = model.sparse_arch(sparse).detach()
    compiled = torch.compile(lambda d, p: model.head(d, p, None), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(dense, pooled), model(dense, sparse), rtol=1e-5, atol=1e-6)


def test_deepfm_dense_part_compiles_without_graph_breaks() -> None:
    model = small("deepfm")
    dense, sparse = batch(3, 6)
    fields = torch.randn(6, 7, 8)
    compiled = torch.compile(
        lambda d, f: model.inter_arch(torch.cat([model.dense_arch(d), f], 1)) + model.over_arch(f.flatten(1)),
        fullgraph=True,
        backend="aot_eager",
    )
    expected = model.inter_arch(torch.cat([model.dense_arch(dense), fields], 1)) + model.over_arch(fields.flatten(1))
    torch.testing.assert_close(compiled(dense, fields), expected, rtol=1e-5, atol=1e-6)
    assert sparse.keys() == ["f0", "f1", "f2"]


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("dlrm", {"dense_dtype": "fp8"}, r"DLRM: dense_dtype must be one of \('fp32', 'bf16'\), got 'fp8'"),
        ("dlrm", {"n_dense": -1}, "DLRM: n_dense must not be negative, got -1"),
        ("dlrm", {"dims": ()}, "DLRM needs at least one embedding table"),
        ("dlrm", {"n_dense": 0, "dims": (8,)}, "DLRM without dense features needs at least two sparse features"),
        ("dlrm", {"top_mlp": (0,)}, r"top_mlp: layer sizes must be positive integers, got \(0,\)"),
        ("dcnv2", {"structure": "serial"}, "structure must be 'parallel' or 'stacked', got 'serial'"),
        ("dcnv2", {"cross_layers": 0}, "cross_layers must be at least 1, got 0"),
        ("dcnv2", {"low_rank": 29}, r"low_rank must lie in \[1, 28\], got 29"),
        ("dcnv2", {"n_dense": 0, "dense_mlp": (4,)}, "dense_mlp needs dense features"),
        ("finalmlp", {"heads": 3}, "heads must divide both streams' widths 8 and 8, got 3"),
        ("finalmlp", {"gate_context": (["x"], [])}, r"unknown features \['x'\], known are \['f0', 'f1', 'f2'\]"),
        ("finalmlp", {"gate_hidden": None, "gate_context": (["f0"], [])}, "gate_context needs gates"),
    ],
)
def test_wrong_options_are_named(name: str, more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(name, **more)


def test_wrong_dense_input_is_named() -> None:
    model = small("dlrm")
    dense, sparse = batch(3, 5)
    for wrong in (dense[:, :3], dense[:4], dense[0], None):
        with pytest.raises(ValueError, match=r"DLRM: dense must be \[5, 4\]"):
            model(wrong, sparse)


def test_build_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="unknown model 'wide', known are"):
        build("wide", tables([8]), 4)
    with pytest.raises(TypeError, match="DeepFM has no option 'top_mlp'; it takes deep_mlp, dropout"):
        build("deepfm", tables([8]), 4, top_mlp=(1,))
    with pytest.raises(ValueError, match="unknown model 'wide'"):
        published_init("wide")
    assert options("dlrm") == ["bottom_mlp", "top_mlp", "dropout", "dense_dtype", "tiers", "backend"]
    assert set(options("finalmlp")) >= {"mlp1", "mlp2", "heads", "dropout", "dense_dtype", "backend"}


def test_published_initialisers() -> None:
    assert published_init("dlrm") == ec.init.Uniform()
    assert published_init("dcnv2") == published_init("deepfm") == ec.init.Normal(0.01)
    assert published_init("finalmlp") == ec.init.Normal(1e-4)


@pytest.mark.parametrize(
    "module", ["", ".base", ".dcn", ".deepfm", ".dlrm", ".finalmlp", ".fused_mlp", ".interaction", ".layers"]
)
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module("dlrm.models" + module))
    assert result.failed == 0
