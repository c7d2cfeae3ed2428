"""What every click-through model is: a KeyedJaggedTensor and a dense tensor in, one logit a sample out."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import embcache as ec

DENSE_DTYPES = ("fp32", "bf16")


class SparseArch(nn.Module):
    """All embedding tables in one collection: `KeyedJaggedTensor of F features, B bags each -> B x (sum of D)`.

    The columns follow the order of the tables and of each table's features. Embeddings and their gradients are fp32
    whatever the dense part computes in.

    >>> arch = SparseArch([ec.TableConfig("t", 10, 4, features=["a", "b"])])
    >>> ids = ec.KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.arange(4), torch.tensor([1, 1, 1, 1]))
    >>> arch(ids).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        tables: Sequence[ec.TableConfig],
        store: ec.EmbeddingStore | None = None,
        suffix: str = "",
        backend: str = "auto",
    ) -> None:
        """`store` holds the tables already (None: one of their own). With a `suffix` the tables' features are the
        input's features with it appended: so a second collection over the same inputs fits into the same store."""
        super().__init__()
        self.features = [feature for table in tables for feature in table.feature_names]
        self.dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        self.suffix = suffix
        self.collection = ec.EmbeddingBagCollection(list(tables), store=store, backend=backend)

    @property
    def out_features(self) -> int:
        """Columns of the output: the sum of the dims of all features."""
        return sum(self.dims)

    def uniform_dim(self, model: str) -> int:
        """The one embedding dim of all features; ValueError naming the tables' dims when they differ.

        >>> SparseArch([ec.TableConfig("t", 9, 4, features=["a"]), ec.TableConfig("u", 9, 8, features=["b"])]
        ...     ).uniform_dim("DLRM")
        Traceback (most recent call last):
        ValueError: DLRM needs the same embedding_dim in all tables, got a: 4, b: 8
        """
        if len(set(self.dims)) != 1:
            named = ", ".join(f"{feature}: {dim}" for feature, dim in zip(self.features, self.dims, strict=True))
            raise ValueError(f"{model} needs the same embedding_dim in all tables, got {named}")
        return self.dims[0]

    def forward(self, sparse: Any) -> Tensor:
        """`sparse`: a KeyedJaggedTensor (ours or TorchRec's) or the handle it was staged as -> fp32 [B, sum of D]."""
        if self.suffix:
            batch = sparse.batch if isinstance(sparse, ec.Handle) else ec.KeyedJaggedTensor.adopt(sparse)
            sparse = batch.with_suffix(self.suffix)
        values: Tensor = self.collection(sparse).values()
        return values


def derived(
    table: ec.TableConfig, suffix: str, features: Sequence[str] | None = None, **changes: Any
) -> ec.TableConfig:
    """A further table over the same ids: name and features (all, or those given) get `suffix`; `changes` apply.

    >>> table = derived(ec.TableConfig("t", 9, 4, features=["a", "b"]), ".linear", embedding_dim=1)
    >>> table.name, table.features, table.embedding_dim
    ('t.linear', ('a.linear', 'b.linear'), 1)
    """
    names = [name + suffix for name in (table.feature_names if features is None else features)]
    return dataclasses.replace(table, name=table.name + suffix, features=names, **changes)


class ClickModel(nn.Module):
    """Base of the models: checks the inputs, sets the precision of the dense part, returns fp32 logits.

    A subclass builds its arch parts and defines :meth:`head`. `dense_dtype="bf16"` runs the head under bf16 autocast;
    embeddings, their gradients, all parameters and the logits stay fp32. Ranks and devices are nobody's business here.
    """

    def __init__(
        self,
        tables: Sequence[ec.TableConfig],
        n_dense: int,
        dense_dtype: str = "fp32",
        tiers: Sequence[Any] | None = None,
        backend: str = "auto",
        further: Sequence[ec.TableConfig] = (),
    ) -> None:
        """`tiers`, `backend`: of the one :class:`embcache.EmbeddingStore` that holds `tables` and `further` ones."""
        super().__init__()
        name = type(self).__name__
        if not tables:
            raise ValueError(f"{name} needs at least one embedding table")
        if n_dense < 0:
            raise ValueError(f"{name}: n_dense must not be negative, got {n_dense}")
        if dense_dtype not in DENSE_DTYPES:
            raise ValueError(f"{name}: dense_dtype must be one of {DENSE_DTYPES}, got {dense_dtype!r}")
        if dense_dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            warnings.warn(f"{name}: this processor has no bf16 products, dense_dtype='bf16' is slower", stacklevel=3)
        self.n_dense = n_dense
        self.dense_dtype = dense_dtype
        self.sparse_arch = SparseArch(tables, ec.EmbeddingStore([*tables, *further], tiers, backend=backend))

    @property
    def store(self) -> ec.EmbeddingStore:
        """What holds all tables."""
        return self.sparse_arch.collection.store

    def inputs(self, sparse: ec.KeyedJaggedTensor) -> list[ec.KeyedJaggedTensor]:
        """Every jagged batch that a forward of `sparse` looks up: itself, and under the features of further tables."""
        suffixes = dict.fromkeys(m.suffix for m in self.modules() if isinstance(m, SparseArch))
        return [sparse.with_suffix(suffix) if suffix else sparse for suffix in suffixes]

    def head(self, dense: Tensor, pooled: Tensor, sparse: Any) -> Tensor:
        """`dense` [B, n_dense], `pooled` [B, sum of D] -> logits [B] in the dense part's dtype.

        `sparse` is the input itself, for models that look up further tables.
        """
        raise NotImplementedError

    def forward(self, dense: Tensor | None, sparse: Any) -> Tensor:
        """`dense` fp32 [B, n_dense] (None where n_dense is 0), `sparse` KeyedJaggedTensor -> logits fp32 [B]."""
        pooled = self.sparse_arch(sparse)
        if dense is None:
            dense = pooled.new_empty(pooled.shape[0], 0)
        if dense.dim() != 2 or dense.shape[1] != self.n_dense or dense.shape[0] != pooled.shape[0]:
            raise ValueError(
                f"{type(self).__name__}: dense must be [{pooled.shape[0]}, {self.n_dense}] "
                f"(batch of the sparse input, n_dense), got {list(dense.shape)}"
            )
        if self.dense_dtype == "bf16":
            with torch.autocast(pooled.device.type, torch.bfloat16):
                logits = self.head(dense, pooled, sparse)
        else:
            logits = self.head(dense, pooled, sparse)
        return logits.float()
