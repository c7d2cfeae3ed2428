"""The error table: every message names table, position, value and range, and the store is as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from jagged_twins import jagged

import embcache as ec
from embcache import errors
from embcache.errors import BadConfig, IdOutOfRange, NotSupported, StaleLookup


def snapshot(store: ec.EmbeddingStore) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in store.state_dict().items()}


def test_the_designs_message() -> None:
    error = IdOutOfRange("user", "user", 3, 50000001, 50000000)
    assert str(error) == "table 'user', feature 'user': values[3] = 50000001, valid range [0, 50000000)"
    assert isinstance(error, IndexError)


@pytest.mark.parametrize("bad", [50, -1, 2**31 + 5, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_id_out_of_range_names_everything_and_touches_nothing(backend: str, bad: int, pooling: str) -> None:
    tables = [
        ec.TableConfig("item", 100, 4, features=["item"], pooling=pooling),
        ec.TableConfig("user", 50, 4, features=["clicks", "user"], pooling=pooling),
    ]
    make = ec.EmbeddingCollection if pooling == "none" else ec.EmbeddingBagCollection
    module = make(tables, backend=backend)
    before = snapshot(module.store)
    values = torch.tensor([1, 60, 2, 49, bad, 4])
    kjt = ec.KeyedJaggedTensor(["clicks", "item", "user"], values[[0, 2, 1, 1, 3, 4]], lengths=torch.tensor([2, 2, 2]))
    message = rf"^table 'user', feature 'user': values\[5\] = {bad}, valid range \[0, 50\)$"
    with pytest.raises(IndexError, match=message):
        module(kjt)
    assert all(torch.equal(v, before[k]) for k, v in module.store.state_dict().items())


def test_id_out_of_range_in_drop_ins() -> None:
    message = r"table 'word', feature 'word': values\[1\] = 10, valid range \[0, 10\)"
    for module in (ec.Embedding(10, 2, name="word"), ec.EmbeddingBag(10, 2, name="word")):
        with pytest.raises(IdOutOfRange, match=message):
            module(torch.tensor([[3, 10]], dtype=torch.int32))


def policies(policy: str, pooling: str, backend: str) -> Any:
    make = ec.EmbeddingCollection if pooling == "none" else ec.EmbeddingBagCollection
    table = ec.TableConfig("t", 10, 4, features=["f", "g"], pooling=pooling, out_of_range=policy, reserved_row=9,
                           optimizer=ec.optim.SGD(lr=1.0))  # fmt: skip
    return make([table], backend=backend)


BAD = ec.KeyedJaggedTensor(["f", "g"], torch.tensor([1, 77, 2, -5, 3]), lengths=torch.tensor([2, 1, 2, 0]))
MAPPED = ec.KeyedJaggedTensor(["f", "g"], torch.tensor([1, 9, 2, 9, 3]), lengths=torch.tensor([2, 1, 2, 0]))
DROPPED = ec.KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1, 0]))


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize(("policy", "same"), [("map", MAPPED), ("drop", DROPPED)])
def test_drop_and_map_equal_the_repaired_batch_and_are_counted(
    backend: str, pooling: str, policy: str, same: ec.KeyedJaggedTensor
) -> None:
    states = []
    for kjt in (BAD, same):
        module = policies(policy, pooling, backend)
        optimizer = ec.optim.SparseOptimizer(module)
        out = module(kjt)
        flat = out.values() if pooling != "none" else torch.cat([out["f"].values(), out["g"].values()])
        lengths = None if pooling != "none" else out["f"].lengths()
        flat.sin().sum().backward()
        optimizer.step()
        states.append((flat.detach(), lengths, module.store.weight("t").clone()))
        counted = module.store.stats()["tables"]["t"]
        expected = 2 if kjt is BAD else 0
        assert (counted["dropped"], counted["mapped"]) == ((expected, 0) if policy == "drop" else (0, expected))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][2], states[1][2])
    assert states[0][1] is None or torch.equal(states[0][1], states[1][1])
    assert torch.equal(BAD.values(), torch.tensor([1, 77, 2, -5, 3]))


def test_dropped_ids_get_no_weight_gradient(backend: str) -> None:
    table = ec.TableConfig("t", 10, 4, out_of_range="drop", init=ec.init.Constant(1.0))
    ebc = ec.EmbeddingBagCollection([table], is_weighted=True, backend=backend)
    optimizer = ec.optim.SparseOptimizer(ebc)
    weights = torch.ones(3, requires_grad=True)
    ebc(ec.KeyedJaggedTensor(["t"], torch.tensor([1, 10, 2]), weights, torch.tensor([3]))).values().sum().backward()
    assert weights.grad.tolist() == [4.0, 0.0, 4.0]
    optimizer.step()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": ""}, "table name = ''"),
        ({"num_embeddings": 0}, "table 't': num_embeddings = 0, must be an integer >= 1"),
        ({"embedding_dim": 2.0}, "table 't': embedding_dim = 2.0"),
        ({"embedding_dim": True}, "table 't': embedding_dim = True"),
        ({"features": "user"}, "table 't': features = 'user', must be a list"),
        ({"features": ["a", "a"]}, r"table 't': features\[1\] = 'a', already at position 0"),
        ({"pooling": "max"}, "table 't': pooling = 'max', must be one of"),
        ({"optimizer": "adam"}, "table 't': optimizer = 'adam', must be a rule"),
        ({"init": 0.1}, "table 't': init = 0.1, must be an initialiser"),
        ({"dtype": torch.float64}, "table 't': dtype = torch.float64"),
        ({"seed": 1.5}, "table 't': seed = 1.5"),
        ({"out_of_range": "clip"}, "table 't': out_of_range = 'clip'"),
        ({"reserved_row": 10}, r"table 't': reserved_row = 10, valid range \[0, 10\)"),
        ({"padding_idx": 10}, r"table 't': padding_idx = 10, valid range \[-10, 10\)"),
        ({"max_norm": 0.0}, "table 't': max_norm = 0.0"),
        ({"num_embeddings": None, "out_of_range": "map"}, "table 't': out_of_range = 'map', has no meaning"),
    ],
)
def test_table_config_refuses(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        ec.TableConfig(**{"name": "t", "num_embeddings": 10, "embedding_dim": 4, **kwargs})


def test_store_refuses() -> None:
    t = ec.TableConfig("t", 10, 4)
    with pytest.raises(BadConfig, match=r"tables\[1\]: table 't' is declared twice"):
        ec.EmbeddingStore([t, t])
    with pytest.raises(BadConfig, match="feature 't' is claimed by tables 't' and 'u'"):
        ec.EmbeddingStore([t, ec.TableConfig("u", 10, 4, features=["t"])])
    with pytest.raises(BadConfig, match=r"tables\[0\] = 'x', must be a TableConfig"):
        ec.EmbeddingStore(["x"])  # type: ignore[list-item]
    ram = ec.tiers.Ram
    for tiers, message in (
        ([], "at least one tier"),
        ([ram(), ram()], r"tiers\[0\] = Ram\(\): over another tier it needs rows= or bytes="),
        ([ram(rows=5)], r"tiers\[0\] = Ram\(rows=5, policy='lfu'\): .* are for a cache over a tier below"),
        ([ram(rows={"u": 5}), ram()], r"must name each of the tables \['t'\] and no other"),
    ):
        with pytest.raises(BadConfig, match=message):
            ec.EmbeddingStore([t], tiers=tiers)
    with pytest.raises(ValueError, match="'cuda', must be 'auto', 'native' or 'reference'"):
        ec.EmbeddingStore([t], backend="cuda")
    with pytest.raises(BadConfig, match="give tiers and backend to the store"):
        ec.EmbeddingBagCollection([t], store=ec.EmbeddingStore([t]), backend="reference")
    with pytest.raises(BadConfig, match=r"table 'u' is not in the store, which has \['t'\]"):
        ec.EmbeddingBagCollection([ec.TableConfig("u", 10, 4)], store=ec.EmbeddingStore([t]))


def test_a_table_larger_than_memory_keeps_only_what_is_used() -> None:
    store = ec.EmbeddingStore([ec.TableConfig("t", 10**12, 1024)])
    with pytest.raises(NotSupported, match="table 't' does not lie whole in memory: use read_rows"):
        store.weight("t")
    kjt = ec.KeyedJaggedTensor(["t"], torch.tensor([10**12 - 1]), lengths=torch.tensor([1]))
    with store.stage(kjt) as handle:
        assert torch.equal(store.lookup(handle)["t"], store.read_rows("t", kjt.values())[0])


def test_a_released_handle_is_refused() -> None:
    store = ec.EmbeddingStore([ec.TableConfig("t", 10, 4)])
    kjt = ec.KeyedJaggedTensor(["t"], torch.tensor([1]), lengths=torch.tensor([1]))
    with store.stage(kjt) as handle:
        store.lookup(handle)
    with pytest.raises(StaleLookup, match="released"):
        store.lookup(handle)
    with pytest.raises(StaleLookup, match="released"):
        store.update(handle, {"t": torch.ones(1, 4)})
    handle.release()


def test_update_checks_shapes_features_and_numbers(backend: str) -> None:
    store = ec.EmbeddingStore([ec.TableConfig("t", 10, 4)], backend=backend)
    kjt = ec.KeyedJaggedTensor(["t"], torch.tensor([1]), lengths=torch.tensor([1]))
    before = snapshot(store)
    with store.stage(kjt) as handle:
        with pytest.raises(ValueError, match=r"feature 't': gradient has shape \[2, 4\], must be \[1, 4\]"):
            store.update(handle, {"t": torch.ones(2, 4)})
        with pytest.raises(ValueError, match="no gradient for feature 't'"):
            store.update(handle, {})
        with pytest.raises(FloatingPointError, match="table 't', feature 't': gradient of bag 0, column 2 is inf"):
            store.update(handle, {"t": torch.tensor([[0.0, 0.0, float("inf"), 0.0]])})
    assert store.step() == 0
    assert all(torch.equal(v, before[k]) for k, v in store.state_dict().items())


def test_every_error_is_ours_and_a_builtin() -> None:
    builtin = (IndexError, ValueError, TypeError, KeyError, NotImplementedError, FloatingPointError, RuntimeError,
               MemoryError, OSError)  # fmt: skip
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.EmbcacheError)]
    assert len(kinds) > 10
    bases = (errors.EmbcacheError, errors.RemoteFault)  # the latter is made with the built-in of the original
    assert all(issubclass(e, builtin) for e in kinds if e not in bases)


def test_empty_batches_keep_shapes_and_train(backend: str) -> None:
    table = ec.TableConfig("t", 10, 4, features=["f", "g"])
    ebc = ec.EmbeddingBagCollection([table], backend=backend)
    optimizer = ec.optim.SparseOptimizer(ebc)
    before = snapshot(ebc.store)
    none = torch.tensor([], dtype=torch.int64)
    for lengths, shape in ((none, (0, 8)), (torch.zeros(6, dtype=torch.int64), (3, 8))):
        out = ebc(ec.KeyedJaggedTensor(["f", "g"], none, lengths=lengths)).values()
        assert out.shape == shape
        assert torch.equal(out, torch.zeros(shape))
        out.sum().backward()
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in ebc.store.state_dict().items() if k != "t.step")


def test_deepcopy_of_a_store_copies_rows() -> None:
    store = ec.EmbeddingStore([ec.TableConfig("t", 10, 4)])
    other = copy.deepcopy(store)
    other.weight("t")[1] = 5.0
    assert not torch.equal(store.weight("t"), other.weight("t"))


def test_scan_walks_all_rows() -> None:
    store = ec.EmbeddingStore([ec.TableConfig("t", 10, 4, optimizer=ec.optim.Adagrad())])
    blocks = list(store.scan("t", block=4))
    assert [ids.numel() for ids, _, _ in blocks] == [4, 4, 2]
    assert torch.equal(torch.cat([ids for ids, _, _ in blocks]), torch.arange(10))
    assert torch.equal(torch.cat([w for _, w, _ in blocks]), store.weight("t"))
    assert blocks[0][2].shape == (4, 4)


def test_stats_count_rows_that_were_written(backend: str) -> None:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("t", 10, 4, features=["f"])], backend=backend)
    optimizer = ec.optim.SparseOptimizer(ebc)
    ebc(jagged(["f"], [3], 50)).values().sum().backward()
    optimizer.step()
    stats = ebc.store.stats()
    assert stats["tables"]["t"] == {"steps": 1, "dropped": 0, "mapped": 0, "rows_written": 3}
    assert (stats["stages"], stats["rows_updated"]) == (1, 3)
