"""Each model's arch parts against the formulas of its paper, written out."""

from __future__ import annotations

import itertools

import torch
from click_inputs import batch, tables

from dlrm.models import build, dcn, deepfm, finalmlp
from dlrm.models.dlrm import DLRM


def test_dlrm_from_its_parts() -> None:
    torch.manual_seed(0)
    model = build("dlrm", tables([8, 8, 8]), 4, bottom_mlp=(16,), top_mlp=(12, 6))
    assert isinstance(model, DLRM)
    assert [layer.out_features for layer in model.dense_arch.layers] == [16, 8]  # the embedding dim is appended
    assert [layer.out_features for layer in model.over_arch.layers] == [12, 6, 1]
    dense, sparse = batch(3, 5, bag=2)
    weights = [model.state_dict()[key] for key in model.state_dict() if key.startswith("sparse_arch")]
    pooled = [w[ids].sum(1) for w, ids in zip(weights, sparse.values().view(3, 5, 2), strict=True)]
    bottom = dense
    for layer in model.dense_arch.layers:
        bottom = torch.relu(bottom @ layer.weight.t() + layer.bias)
    vectors = [bottom, *pooled]
    dots = [(vectors[i] * vectors[j]).sum(1, keepdim=True) for i in range(4) for j in range(i)]
    top = torch.cat([bottom, *dots], 1)
    for i, layer in enumerate(model.over_arch.layers):
        top = top @ layer.weight.t() + layer.bias
        top = torch.relu(top) if i < 2 else top
    torch.testing.assert_close(model(dense, sparse), top[:, 0], rtol=1e-5, atol=1e-5)


def test_dlrm_without_dense_features_is_dots_only() -> None:
    model = build("dlrm", tables([8, 8, 8]), 0, top_mlp=(4, 1))
    assert model.dense_arch is None
    assert model.over_arch.in_features == 3


def test_full_cross_layer() -> None:
    torch.manual_seed(0)
    layer = dcn.CrossLayer(5).double()
    x0, x = torch.randn(3, 5).double(), torch.randn(3, 5).double()
    w, b = layer.linear.weight, layer.linear.bias
    expected = torch.stack([x0[i] * (w @ x[i] + b) + x[i] for i in range(3)])
    torch.testing.assert_close(layer(x0, x), expected)


def test_low_rank_cross_layer() -> None:
    torch.manual_seed(0)
    layer = dcn.LowRankCrossLayer(6, 2).double()
    x0, x = torch.randn(3, 6).double(), torch.randn(3, 6).double()
    u, v, b = layer.up.weight, layer.down.weight, layer.up.bias
    assert (u.shape, v.shape) == ((6, 2), (2, 6))
    expected = torch.stack([x0[i] * (u @ (v @ x[i]) + b) + x[i] for i in range(3)])
    torch.testing.assert_close(layer(x0, x), expected)
    inputs = x0.requires_grad_(), x.requires_grad_()
    assert torch.autograd.gradcheck(layer, inputs)


def test_low_rank_of_full_rank_is_the_full_layer() -> None:
    torch.manual_seed(0)
    full, low = dcn.CrossLayer(4), dcn.LowRankCrossLayer(4, 4)
    with torch.no_grad():
        low.up.weight.copy_(full.linear.weight)
        low.down.weight.copy_(torch.eye(4))
        low.up.bias.copy_(full.linear.bias)
    x0, x = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(low(x0, x), full(x0, x))


def test_dcn_parallel_and_stacked() -> None:
    dense, sparse = batch(2, 5, 3)
    for structure in ("parallel", "stacked"):
        torch.manual_seed(0)
        model = build("dcnv2", tables([4, 2]), 3, cross_layers=2, deep_mlp=(7,), structure=structure)
        x0 = torch.cat([dense, model.sparse_arch(sparse)], 1)
        x1 = x0 * model.inter_arch.layers[0].linear(x0) + x0
        x2 = x0 * model.inter_arch.layers[1].linear(x1) + x1
        deep = model.over_arch.deep.layers[0]
        hidden = torch.relu(deep(x2)) if structure == "stacked" else torch.cat([x2, torch.relu(deep(x0))], 1)
        expected = model.over_arch.logit(hidden)[:, 0]
        torch.testing.assert_close(model(dense, sparse), expected, rtol=1e-5, atol=1e-6)


