"""The C++ kernels behind ``torch.ops.embcache``: the same functions as ``reference.py``, see there for the arguments.

A table's arena ("slab") is uint8 [capacity, row_bytes], contiguous; a row holds its weights at byte 0 and at
``state_offset`` its fp32 optimizer state: states of ``dim`` floats in the rule's order, then scalars. Descriptors:

* ``tables`` int64 [T, 8]: dim, weight dtype (0 fp32, 1 bf16, 2 fp16), state_offset in bytes, rule, rounding key, flags
  (bit 0 stochastic rounding, bits 1-2 weight decay: 0 none, 1 L2, 2 decoupled, bit 3 a row's last scalar counts steps),
  and of a table that is some columns of a wider one the first of them and how many that one has (else 0, dim);
* ``features`` int64 [F, 7]: table, pooling (0 sum, 1 mean, 2 none), first bag, bags, then where its vectors lie:
  tensor, element offset, elements between bags;
* ``hyper`` float64 [T, 16]: see ``embcache.optim``.

A descriptor, an offset or a slot that leads outside its tensor raises RuntimeError before anything is written;
``check_ids`` and ``check_offsets`` find the position for a better message.
Every op works in parallel on torch's threads; results do not depend on their number, nor on the instruction set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from . import build

_library: Path | None = None
_loaded: bool | None = None  # not tried yet
_loading = threading.Lock()
_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load() -> bool:
    """Makes the ops available: the library built ahead if it fits the sources, else compiled on first use.

    False where there is none, after one warning that says why; a process tries once.
    """
    global _loaded
    with _loading:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def _load() -> bool:
    ahead = build.prebuilt()
    if ahead is not None and _try_load(ahead, "built ahead"):
        return True
    path = build.build_on_first_use()
    return path is not None and _try_load(path, "compiled on first use")


def _try_load(path: Path, how: str) -> bool:
    global _library, _origin
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        build.warn_slow(f"{path} does not load: {error}")
        return False
    _library, _origin = path, how
    _register_fakes()
    return True


_origin = ""


def library() -> tuple[Path | None, str]:
    """The loaded library and how it came to be ("built ahead", "compiled on first use"), or (None, "")."""
    return _library, _origin


def isa() -> str:
    """The instruction set in use: "portable", "avx2" or "avx512"."""
    return torch.ops.embcache.isa()


def isas() -> list[str]:
    """The instruction sets this processor has, of those that are compiled."""
    return torch.ops.embcache.isas().split(",")


def set_isa(name: str) -> None:
    """Chooses the instruction set, for tests: results are the same bits with each. RuntimeError where it is absent."""
    torch.ops.embcache.set_isa(name)


def pooled_lookup(
    slabs: Sequence[Tensor],
    tables: Tensor,
    features: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    out_numel: int,
    out_dtype: int,
) -> Tensor:
    """One-dimensional output of out_numel elements: each bag's pooled vector at its feature's offset and stride.

    Unweighted fp32 sums and means are the bits of ``torch.nn.EmbeddingBag``. Elements that no feature covers are
    undefined.
    """
    return torch.ops.embcache.pooled_lookup(
        list(slabs), tables, features, values, offsets, weights, out_numel, out_dtype
    )


def fused_update(
    slabs: Sequence[Tensor],
    written: Sequence[Tensor],
    tables: Tensor,
    hyper: Tensor,
    features: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    grads: Sequence[Tensor],
    slot_ids: Sequence[Tensor],
) -> int:
    """Sums the gradients of equal slots, applies each table's rule once per touched row; returns the rows touched."""
    return torch.ops.embcache.fused_update(
        list(slabs), list(written), tables, hyper, features, values, offsets, weights, list(grads), list(slot_ids)
    )


def row_sums(slab: Tensor, table: Tensor, hyper: Tensor, slots: Tensor, grads: Tensor, given: Tensor | None) -> Tensor:
    """fp32 [n, 3]: what the rule of a table (``table`` [1, 8], ``hyper`` [1, 16]) sums over the columns of each row:
    its first and its second sum, and the squares of the new weights for max_norm. Nothing changes.

    ``slots`` int64 [n], distinct; ``grads`` fp32 [n, dim], their summed gradients, times the multiplier; ``given``: the
    sums over all columns of rows that lie in several tables, as ``apply_rows`` takes them; the third follows from the
    first two, so of such rows it is right only where these are given.
    """
    return torch.ops.embcache.row_sums(slab, table, hyper, slots, grads, given)


