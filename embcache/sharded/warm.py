"""Kernels compiled before ranks wait for one another: a rank that compiles for longer than a group's timeout would pass
for dead."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..config import TableConfig
from ..init import Constant
from ..jagged import KeyedJaggedTensor
from ..store import EmbeddingStore
from ..tiers import Lmdb, Ram
from .exchange import WireOrder, pack_ids, route, union, unpack_ids
from .plan import Piece, first_map
from .pooling import reduced, split_bags

__all__ = ["warm"]


def warm(tiers: Sequence[Any], backend: str) -> None:
    """Use every kernel of a store with such tiers, and those that route, once, on a few rows."""
    _route()
    with tempfile.TemporaryDirectory() as folder:
        chain: list[Any] = [Lmdb(f"{folder}/store") if isinstance(tier, Lmdb) else _small(tier) for tier in tiers]
        tables = [
            TableConfig("a", 64, 4, ["a"], "none", init=Constant(1.0)),
            TableConfig("b", None, 4, ["b"], "sum", init=Constant(1.0)),
        ]
        store = EmbeddingStore(tables, chain, backend=backend)
        try:
            for step in range(4):
                ids = torch.arange(8) + 8 * step
                batch = KeyedJaggedTensor(["a", "b"], torch.cat([ids, ids]), lengths=torch.full((4,), 4))
                with store.stage(batch, training=step > 0) as handle:
                    pooled = store.lookup(handle)
                    if step:
                        store.update(handle, {name: torch.ones_like(out) for name, out in pooled.items()})
                        store.step()
            if store.durable is not None:
                store.commit()
            store.read_rows("b", torch.arange(4))
            list(store.written_rows("b"))
        finally:
            store.close()


def _small(tier: Any) -> Any:
    return Ram(rows=16, policy=tier.policy) if isinstance(tier, Ram) and tier.bounded else tier.fresh()


def _route() -> None:
    wire = WireOrder([Piece("a", 0, (0, 4), 0)], [None], 1, 0)
    ids, ranks = np.arange(6), np.array(first_map(1), dtype=np.int32)
    routed = route(wire, ranks, [0], ids, np.array([[0, 6]]), np.array([0, 1]), True)
    unpack_ids(pack_ids(routed.ids, routed.sent, wire.widths), routed.sent, wire.widths)
    union([(routed.ids, routed.sent)] * 2, np.ones(1, dtype=np.bool_))
    features = np.array([[0, 1, 0, 2, 0, 0, 4]])
    offsets = np.array([0, 3, 6])
    fixed = np.array([-1])
    bags = split_bags(features, np.array([0]), np.array([0]), fixed, [4], ranks, ids, offsets, 1)
    reduced(bags, torch.from_numpy(features), torch.from_numpy(offsets), None, 1)
