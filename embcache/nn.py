"""Modules: drop-in ``EmbeddingBag`` and ``Embedding``, and collections of tables that take a ``KeyedJaggedTensor``.

``parameters()`` is empty: rows are trained by ``ec.optim.SparseOptimizer(model)``. Gradients of pooled outputs are kept
as they arrive and applied in its ``step()``; nothing is materialised per id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .config import DTYPES, TableConfig
from .errors import BadConfig, BadJagged, BadJaggedType, DoubleBackward, NotSupported, UnshardedReplicas
from .init import Initializer, Normal
from .jagged import INDEX_DTYPES, JaggedTensor, KeyedJaggedTensor
from .keyed_tensor import KeyedTensor
from .optim import SGD, Rule
from .staged import Handle, Part
from .store import EmbeddingStore


def _refuse_unsharded_replicas() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size > 1:
            raise UnshardedReplicas(
                f"step() of embedding tables that are not sharded, at world size {size}: the replicas would drift apart"
            )


class _Lookup(torch.autograd.Function):
    """Reads a part; its backward hands the output's gradient to the store. ``anchor`` makes autograd care."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weights: Tensor | None, store: EmbeddingStore, handle: Handle, part: Part, code: int
    ) -> Tensor:
        ctx.store, ctx.handle, ctx.part = store, handle, part
        return store.read_part(part, code)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise DoubleBackward(
                "create_graph=True through an embedding lookup: its gradient is not differentiable again"
            )
        store, part = ctx.store, ctx.part
        grad_weights = store.weight_gradient(part, grad) if ctx.needs_input_grad[1] else None
        if any(t not in store.frozen for t in part.layout.tables):
            store.require_owner(part)
            store.gather(part, grad)
            if store.problem is not None and store.on_nonfinite == "raise":
                raise store.problem
        return None, grad_weights, None, None, None, None


def _read(store: EmbeddingStore, handle: Handle, part: Part, dtype: torch.dtype) -> Tensor:
    code = DTYPES.get(dtype, 0)
    weights = part.weights
    wanted = torch.is_grad_enabled() and (
        (weights is not None and weights.requires_grad) or any(t not in store.frozen for t in part.layout.tables)
    )
    out = _Lookup.apply(store.anchor, weights, store, handle, part, code) if wanted else store.read_part(part, code)
    return out.to(device=handle.device, dtype=dtype)


class _Tables(nn.Module):
    """What all modules share: a store, an output dtype, and state dicts under the names of torch's modules."""

    _state_key = "{}"  # of a table's weight in the state dict

    def __init__(self, store: EmbeddingStore, features: Sequence[str], tables: Sequence[str]) -> None:
        super().__init__()
        self.store = store
        self.out_dtype = torch.float32
        self._features = tuple(features)
        self._table_names = tuple(tables)
        store.guard = _refuse_unsharded_replicas

    def freeze(self, *tables: str, frozen: bool = True) -> None:
        """Stop training these tables of this module (all, if none is named); ``frozen=False`` resumes."""
        self.store.freeze(*(tables or self._table_names), frozen=frozen)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """``requires_grad_(False)`` freezes this module's tables, ``True`` trains them again. Called on a *parent*
        module, torch visits parameters only, and there are none here: freeze the embedding module itself."""
        self.freeze(frozen=not requires_grad)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # .half(), .to(dtype): the output's dtype changes, stored rows do not; .to(device) changes nothing, since
        # outputs follow the ids
        probe = fn(torch.empty(0, dtype=self.out_dtype))
        if probe.is_floating_point():
            self.out_dtype = probe.dtype
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in self._table_names:
            weight = self.store.weight(name).clone(memory_format=torch.contiguous_format)
            destination[prefix + self._state_key.format(name)] = weight

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        mine = {prefix + self._state_key.format(name): name for name in self._table_names}
        for key, name in mine.items():
            if key not in state_dict:
                missing_keys.append(key)
                continue
            shape = list(self.store.weight(name).shape)
            if list(state_dict[key].shape) != shape:
                error_msgs.append(f"size mismatch for {key}: saved {list(state_dict[key].shape)}, declared {shape}")
            else:
                self.store.load_weight(name, state_dict[key])
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in mine)


