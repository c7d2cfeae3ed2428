"""Random tables, batches and steps: the two backends and plain torch agree, whatever the shapes."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jagged_twins import Twin, close, jagged

import embcache as ec

tables = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 33), st.sampled_from(["sum", "mean"]), st.integers(1, 3)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=20)
@given(tables, st.integers(0, 9), st.integers(0, 6), st.booleans(), st.integers(0, 2**16), st.integers(1, 3))
def test_any_collection_trains_like_torch(
    shapes: list[tuple[int, int, str, int]], bags: int, longest: int, weighted: bool, seed: int, calls: int
) -> None:
    configs = [
        ec.TableConfig(f"t{i}", rows, dim, features=[f"t{i}f{k}" for k in range(n)], pooling=pooling,
                       optimizer=ec.optim.SGD(lr=0.1), seed=seed)
        for i, (rows, dim, pooling, n) in enumerate(shapes)
    ]  # fmt: skip
    ebc: Any = ec.EmbeddingBagCollection(configs, is_weighted=weighted)
    twin = Twin(ebc.store)
    a, b = ec.optim.SparseOptimizer(ebc), torch.optim.SGD(twin.parameters(), lr=0.1)
    features = [(name, c.num_embeddings or 1) for c in configs for name in c.feature_names]
    features = features[seed % len(features) :] + features[: seed % len(features)]
    for call in range(calls):
        kjt = jagged([f for f, _ in features], [r for _, r in features], bags, longest=longest, weighted=weighted,
                     seed=seed + call)  # fmt: skip
        ours, theirs = ebc(kjt).to_dict(), twin(kjt)
        for name in theirs:
            assert close(ours[name], theirs[name], 1e-5)
        sum(x.sin().sum() for x in ours.values()).backward()
        sum(x.sin().sum() for x in theirs.values()).backward()  # type: ignore[union-attr]
    a.step()
    b.step()
    for config in configs:
        assert close(ebc.store.weight(config.name), twin.weights[config.name].detach(), 1e-5)


@settings(max_examples=15)
@given(st.integers(1, 70), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 999),
       st.sampled_from([ec.optim.SGD(lr=0.1), ec.optim.Adam(lr=0.1), ec.optim.RowWiseAdagrad(lr=0.1),
                        ec.optim.LAMB(lr=0.1, weight_decay=0.1), ec.optim.FTRL(lr=0.1, l1=0.01)]))  # fmt: skip
def test_backends_agree_on_stored_bits_or_nearly(dim: int, dtype: torch.dtype, seed: int, rule: ec.optim.Rule) -> None:
    stores = []
    for backend in ("reference", "auto"):
        table = ec.TableConfig("t", 30, dim, features=["f", "g"], dtype=dtype, optimizer=rule, seed=seed)
        ebc = ec.EmbeddingBagCollection([table], backend=backend)
        optimizer = ec.optim.SparseOptimizer(ebc)
        for step in range(3):
            ebc(jagged(["f", "g"], [30, 30], 5, seed=seed + step)).values().sin().sum().backward()
            optimizer.step()
        stores.append(ebc.store)
    a, b = (s.weight("t").float() for s in stores)
    unit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    assert bool(((a - b).abs() <= unit * torch.max(a.abs(), b.abs()).clamp(min=1e-2)).all())
    assert torch.equal(stores[0]._written[0], stores[1]._written[0])