def test_deepfm_by_definition() -> None:
    torch.manual_seed(0)
    model = build("deepfm", tables([8, 8]), 3, deep_mlp=(6,))
    assert isinstance(model, deepfm.DeepFM)
    with torch.no_grad():
        model.first_order.dense_weight.normal_()
        model.first_order.bias.fill_(0.3)
    dense, sparse = batch(2, 5, 3, bag=2)
    weights = {key: value for key, value in model.state_dict().items() if "sparse_arch" in key}
    ids = sparse.values().view(2, 5, 2)
    second = [w for key, w in weights.items() if key.startswith("sparse_arch")]
    first = [w for key, w in weights.items() if key.startswith("first_order")]
    assert [w.shape[1] for w in first] == [1, 1]
    fields = [model.dense_arch.weight[j] * dense[:, j : j + 1] for j in range(3)]
    fields += [w[i].sum(1) for w, i in zip(second, ids, strict=True)]
    linear = 0.3 + (dense @ model.first_order.dense_weight)[:, 0]
    linear = linear + sum(w[i].sum(1)[:, 0] for w, i in zip(first, ids, strict=True))
    pairs = sum((a * b).sum(1) for a, b in itertools.combinations(fields, 2))
    hidden, last = model.over_arch.layers
    deep = last(torch.relu(hidden(torch.cat(fields, 1))))[:, 0]
    torch.testing.assert_close(model(dense, sparse), linear + pairs + deep, rtol=1e-5, atol=1e-5)


def test_bilinear_fusion_by_definition() -> None:
    torch.manual_seed(0)
    over = finalmlp.OverArch(6, 4, heads=2).double()
    x, y = torch.randn(3, 6).double(), torch.randn(3, 4).double()
    expected = over.linear_first(x) + over.linear_second(y)
    for h in range(2):
        xh, yh = x[:, 3 * h : 3 * h + 3], y[:, 2 * h : 2 * h + 2]
        expected = expected + torch.stack([xh[i] @ over.bilinear[h] @ yh[i] for i in range(3)]).unsqueeze(1)
    torch.testing.assert_close(over(x, y), expected)
    assert torch.autograd.gradcheck(over, (x.requires_grad_(), y.requires_grad_()))


def test_finalmlp_gates() -> None:
    torch.manual_seed(0)
    model = build("finalmlp", tables([4, 2]), 3, mlp1=(6,), mlp2=(4,), gate_hidden=(5,), gate_context=(["f1"], []))
    dense, sparse = batch(2, 5, 3)
    first, second = model.inter_arch.gates
    assert first.context_arch.features == ["f1.gate1"]
    assert second.context_bias.shape == (1, 4)
    x = torch.cat([dense, model.sparse_arch(sparse)], 1)
    context = first.context_arch(sparse)
    assert context.shape == (5, 2)
    gate = 2 * torch.sigmoid(first.gate.layers[1](torch.relu(first.gate.layers[0](context))))
    torch.testing.assert_close(first(x, sparse), x * gate, rtol=1e-5, atol=1e-6)
    bias = second.gate.layers[0].bias
    constant = 2 * torch.sigmoid(second.gate.layers[1](torch.relu(bias)))  # zero context at the start
    torch.testing.assert_close(second(x, sparse), x * constant, rtol=1e-5, atol=1e-6)
    streams = [stream(part) for stream, part in zip(model.inter_arch.streams, (x * gate, x * constant), strict=True)]
    torch.testing.assert_close(model(dense, sparse), model.over_arch(*streams)[:, 0], rtol=1e-5, atol=1e-6)


def test_finalmlp_without_gates_feeds_both_streams_alike() -> None:
    model = build("finalmlp", tables([4]), 1, mlp1=(3,), mlp2=(3,), gate_hidden=None)
    dense, sparse = batch(1, 5, 1)
    assert len(model.inter_arch.gates) == 0
    assert model(dense, sparse).shape == (5,)