def apply_rows(
    slab: Tensor,
    written: Tensor,
    table: Tensor,
    hyper: Tensor,
    slots: Tensor,
    grads: Tensor,
    given: Tensor | None,
    slot_ids: Tensor,
) -> None:
    """Applies the rule to distinct rows whose gradients are summed already; ``given``: see ``row_sums``."""
    torch.ops.embcache.apply_rows(slab, written, table, hyper, slots, grads, given, slot_ids)


def grad_weights(
    slabs: Sequence[Tensor],
    tables: Tensor,
    features: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    grads: Sequence[Tensor],
) -> Tensor:
    """fp32 [n]: d/dp_i = <grad_out of its bag, w_i>, divided by the bag's length under mean pooling."""
    return torch.ops.embcache.grad_weights(list(slabs), tables, features, values, offsets, list(grads))


def all_finite(grads: Sequence[Tensor]) -> bool:
    """No NaN and no infinity in any of the tensors."""
    return not grads or torch.ops.embcache.all_finite(list(grads))


def touch_rows(
    slabs: Sequence[Tensor], tables: Tensor, features: Tensor, values: Tensor, offsets: Tensor | None
) -> int:
    """Reads the rows that ``pooled_lookup`` would read and nothing else: the memory's limit, for benchmarks."""
    return torch.ops.embcache.touch_rows(list(slabs), tables, features, values, offsets)


def check_ids(values: Tensor, offsets: Tensor | None, features: Tensor, rows: Tensor) -> int:
    """First position whose id is outside ``[0, rows[table])``, or -1; ``rows[table] < 0``: every id is inside."""
    return torch.ops.embcache.check_ids(values, offsets, features, rows)


def check_offsets(offsets: Tensor, n_values: int) -> int:
    """-1 where offsets begin at 0, never decrease and end at ``n_values``; else the first bad position."""
    return torch.ops.embcache.check_offsets(offsets, n_values)


def init_rows(
    slab: Tensor,
    slots: Tensor | None,
    ids: Tensor | None,
    first_id: int,
    dim: int,
    weight_dtype: int,
    state_offset: int,
    init_code: int,
    p0: float,
    p1: float,
    key: int,
    state_init: Tensor,
    normal_table: Tensor,
    first_column: int = 0,
) -> None:
    """Fill rows with their initial weights, columns ``first_column`` and on, and state; ``slots`` None: rows 0, 1, ...
    hold ids first_id, ..."""
    place = dim, weight_dtype, state_offset
    chosen = init_code, p0, p1, key
    torch.ops.embcache.init_rows(slab, slots, ids, first_id, *place, *chosen, state_init, normal_table, first_column)


def _register_fakes() -> None:
    """Shapes for ``torch.compile``. Ops that answer with a number of the data have none to offer: a graph break."""
    torch.library.register_fake("embcache::pooled_lookup", _fake_pooled_lookup)
    torch.library.register_fake("embcache::grad_weights", _fake_grad_weights)
    for name in ("init_rows", "apply_rows"):
        torch.library.register_fake(f"embcache::{name}", lambda *arguments: None)
    torch.library.register_fake("embcache::row_sums", lambda *arguments: arguments[4].new_empty(len(arguments[3]), 3))
    for name in ("fused_update", "all_finite", "check_ids", "check_offsets", "touch_rows"):
        torch.library.register_fake(f"embcache::{name}", _data_dependent(name))


def _fake_pooled_lookup(
    slabs: list[Tensor],
    tables: Tensor,
    features: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    out_numel: int,
    out_dtype: int,
) -> Tensor:
    return torch.empty(out_numel, dtype=_OUT_DTYPES[out_dtype], device=values.device)


def _fake_grad_weights(
    slabs: list[Tensor],
    tables: Tensor,
    features: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    grads: list[Tensor],
) -> Tensor:
    return torch.empty(values.numel(), dtype=torch.float32, device=values.device)


def _data_dependent(name: str) -> Callable[..., None]:
    def fake(*arguments: object) -> None:
        raise torch._subclasses.fake_tensor.DataDependentOutputException(getattr(torch.ops.embcache, name).default)

    return fake