class _Collection(_Tables):
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

    def _staged(self, batch: Any) -> Handle:
        handle = batch if isinstance(batch, Handle) else self.stage(batch)
        weighted = handle.batch.weights_or_none() is not None
        if weighted != self.is_weighted:
            raise BadJagged(
                f"is_weighted={self.is_weighted} but the batch has {'weights' if weighted else 'no weights'}"
            )
        return handle

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

    @torch.compiler.disable
    def forward(self, batch: Any) -> KeyedTensor:
        """Pooled vectors of a ``KeyedJaggedTensor`` or of the handle that ``stage`` gave for it."""
        handle = self._staged(batch)
        if not handle.parts:
            return KeyedTensor([], [], torch.zeros(handle.batch.stride(), 0, dtype=self.out_dtype))
        part = handle.parts[0]
        out = _read(self.store, handle, part, self.out_dtype)
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

    @torch.compiler.disable
    def forward(self, batch: Any) -> dict[str, JaggedTensor]:
        """Rows of a ``KeyedJaggedTensor`` or of the handle that ``stage`` gave for it."""
        handle = self._staged(batch)
        if not handle.parts:
            return {}
        part = handle.parts[0]
        rows = part.split(_read(self.store, handle, part, self.out_dtype))
        bags = handle.batch.to(handle.device)
        return {name: bags[name].with_values(rows[name]) for name in self._features}


class _TorchLike(_Tables):
    """One table behind the signature of a module of torch.nn."""

    _state_key = "weight"

    def __init__(
        self,
        table: TableConfig,
        weight: Tensor | None,
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
            self.store.load_weight(table.name, weight)

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

    def _run(self, batch: KeyedJaggedTensor) -> Tensor:
        handle = self.store.stage(batch)
        return _read(self.store, handle, handle.parts[0], self.out_dtype)

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
        _weight: Tensor | None = None,
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
        embeddings: Tensor,
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
        """A module whose rows are ``embeddings`` [rows, D], frozen unless ``freeze=False``."""
        rows, dim = _pretrained_shape(embeddings)
        ours.setdefault("dtype", embeddings.dtype)
        bag = cls(
            rows, dim, max_norm, norm_type, scale_grad_by_freq, mode, sparse, embeddings, include_last_offset,
            padding_idx, **ours,
        )  # fmt: skip
        bag.freeze(frozen=freeze)
        return bag

    @torch.compiler.disable
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """[B, D] from ``input`` [B, L], or from ``input`` [n] and ``offsets`` [B] (bag starts; with
        ``include_last_offset`` [B + 1]). ``per_sample_weights`` has the shape of ``input``; for mean pooling, where
        torch has none, the sum of weighted rows is divided by the bag's length."""
        batch = self._batch(self._ids(input), offsets, per_sample_weights)
        if self.mode != "max":
            return self._run(batch)
        if per_sample_weights is not None:
            raise NotSupported("per_sample_weights with mode='max' (torch refuses them too)")
        rows = self._run(batch).view(-1, self.embedding_dim)
        at = torch.arange(rows.shape[0], device=rows.device)
        return nn.functional.embedding_bag(
            at, rows, batch.offsets().to(rows.device), mode="max", include_last_offset=True
        )

    def _batch(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> KeyedJaggedTensor:
        if weights is not None and weights.shape != ids.shape:
            raise BadJagged(f"per_sample_weights has shape {list(weights.shape)}, input {list(ids.shape)}")
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
        _weight: Tensor | None = None,
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
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        **ours: Any,
    ) -> Embedding:
        """A module whose rows are ``embeddings`` [rows, D], frozen unless ``freeze=False``."""
        rows, dim = _pretrained_shape(embeddings)
        ours.setdefault("dtype", embeddings.dtype)
        return cls(rows, dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, embeddings, freeze, **ours)

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        """[..., D] from ids of any shape."""
        flat = self._ids(input).reshape(-1)
        out = self._run(self._bags(flat, None, torch.tensor([0, flat.numel()])))
        return out.view(*input.shape, self.embedding_dim)


def _pretrained_shape(embeddings: Tensor) -> tuple[int, int]:
    if embeddings.dim() != 2:
        raise BadConfig(f"embeddings has shape {list(embeddings.shape)}, must be [rows, dim]")
    return embeddings.shape[0], embeddings.shape[1]
