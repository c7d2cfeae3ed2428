"""Modules: drop-in ``EmbeddingBag`` and ``Embedding``, and collections of tables that take a ``KeyedJaggedTensor``.

``parameters()`` is empty: rows are trained by ``ec.optim.SparseOptimizer(model)``. Gradients of pooled outputs are kept
as they arrive and applied in its ``step()``; nothing is materialised per id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .config import TableConfig
from .dropin import Embedding, EmbeddingBag
from .errors import BadConfig, BadJagged
from .jagged import JaggedTensor
from .keyed_tensor import KeyedTensor
from .lookup import Tables, read
from .staged import Handle, Part
from .store import EmbeddingStore

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingBagCollection", "EmbeddingCollection"]


class _Collection(Tables):
    """A module over several tables that takes a ``KeyedJaggedTensor``."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        is_weighted: bool,
        tiers: Sequence[Any] | None,
        store: EmbeddingStore | None,
        backend: str,
    ) -> None:
        tables = list(tables)
        if store is None:
            store = EmbeddingStore(tables, tiers, backend=backend)
        elif tiers is not None or backend != "auto":
            raise BadConfig("give tiers and backend to the store, not to a module that shares it")
        else:
            for table in tables:
                if table not in store.tables:
                    raise BadConfig(f"table {table.name!r} is not in the store, which has {store.names}")
        features = [name for table in tables for name in table.feature_names]
        super().__init__(store, features, [table.name for table in tables])
        self.is_weighted = is_weighted
        self.tables = tables

    def stage(self, batch: Any) -> Handle:
        """Make the batch's rows resident; ``forward`` takes the handle in the batch's place."""
        return self.store.stage(batch, self._features)

    def _staged(self, batch: Any) -> tuple[Handle, Part | None]:
        """A handle and its part with this module's features: the handle given, the one that look-ahead left on the
        batch, or a new one."""
        handle, part = (batch, batch.part(self._features)) if isinstance(batch, Handle) else self._ahead(batch)
        if handle is None:
            handle = self.stage(batch)
            part = handle.part(self._features)
        if part is None and self._features:
            raise BadJagged(f"the handle was not staged for the features {list(self._features)}")
        weighted = handle.batch.weights_or_none() is not None
        if weighted != self.is_weighted:
            raise BadJagged(
                f"is_weighted={self.is_weighted} but the batch has {'weights' if weighted else 'no weights'}"
            )
        return handle, part

    def extra_repr(self) -> str:
        return "\n".join(
            f"{t.name}: {t.num_embeddings} x {t.embedding_dim}, {t.pooling}, {t.optimizer.name}" for t in self.tables
        )


