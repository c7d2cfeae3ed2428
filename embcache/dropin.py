"""``torch.nn.EmbeddingBag`` and ``torch.nn.Embedding`` over a store: torch's arguments first, then ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from .config import TableConfig
from .errors import BadConfig, BadJagged, BadJaggedType, NotSupported, SchemaMismatch
from .init import Initializer, Normal
from .jagged import KeyedJaggedTensor
from .jagged_checks import INDEX_DTYPES
from .lookup import Tables, read
from .optim import SGD, Rule
from .store import EmbeddingStore

_AHEAD = "_embcache_jagged"  # attribute of ids that ``jagged`` was asked about

Pretrained: TypeAlias = Tensor | np.ndarray | str | Path


class _TorchLike(Tables):
    """One table behind the signature of a module of torch.nn."""

    _state_key = "weight"

    def __init__(
        self,
        table: TableConfig,
        weight: Pretrained | None,
        tiers: Sequence[Any] | None,
        backend: str,
        sparse: bool,
        device: Any,
    ) -> None:
        if device is not None and torch.device(device).type != "cpu":
            raise NotSupported(
                f"table {table.name!r} on device {device}: rows live in main memory, outputs follow the ids"
            )
        super().__init__(EmbeddingStore([table], tiers, backend=backend), table.feature_names, [table.name])
        self.table = table
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = table.padding_idx, table.max_norm, table.norm_type
        self.scale_grad_by_freq, self.sparse = table.scale_grad_by_freq, sparse
        if weight is not None:
            try:
                self._pretrain(weight)
            except BaseException:
                self.store.close()
                raise

    def _pretrain(self, weight: Pretrained) -> None:
        """Fill the table in blocks, whatever tiers it has."""
        if self.store.recovered_from is not None:
            raise BadConfig(
                f"table {self.table.name!r}: {self.store.checkpoints.folder} already holds generation "
                f"{self.store.recovered_from} of it, which these weights would replace: reopen it without weights, or "
                "call store.load_table"
            )
        shape, mine = list(_shape(weight)), [self.num_embeddings, self.embedding_dim]
        if shape != mine:
            raise SchemaMismatch(f"shape of table {self.table.name!r}", shape, mine)
        self.store.load_table(self.table.name, weight)

    @property
    def weight(self) -> Tensor:
        """[num_embeddings, embedding_dim] view of the stored rows; carries no gradient."""
        return self.store.weight(self.table.name)

    def reset_parameters(self) -> None:
        raise NotSupported("rows are a function of (seed, table, id, column): build the module anew with another seed")

    def _ids(self, ids: Tensor, what: str = "input") -> Tensor:
        if not isinstance(ids, Tensor) or ids.dtype not in INDEX_DTYPES:
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise BadJaggedType(f"{what} has dtype {kind}, must be torch.int32 or torch.int64")
        return ids

    def _bags(self, values: Tensor, weights: Tensor | None, offsets: Tensor) -> KeyedJaggedTensor:
        bags = (offsets.numel() - 1,)
        return KeyedJaggedTensor.trusted(list(self._features), values, weights, offsets, bags)

    def _batch(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> KeyedJaggedTensor:
        raise NotImplementedError

    def jagged(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """What a forward of the same tensors looks up, for staging ahead: the forward finds the rows staged.

        >>> import embcache as ec
        >>> bag = ec.EmbeddingBag(10, 3, init=ec.init.Constant(1.0))
        >>> loader = [torch.tensor([[1, 2]]), torch.tensor([[2, 9]])]
        >>> [bag(ids).shape for ids in bag.store.lookahead(loader, depth=2, ids=bag.jagged)]
        [torch.Size([1, 3]), torch.Size([1, 3])]
        """
        batch = self._batch(self._ids(input), offsets, per_sample_weights)
        input.__dict__[_AHEAD] = self.store, offsets, per_sample_weights, batch
        return batch

    def _lookup(
        self, input: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[KeyedJaggedTensor, Tensor]:
        """(the batch, the output); on the rows that look-ahead left staged, where there are any."""
        store, *others, batch = getattr(input, _AHEAD, (None, None, None, None))
        if store is self.store and others[0] is offsets and others[1] is weights and batch is not None:
            handle, part = self._ahead(batch)
            if handle is not None and part is not None:
                return batch, read(self.store, handle, part, self.out_dtype)
        batch = self._batch(self._ids(input), offsets, weights)
        handle = self.store.stage(batch)
        return batch, read(self.store, handle, handle.parts[0], self.out_dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, optimizer={self.table.optimizer}"


def _fresh_seed(seed: int | None) -> int:
    """``seed``, or one from torch's generator, so that torch.manual_seed decides as for torch's own modules."""
    return int(torch.randint(2**62, ())) if seed is None else seed


class EmbeddingBag(_TorchLike):
    """``torch.nn.EmbeddingBag`` over a store: its arguments first, in its order, then ours, by keyword.

    With equal weights, unweighted fp32 sum and mean give torch's bits. Where torch writes in a forward (``max_norm``),
    this returns renormalised rows and writes in the optimizer's step.

    Args:
        num_embeddings ... dtype: as in torch. ``sparse`` selects nothing: updates always touch the batch's rows only,
            and no gradient tensor of the table's size exists. ``mode="max"`` takes no per_sample_weights, as in torch.
        name: of the table, in messages and in the key of its random rows.
        optimizer: the update rule of the rows.
        init: initial rows, standard normal as in torch.
        seed: of the initial rows; None draws one from torch's generator.
        out_of_range, reserved_row: see ``TableConfig``.
        tiers, backend: see ``EmbeddingStore``.

    >>> import embcache as ec
    >>> bag = ec.EmbeddingBag(10, 3, mode="sum", init=ec.init.Constant(1.0))
    >>> bag(torch.tensor([1, 2, 4, 5]), torch.tensor([0, 3])).detach()
    tensor([[3., 3., 3.],
            [1., 1., 1.]])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Pretrained | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        name: str = "embedding_bag",
        optimizer: Rule | None = None,
        init: Initializer | None = None,
        seed: int | None = None,
        out_of_range: str = "raise",
        reserved_row: int = 0,
        tiers: Sequence[Any] | None = None,
        backend: str = "auto",
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise BadConfig(f"mode = {mode!r}, must be 'sum', 'mean' or 'max'")
        if mode == "max" and scale_grad_by_freq:
            raise NotSupported("scale_grad_by_freq with mode='max' (torch refuses it too)")
        if mode == "max" and (padding_idx is not None or out_of_range == "drop"):
            raise NotSupported("padding_idx and out_of_range='drop' with mode='max'")
        table = TableConfig(
            name,
            num_embeddings,
            embedding_dim,
            pooling="none" if mode == "max" else mode,
            optimizer=SGD() if optimizer is None else optimizer,
            init=Normal() if init is None else init,
            seed=_fresh_seed(seed),
            dtype=torch.float32 if dtype is None else dtype,
            out_of_range=out_of_range,
            reserved_row=reserved_row,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
        )
        super().__init__(table, _weight, tiers, backend, sparse, device)
        self.mode, self.include_last_offset = mode, include_last_offset

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Pretrained,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **ours: Any,
    ) -> EmbeddingBag:
        """A module whose rows are ``embeddings`` [rows, D], a tensor, an array (a memory map, too) or the path of an
        ``.npy`` file, frozen unless ``freeze=False``. With tiers on disk it is read in blocks, never whole."""
        rows, dim = _shape(embeddings)
        ours.setdefault("dtype", _stored_as(embeddings))
        bag = cls(
            rows, dim, max_norm, norm_type, scale_grad_by_freq, mode, sparse, embeddings, include_last_offset,
            padding_idx, **ours,
        )  # fmt: skip
        bag.freeze(frozen=freeze)
        return bag

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """[B, D] from ``input`` [B, L], or from ``input`` [n] and ``offsets`` [B] (bag starts; with
        ``include_last_offset`` [B + 1]). ``per_sample_weights`` has the shape of ``input``; for mean pooling, where
        torch has none, the sum of weighted rows is divided by the bag's length."""
        if self.mode == "max" and per_sample_weights is not None:
            raise NotSupported("per_sample_weights with mode='max' (torch refuses them too)")
        batch, out = self._lookup(input, offsets, per_sample_weights)
        if self.mode != "max":
            return out
        rows = out.view(-1, self.embedding_dim)
        at = torch.arange(rows.shape[0], device=rows.device)
        return nn.functional.embedding_bag(
            at, rows, batch.offsets().to(rows.device), mode="max", include_last_offset=True
        )

    def _batch(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> KeyedJaggedTensor:
        if weights is not None and weights.shape != ids.shape:
            raise BadJagged(f"per_sample_weights has shape {list(weights.shape)}, input {list(ids.shape)}")
        if weights is not None and not weights.is_floating_point():
            raise BadJaggedType(f"per_sample_weights has dtype {weights.dtype}, must be floating point")
        if ids.dim() == 2:
            if offsets is not None:
                raise BadJagged("offsets is given, but rows of a two-dimensional input are bags already")
            bags, length = ids.shape
            ends = torch.arange(bags + 1, device=ids.device) * length
            return self._bags(ids.reshape(-1), None if weights is None else weights.reshape(-1), ends)
        if ids.dim() != 1:
            raise BadJagged(f"input has shape {list(ids.shape)}, must be one- or two-dimensional")
        if offsets is None:
            raise BadJagged("a one-dimensional input needs offsets")
        offsets = self._ids(offsets, "offsets")
        if not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_full((1,), ids.numel())])
        return KeyedJaggedTensor(self._features, ids, weights, offsets=offsets)


