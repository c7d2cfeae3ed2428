"""What is refused leaves everything as it was; what is accepted is accepted in any memory layout."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import embcache as ec
from embcache.errors import BadConfig, BadJagged, BadJaggedType, NonFiniteGradient, NotSupported, SchemaMismatch

IDS = torch.tensor([[3, 1, 3], [0, 9, 2]])


def two_tables(backend: str = "auto") -> ec.EmbeddingStore:
    return ec.EmbeddingStore([ec.TableConfig("a", 10, 4), ec.TableConfig("b", 10, 4, pooling="none")], backend=backend)


def two_features() -> ec.KeyedJaggedTensor:
    return ec.KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))


@pytest.mark.parametrize(("bad", "error"), [
    (torch.ones(3, 4), BadJagged),
    (torch.ones(2, 4, dtype=torch.float64), BadJaggedType),
    (torch.full((2, 4), float("inf")), NonFiniteGradient),
    (None, BadJagged),
])  # fmt: skip
def test_a_refused_update_drops_itself_only(backend: str, bad: torch.Tensor | None, error: type[Exception]) -> None:
    store = two_tables(backend)
    before = store.weight("a").clone()
    good = {"a": torch.ones(2, 4), "b": torch.ones(2, 4)}
    first, second = store.stage(two_features()), store.stage(two_features())
    store.update(first, good)
    with pytest.raises(error):
        store.update(second, {"a": good["a"]} if bad is None else {**good, "b": bad})
    assert store.step() == 4
    assert torch.equal(store.weight("a")[:2], before[:2] - 0.01)


def test_a_skipped_step_leaves_no_mark_for_a_grad_scaler() -> None:
    bag = ec.EmbeddingBag(10, 4, mode="sum")
    optimizer = ec.optim.SparseOptimizer(bag, on_nonfinite="skip")
    out = bag(IDS)
    out.backward(torch.full_like(out, float("nan")))
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(optimizer.param_groups[0]["params"][0].grad, torch.ones(1))


@pytest.mark.parametrize("rows", [None, torch.ones(3, 3)])
def test_an_optimizer_state_that_does_not_fit_changes_nothing(rows: torch.Tensor | None) -> None:
    tables = [ec.TableConfig(name, 10, 4, optimizer=ec.optim.Adam(lr=0.5)) for name in "ab"]
    model = ec.EmbeddingBagCollection(tables)
    optimizer = ec.optim.SparseOptimizer(model)
    saved: dict[str, Any] = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 5.0
    saved["state"][0] = {"step": 7, "rows": torch.ones(10, 8)}
    saved["state"][1] = {"step": 7} if rows is None else {"step": 7, "rows": rows}
    with pytest.raises(SchemaMismatch, match="table 'b'"):
        optimizer.load_state_dict(saved)
    assert model.store.steps == [0, 0]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not bool(model.store.state("a").any())


def test_copies_that_would_lose_something_are_refused() -> None:
    bag = ec.EmbeddingBag(10, 4, mode="sum")
    optimizer = ec.optim.SparseOptimizer(bag)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(NotSupported, match="state_dict"):
            make(optimizer)
    bag(IDS).sum().backward()
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(BadConfig, match="waiting for step"):
            make(bag)
    optimizer.step()
    assert torch.equal(copy.deepcopy(bag).weight, bag.weight)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_strided_and_expanded_inputs(backend: str, mode: str) -> None:
    theirs = torch.nn.EmbeddingBag(50, 8, mode=mode, include_last_offset=True)
    ours = ec.EmbeddingBag(50, 8, mode=mode, include_last_offset=True, _weight=theirs.weight, backend=backend)
    optimizer = ec.optim.SparseOptimizer(ours)
    for ids in (torch.arange(40)[::2], torch.tensor([7]).expand(20)):
        offsets = torch.tensor([0, 9, 5, 9, 20, 9])[::2]
        out = ours(ids, offsets)
        assert torch.equal(out, theirs(ids, offsets))
        out.sum().backward()
        optimizer.step()
        ours.store.load_weight(ours.table.name, theirs.weight)


def test_strided_weights_and_their_gradient(backend: str) -> None:
    theirs = torch.nn.EmbeddingBag(10, 8, mode="sum")
    ours = ec.EmbeddingBag(10, 8, mode="sum", _weight=theirs.weight, backend=backend)
    optimizer = ec.optim.SparseOptimizer(ours)
    a, b = torch.linspace(0, 1, 12).requires_grad_(), torch.linspace(0, 1, 12).requires_grad_()
    for module, weights in ((ours, a), (theirs, b)):
        module(IDS.view(-1), torch.tensor([0, 2]), weights[::2]).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert torch.allclose(a.grad, b.grad)
    optimizer.step()


def test_outputs_may_be_changed_in_place(backend: str) -> None:
    theirs = torch.nn.EmbeddingBag(10, 8, mode="sum")
    ours = ec.EmbeddingBag(10, 8, mode="sum", _weight=theirs.weight, optimizer=ec.optim.SGD(lr=0.1), backend=backend)
    optimizer = ec.optim.SparseOptimizer(ours)
    for module in (ours, theirs):
        torch.relu_(module(IDS).mul_(2)).sum().backward()
    optimizer.step()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"lengths": torch.tensor([2**62, 2**62, 2**62, 2**62, 1])}, BadJagged, "lengths[0] = 4611686018427387904 but"),
    ({"lengths": torch.tensor([1]), "weights": [1.0]}, BadJaggedType, "weights is a list, must be a tensor"),
    ({"lengths": torch.tensor([1]), "keys": [3]}, BadJaggedType, "keys[0] = 3, must be a string"),
    ({"lengths": torch.tensor([1]), "keys": "f"}, BadJaggedType, "keys = 'f', must be a list of names"),
])  # fmt: skip
def test_batches_refused_when_they_are_made(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        ec.KeyedJaggedTensor(**{"keys": ["f"], "values": torch.tensor([3]), **arguments})
    assert message in str(caught.value)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: ec.optim.SGD(lr="x"), "optim.SGD: lr = 'x', must be a finite number >= 0"),  # type: ignore[arg-type]
    (lambda: ec.optim.SGD(lr=True), "optim.SGD: lr = True, must be a finite number >= 0"),
    (lambda: ec.optim.Adam(per_row_step="no"), "per_row_step = 'no', must be a bool"),  # type: ignore[arg-type]
    (lambda: ec.TableConfig("t", 10, 4, padding_idx=1.5), "padding_idx = 1.5, must be an integer"),  # type: ignore[arg-type]
    (lambda: ec.TableConfig("t", 10, 4, reserved_row=0.0), "reserved_row = 0.0, must be an integer"),  # type: ignore[arg-type]
])  # fmt: skip
def test_settings_of_a_wrong_type(make: Any, message: str) -> None:
    with pytest.raises(BadConfig) as caught:
        make()
    assert message in str(caught.value)


def test_a_state_dict_of_something_else() -> None:
    with pytest.raises(RuntimeError, match="weight is a int, must be a tensor"):
        ec.EmbeddingBag(10, 4).load_state_dict({"weight": 3})