class EmbeddingBagCollection(_Collection):
    """Many tables, pooled: a batch of bags in, one vector per feature and sample out.

    Callable on a ``KeyedJaggedTensor`` with values of shape ``(F, B, L[f][i])``, where F is the number of features, B
    the batch size and ``L[f][i]`` the length of bag i of feature f. Returns a ``KeyedTensor`` with values ``(B, D)``,
    D the sum of the embedding dimensions over features (a table with two features counts twice), columns in the order
    of ``tables`` and of their features::

        KT[i] = cat([emb[f](J[f][i]) for f in features])

    where ``emb[f]`` is the sum or mean, by the table's ``pooling``, of the rows of the bag's ids; an empty bag gives 0.
    Where the batch sizes of features differ, read the outputs by feature.

    Args:
        tables: their descriptions.
        is_weighted: batches carry a weight per id, which multiplies its row (mean still divides by the bag's length).
            The weights get a gradient where they require one.
        tiers: where rows live; see ``EmbeddingStore``.
        store: share an existing store, which must hold ``tables``.
        backend: of the kernels: "auto", "native" or "reference".

    Raises:
        IdOutOfRange, BadJagged, UnknownFeature: at the forward, before anything is touched.

    >>> import embcache as ec
    >>> tables = [
    ...     ec.TableConfig("t1", num_embeddings=10, embedding_dim=3, features=["f1"], init=ec.init.Constant(1.0)),
    ...     ec.TableConfig("t2", num_embeddings=10, embedding_dim=4, features=["f2"], init=ec.init.Constant(0.5)),
    ... ]
    >>> ebc = ec.EmbeddingBagCollection(tables)
    >>> #        sample 0  sample 1  sample 2
    >>> # "f1"   [0, 1]    []        [2]
    >>> # "f2"   [3]       [4]       [5, 6, 7]
    >>> batch = ec.KeyedJaggedTensor(
    ...     keys=["f1", "f2"],
    ...     values=torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]),
    ...     offsets=torch.tensor([0, 2, 2, 3, 4, 5, 8]),
    ... )
    >>> pooled = ebc(batch)
    >>> pooled.values().detach()
    tensor([[2.0000, 2.0000, 2.0000, 0.5000, 0.5000, 0.5000, 0.5000],
            [0.0000, 0.0000, 0.0000, 0.5000, 0.5000, 0.5000, 0.5000],
            [1.0000, 1.0000, 1.0000, 1.5000, 1.5000, 1.5000, 1.5000]])
    >>> pooled.keys(), pooled.offset_per_key()
    (['f1', 'f2'], [0, 3, 7])
    """

    _state_key = "embedding_bags.{}.weight"

    def __init__(
        self,
        tables: Sequence[TableConfig],
        is_weighted: bool = False,
        *,
        tiers: Sequence[Any] | None = None,
        store: EmbeddingStore | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(tables, is_weighted, tiers, store, backend)
        for table in self.tables:
            if table.pooling == "none":
                raise BadConfig(f"table {table.name!r}: pooling 'none' belongs into an EmbeddingCollection")
        self._dims = [t.embedding_dim for t in self.tables for _ in t.feature_names]

    def forward(self, batch: Any) -> KeyedTensor:
        """Pooled vectors of a ``KeyedJaggedTensor`` or of the handle that ``stage`` gave for it."""
        handle, part = self._staged(batch)
        if part is None:
            return KeyedTensor([], [], torch.zeros(handle.batch.stride(), 0, dtype=self.out_dtype))
        out = read(self.store, handle, part, self.out_dtype)
        names = list(self._features)
        if len(part.shape) == 2:
            return KeyedTensor(names, self._dims, out)
        strides = [n // d if d else 0 for n, d in zip(part.block_sizes(), self._dims, strict=True)]
        return KeyedTensor(names, self._dims, out, strides)


class EmbeddingCollection(_Collection):
    """Many tables, not pooled: one row per id.

    Callable on a ``KeyedJaggedTensor`` with values of shape ``(F, B, L[f][i])``; returns a dict of ``JaggedTensor``:
    for feature f, values ``(N[f], D[f])`` with ``N[f]`` the sum of its bags' lengths, and the bags' lengths.

    Args as for ``EmbeddingBagCollection``; the tables have ``pooling="none"``.

    >>> import embcache as ec
    >>> table = ec.TableConfig("t", num_embeddings=10, embedding_dim=2, features=["f"], pooling="none",
    ...                        init=ec.init.Constant(0.5))
    >>> out = ec.EmbeddingCollection([table])(
    ...     ec.KeyedJaggedTensor(["f"], torch.tensor([4, 9, 4]), lengths=torch.tensor([2, 0, 1])))
    >>> out["f"].values().shape, out["f"].lengths()
    (torch.Size([3, 2]), tensor([2, 0, 1]))
    """

    _state_key = "embeddings.{}.weight"

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        tiers: Sequence[Any] | None = None,
        store: EmbeddingStore | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(tables, False, tiers, store, backend)
        for table in self.tables:
            if table.pooling != "none":
                raise BadConfig(f"table {table.name!r}: pooling {table.pooling!r}, an EmbeddingCollection needs 'none'")

    def forward(self, batch: Any) -> dict[str, JaggedTensor]:
        """Rows of a ``KeyedJaggedTensor`` or of the handle that ``stage`` gave for it."""
        handle, part = self._staged(batch)
        if part is None:
            return {}
        rows = part.split(read(self.store, handle, part, self.out_dtype))
        bags = handle.batch.to(handle.device)
        return {name: bags[name].with_values(rows[name]) for name in self._features}
