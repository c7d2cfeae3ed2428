"""The lookup as autograd sees it, and what all modules share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .config import DTYPES
from .errors import DoubleBackward, EmbcacheError, UnshardedReplicas
from .staged import Handle, Part
from .store import EmbeddingStore

DISK_KEY, IDS_SUFFIX = "store", "_ids"  # of state dicts: where a store on disk lives, the ids of an unbounded table


def _refuse_unsharded_replicas() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size > 1:
            raise UnshardedReplicas(
                f"step() of embedding tables that are not sharded, at world size {size}: the replicas would drift apart"
            )


def _hide_from_compiler(cls: type) -> None:
    """Apply ``torch.compiler.disable`` to the forwards of our modules: torch.compile breaks its graph there, once.

    Not a decorator, because torch's imports the compiler, which takes seconds: importing this package must not.
    """
    for base in cls.__mro__:
        forward = vars(base).get("forward") if base.__module__.startswith(__name__.rpartition(".")[0]) else None
        if forward is not None and not hasattr(forward, "_torchdynamo_disable"):
            base.forward = torch.compiler.disable(forward)  # type: ignore[attr-defined]


class Lookup(torch.autograd.Function):
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


def read(store: EmbeddingStore, handle: Handle, part: Part, dtype: torch.dtype) -> Tensor:
    code = DTYPES.get(dtype, 0)
    weights = part.weights
    wanted = torch.is_grad_enabled() and (
        (weights is not None and weights.requires_grad) or any(t not in store.frozen for t in part.layout.tables)
    )
    out = Lookup.apply(store.anchor, weights, store, handle, part, code) if wanted else store.read_part(part, code)
    return out.to(device=handle.device, dtype=dtype)


class Tables(nn.Module):
    """What all modules share: a store, an output dtype, and state dicts under the names of torch's modules."""

    _state_key = "{}"  # of a table's weight in the state dict

    def __init__(self, store: EmbeddingStore, features: Sequence[str], tables: Sequence[str]) -> None:
        super().__init__()
        _hide_from_compiler(type(self))
        self.store = store
        self.out_dtype = torch.float32
        self._features = tuple(features)
        self._table_names = tuple(tables)
        store.guard = _refuse_unsharded_replicas

    def _ahead(self, batch: Any) -> tuple[Handle | None, Part | None]:
        """The handle that look-ahead left on a batch and its part with this module's features, if they can be read."""
        handle: Handle | None = getattr(batch, "staged", None)
        part = None if handle is None else handle.part(self._features)
        return (handle, part) if part is not None and part.serves(self.store.front) else (None, None)

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
        if self.store.durable is not None:
            destination[prefix + DISK_KEY] = self.store.state_dict()
            return
        for name in self._table_names:
            key = prefix + self._state_key.format(name)
            ids, weight = self.store.whole_weight(name)
            destination[key] = weight
            if ids is not None:
                destination[key + IDS_SUFFIX] = ids

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
        if self.store.durable is not None:
            known = {prefix + DISK_KEY}
            if prefix + DISK_KEY in state_dict:
                try:
                    self.store.load_state_dict(state_dict[prefix + DISK_KEY])
                except (EmbcacheError, OSError) as error:
                    error_msgs.append(f"{prefix}{DISK_KEY}: {error}")
            else:
                missing_keys.append(prefix + DISK_KEY)
        else:
            known = set()
            for name in self._table_names:
                key = prefix + self._state_key.format(name)
                known |= {key, key + IDS_SUFFIX} if self.store.tables[self.store.index(name)].unbounded else {key}
                self._load_table(name, key, state_dict, missing_keys, error_msgs)
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)

    def _load_table(self, name: str, key: str, state_dict: Any, missing_keys: list[str], error_msgs: list[str]) -> None:
        table = self.store.tables[self.store.index(name)]
        wanted = [key, key + IDS_SUFFIX] if table.unbounded else [key]
        absent = [k for k in wanted if k not in state_dict]
        if absent:
            missing_keys.extend(absent)
            return
        for k in wanted:
            if not isinstance(state_dict[k], Tensor):
                error_msgs.append(f"{k} is a {type(state_dict[k]).__name__}, must be a tensor")
                return
        rows = state_dict[key + IDS_SUFFIX].numel() if table.unbounded else table.num_embeddings
        shape = [rows, table.embedding_dim]
        if list(state_dict[key].shape) != shape:
            error_msgs.append(f"size mismatch for {key}: saved {list(state_dict[key].shape)}, declared {shape}")
        elif table.unbounded:
            self.store.load_rows(name, state_dict[key + IDS_SUFFIX], state_dict[key])
        else:
            self.store.load_weight(name, state_dict[key])
