"""Jagged batches: what is rejected and where, what is accepted, and that selections keep everything together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import embcache as ec
from embcache.errors import BadJagged, BadJaggedType, UnknownFeature

V = torch.tensor([7, 8, 9, 1, 2, 3, 4, 5])
L = torch.tensor([2, 0, 1, 1, 1, 3])
O = torch.tensor([0, 2, 2, 3, 4, 5, 8])
KEYS = ["movie", "user"]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"lengths": L[:-1]}, BadJagged, "lengths describe 5 bags, not divisible by 2 keys"),
        ({"lengths": torch.tensor([2, 0, 1, 1, 1, 2])}, BadJagged, r"sum\(lengths\) = 7 but there are 8 values"),
        ({"lengths": torch.tensor([2, -1, 2, 1, 1, 3])}, BadJagged, r"lengths\[1\] = -1, must be >= 0"),
        ({"lengths": L.float()}, BadJaggedType, "lengths has dtype torch.float32"),
        ({"lengths": L.view(2, 3)}, BadJagged, r"lengths has shape \[2, 3\], must be one-dimensional"),
        ({"offsets": torch.tensor([1, 2, 2, 3, 4, 5, 8])}, BadJagged, r"offsets\[0\] = 1, must be 0"),
        ({"offsets": torch.tensor([0, 2, 1, 3, 4, 5, 8])}, BadJagged, r"offsets\[2\] = 1 is below offsets\[1\] = 2"),
        ({"offsets": torch.tensor([0, 2, 2, 3, 4, 5, 7])}, BadJagged, r"offsets\[6\] = 7 but there are 8 values"),
        ({"offsets": torch.tensor([], dtype=torch.int64), "stride": None}, BadJagged, "offsets"),
        ({"lengths": L, "offsets": O}, BadJagged, "either lengths or offsets, got both"),
        ({}, BadJagged, "either lengths or offsets, got neither"),
        ({"lengths": L, "weights": torch.ones(7)}, BadJagged, r"weights has shape \[7\] but there are 8 values"),
        ({"lengths": L, "weights": torch.ones(8).long()}, BadJaggedType, "weights has dtype torch.int64"),
        ({"lengths": L, "keys": ["a", "a"]}, BadJagged, r"keys\[1\] = 'a' is already at position 0"),
        ({"lengths": L, "values": V.float()}, BadJaggedType, "values has dtype torch.float32"),
        ({"lengths": L, "values": V.view(2, 4)}, BadJagged, r"values has shape \[2, 4\]"),
        ({"lengths": L, "stride": 2}, BadJagged, "lengths describe 6 bags but stride 2 x 2 keys"),
        ({"lengths": L, "stride_per_key": [3, 4]}, BadJagged, "6 bags but stride_per_key sums to 7"),
        ({"lengths": L, "stride_per_key": [6]}, BadJagged, "must be 2 numbers >= 0"),
        ({"lengths": L, "keys": []}, BadJagged, "6 bags but there are no keys"),
    ],
)
def test_rejected_at_construction(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ec.KeyedJaggedTensor(**{"keys": KEYS, "values": V, **kwargs})


def test_accepted_without_samples_values_or_features() -> None:
    none = torch.tensor([], dtype=torch.int64)
    assert ec.KeyedJaggedTensor(["a", "b"], none, lengths=none).stride() == 0
    assert ec.KeyedJaggedTensor(["a"], none, lengths=torch.zeros(3, dtype=torch.int32)).length_per_key() == [0]
    empty = ec.KeyedJaggedTensor.empty(is_weighted=True)
    assert (empty.keys(), empty.stride(), empty.weights().numel(), empty.to_dict()) == ([], 0, 0, {})
    assert ec.KeyedJaggedTensor.from_jt_dict({}).keys() == []


def test_reading() -> None:
    kjt = ec.KeyedJaggedTensor.from_offsets_sync(KEYS, V, O, torch.arange(8.0))
    assert torch.equal(kjt.lengths(), L)
    assert torch.equal(ec.KeyedJaggedTensor.from_lengths_sync(KEYS, V, L.int()).offsets(), O)
    assert kjt.offset_per_key() == [0, 3, 8]
    assert kjt.index_per_key() == {"movie": 0, "user": 1}
    assert kjt.stride_per_key() == [3, 3]
    assert not kjt.variable_stride_per_key()
    user = kjt["user"]
    assert torch.equal(user.values(), V[3:])
    assert torch.equal(user.offsets(), torch.tensor([0, 1, 2, 5]))
    assert [w.tolist() for w in user.to_dense_weights() or []] == [[3.0], [4.0], [5.0, 6.0, 7.0]]
    with pytest.raises(UnknownFeature, match="feature 'x' is not in this batch"):
        kjt["x"]
    with pytest.raises(KeyError):
        kjt["x"]


bags = st.lists(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=4), min_size=0, max_size=5)


@st.composite
def batches(draw: st.DrawFn) -> ec.KeyedJaggedTensor:
    features = draw(st.lists(bags, min_size=1, max_size=4))
    pairs = [pair for feature in features for bag in feature for pair in bag]
    return ec.KeyedJaggedTensor(
        [f"f{i}" for i in range(len(features))],
        torch.tensor([p[0] for p in pairs], dtype=torch.int64),
        torch.tensor([float(p[1]) for p in pairs]),
        torch.tensor([len(bag) for feature in features for bag in feature], dtype=torch.int64),
        stride_per_key=[len(feature) for feature in features],
    )


def content(kjt: ec.KeyedJaggedTensor) -> dict[str, Any]:
    return {k: ([v.tolist() for v in jt.to_dense()], [w.tolist() for w in jt.to_dense_weights() or []])
            for k, jt in kjt.to_dict().items()}  # fmt: skip


@settings(max_examples=60)
@given(batches(), st.randoms())
def test_selecting_keeps_values_lengths_and_weights_together(kjt: ec.KeyedJaggedTensor, rng: Any) -> None:
    whole = content(kjt)
    order = list(range(len(kjt.keys())))
    rng.shuffle(order)
    permuted = kjt.permute(order)
    assert content(permuted) == whole
    assert permuted.keys() == [kjt.keys()[i] for i in order]
    cut = rng.randint(0, len(order))
    parts = kjt.split([cut, len(order) - cut])
    assert {**content(parts[0]), **content(parts[1])} == whole
    assert content(ec.KeyedJaggedTensor.concat(parts)) == whole
    assert content(ec.KeyedJaggedTensor.from_jt_dict(kjt.to_dict())) == whole
    assert content(kjt.to("cpu")) == whole


@settings(max_examples=60)
@given(batches())
def test_jagged_padded_jagged_is_the_identity(kjt: ec.KeyedJaggedTensor) -> None:
    for jt in kjt.to_dict().values():
        padded, weights = jt.to_padded_dense(), jt.to_padded_dense_weights()
        back = ec.JaggedTensor.from_dense_lengths(padded, jt.lengths(), weights)
        assert torch.equal(back.values(), jt.values())
        assert torch.equal(back.offsets(), jt.offsets())
        assert torch.equal(back.weights(), jt.weights())
        again = ec.JaggedTensor.from_dense(jt.to_dense(), jt.to_dense_weights())
        assert jt.offsets().numel() == 1 or torch.equal(again.values(), jt.values())


def test_padding_cuts_fills_and_is_differentiable() -> None:
    values = torch.arange(1.0, 7.0).view(3, 2).requires_grad_()
    jt = ec.JaggedTensor(values, lengths=torch.tensor([2, 0, 1]))
    assert jt.to_padded_dense(1, -1.0).tolist() == [[[1.0, 2.0]], [[-1.0, -1.0]], [[5.0, 6.0]]]
    jt.to_padded_dense(3).sum().backward()
    assert torch.equal(values.grad, torch.ones(3, 2))


def test_keyed_tensor_regroups() -> None:
    a = ec.KeyedTensor(["x", "y"], [1, 2], torch.arange(6.0).view(2, 3))
    b = ec.KeyedTensor.from_tensor_list(["z"], [torch.tensor([[9.0], [8.0]])])
    assert [t.tolist() for t in ec.KeyedTensor.regroup([a, b], [["z", "x"], ["y"]])] == [
        [[9.0, 0.0], [8.0, 3.0]],
        [[1.0, 2.0], [4.0, 5.0]],
    ]
    with pytest.raises(UnknownFeature, match="'q'"):
        ec.KeyedTensor.regroup([a], [["q"]])
    with pytest.raises(BadJagged, match=r"values has shape \[2, 3\], must be \[B, 4\]"):
        ec.KeyedTensor(["x", "y"], [2, 2], torch.zeros(2, 3))


class Foreign:
    """Has the methods of TorchRec's KeyedJaggedTensor that matter, and nothing else."""

    def __init__(self, offsets: torch.Tensor) -> None:
        self._offsets = offsets

    def keys(self) -> list[str]:
        return KEYS

    def values(self) -> torch.Tensor:
        return V

    def weights_or_none(self) -> None:
        return None

    def offsets(self) -> torch.Tensor:
        return self._offsets

    def stride_per_key(self) -> list[int]:
        return [3, 3]


def test_a_foreign_batch_is_taken_and_checked() -> None:
    tables = [ec.TableConfig("t", 10, 2, features=["user"])]
    ebc = ec.EmbeddingBagCollection(tables)
    mine = ebc(ec.KeyedJaggedTensor(KEYS, V, offsets=O))
    assert torch.equal(ebc(Foreign(O)).values(), mine.values())
    with pytest.raises(BadJagged, match=r"offsets\[0\] = 1"):
        ebc(Foreign(O + 1))
    with pytest.raises(BadJaggedType, match=r"a list is no KeyedJaggedTensor: it lacks keys\(\)"):
        ebc([1, 2])


def test_torchrec_is_taken_as_it_is() -> None:
    torchrec = pytest.importorskip("torchrec")
    kjt = torchrec.KeyedJaggedTensor(keys=KEYS, values=V, lengths=L)
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("t", 10, 2, features=KEYS)])
    assert torch.equal(ebc(kjt).values(), ebc(ec.KeyedJaggedTensor(KEYS, V, lengths=L)).values())