class Embedding(_TorchLike):
    """``torch.nn.Embedding`` over a store: its arguments first, in its order, then ours, by keyword.

    Args as for ``EmbeddingBag``. The row of ``padding_idx`` starts at 0 and is not updated.

    >>> import embcache as ec
    >>> emb = ec.Embedding(10, 3, init=ec.init.Constant(1.0), padding_idx=0)
    >>> emb(torch.tensor([[0, 4]])).detach()
    tensor([[[0., 0., 0.],
             [1., 1., 1.]]])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Pretrained | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        name: str = "embedding",
        optimizer: Rule | None = None,
        init: Initializer | None = None,
        seed: int | None = None,
        out_of_range: str = "raise",
        reserved_row: int = 0,
        tiers: Sequence[Any] | None = None,
        backend: str = "auto",
    ) -> None:
        if out_of_range == "drop":
            raise NotSupported("out_of_range='drop' in an Embedding, whose output has the shape of its input")
        table = TableConfig(
            name,
            num_embeddings,
            embedding_dim,
            pooling="none",
            optimizer=SGD() if optimizer is None else optimizer,
            init=Normal() if init is None else init,
            seed=_fresh_seed(seed),
            dtype=torch.float32 if dtype is None else dtype,
            out_of_range=out_of_range,
            reserved_row=reserved_row,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
        )
        super().__init__(table, _weight, tiers, backend, sparse, device)
        self.freeze(frozen=_freeze)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Pretrained,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        **ours: Any,
    ) -> Embedding:
        """A module whose rows are ``embeddings`` [rows, D], a tensor, an array (a memory map, too) or the path of an
        ``.npy`` file, frozen unless ``freeze=False``. With tiers on disk it is read in blocks, never whole."""
        rows, dim = _shape(embeddings)
        ours.setdefault("dtype", _stored_as(embeddings))
        return cls(rows, dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, embeddings, freeze, **ours)

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] from ids of any shape."""
        _, out = self._lookup(input, None, None)
        return out.view(*input.shape, self.embedding_dim)

    def _batch(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> KeyedJaggedTensor:
        if offsets is not None or weights is not None:
            raise BadJagged("an Embedding takes ids alone")
        flat = ids.reshape(-1)
        return self._bags(flat, None, torch.tensor([0, flat.numel()]))


def _shape(weight: Pretrained) -> tuple[int, int]:
    shape = tuple(_header(weight).shape)
    if len(shape) != 2:
        raise BadConfig(f"embeddings has shape {shape}, must be [rows, dim]")
    return shape[0], shape[1]


def _stored_as(weight: Pretrained) -> torch.dtype:
    """The dtype of a table that takes these weights; float64 arrays become float32."""
    dtype = _header(weight).dtype
    if isinstance(dtype, torch.dtype):
        return dtype
    return torch.float16 if dtype == np.float16 else torch.float32


def _header(weight: Pretrained) -> Tensor | np.ndarray:
    """The weights themselves, or a map of their file, of which nothing is read yet."""
    return np.load(weight, mmap_mode="r", allow_pickle=False) if isinstance(weight, str | Path) else weight
