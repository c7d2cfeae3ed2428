"""Pairwise interactions of feature vectors: DLRM's dot products and the factorisation machine.

The dot interaction of B x N vectors of width D costs little arithmetic and much memory traffic when it is written as
concatenate, batched product, gather of a triangle, concatenate: the C++ operator does it in one pass over the pooled
embeddings, in place, and its backward writes the embedding gradient once, in the layout that the fused optimizer reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embcache import kernels


def dot_interaction_reference(dense: Tensor | None, sparse: Tensor, dim: int) -> Tensor:
    """The dot interaction in plain torch; same arguments and result as :func:`dot_interaction`."""
    fields = sparse.unflatten(1, (-1, dim))
    if dense is not None:
        fields = torch.cat([dense.unsqueeze(1), fields.to(dense.dtype)], dim=1)
    n = fields.shape[1]
    products = torch.bmm(fields, fields.transpose(1, 2))
    rows, columns = torch.tril_indices(n, n, -1, device=fields.device)
    pairs = products[:, rows, columns].to(fields.dtype)
    return pairs if dense is None else torch.cat([dense, pairs], dim=1)


_native: bool | None = None  # not yet looked for


def native_interaction() -> bool:
    """Whether the C++ dot interaction is there; the first call loads it and tells autograd and torch.compile of it."""
    global _native
    if _native is None:
        kernels.get("auto")
        _native = hasattr(torch.ops.embcache, "dot_interaction")
        if _native:
            torch.library.register_fake("embcache::dot_interaction")(_fake_forward)
            torch.library.register_fake("embcache::dot_interaction_backward")(_fake_backward)
            torch.library.register_autograd(
                "embcache::dot_interaction", _autograd_backward, setup_context=_setup_context
            )
    return _native


def padded_width(width: int) -> int:
    """Elements from one output row to the next: rows begin at multiples of 16 elements, which the next GEMM likes."""
    return (width + 15) // 16 * 16


def _fake_forward(dense: Tensor | None, sparse: Tensor, dim: int) -> Tensor:
    n = sparse.shape[1] // dim + (dense is not None)
    width = n * (n - 1) // 2 + (dim if dense is not None else 0)
    dtype = dense.dtype if dense is not None else sparse.dtype
    return sparse.new_empty_strided((sparse.shape[0], width), (padded_width(width), 1), dtype=dtype)


def _fake_backward(grad: Tensor, dense: Tensor | None, sparse: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    grad_dense = grad.new_empty(sparse.shape[0] if dense is not None else 0, dim)
    return grad_dense, sparse.new_empty(sparse.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dense, sparse, ctx.dim = inputs
    ctx.has_dense = dense is not None
    ctx.save_for_backward(*((dense, sparse) if ctx.has_dense else (sparse,)))


def _autograd_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
    dense, sparse = ctx.saved_tensors if ctx.has_dense else (None, *ctx.saved_tensors)
    grad_dense, grad_sparse = torch.ops.embcache.dot_interaction_backward(grad, dense, sparse, ctx.dim)
    return (grad_dense if ctx.has_dense else None), grad_sparse, None


def dot_interaction(dense: Tensor | None, sparse: Tensor, dim: int) -> Tensor:
    """Dot products of all pairs of feature vectors, after the dense vector itself.

    `dense` [B, D] or None, `sparse` [B, F * D], `dim` = D. With the N = F + 1 vectors x_0 = dense, x_1 ... x_F (F
    vectors without dense), the result is [B, D + N(N-1)/2]: the dense vector, then <x_i, x_j> for i > j, row by row of
    the strictly lower triangle. The result has the dtype of `dense` (of `sparse` without); products are summed in fp32.
    The C++ operator gives the same bits for every number of threads and every instruction set.

    >>> dense = torch.tensor([[1.0, 2.0]])
    >>> sparse = torch.tensor([[3.0, 4.0, 5.0, 6.0]])        # F = 2
    >>> dot_interaction(dense, sparse, 2).tolist()           # then <x1, x0>, <x2, x0>, <x2, x1>
    [[1.0, 2.0, 11.0, 17.0, 39.0]]
    """
    if dim < 1 or sparse.dim() != 2 or sparse.shape[1] % dim:
        raise ValueError(f"sparse must be [B, F * {dim}], got {list(sparse.shape)}")
    if dense is not None and dense.shape != (sparse.shape[0], dim):
        raise ValueError(f"dense must be [{sparse.shape[0]}, {dim}], got {list(dense.shape)}")
    floats = (torch.float32, torch.bfloat16)
    if (
        sparse.device.type == "cpu"
        and sparse.dtype == torch.float32
        and (dense is None or dense.dtype in floats)
        and native_interaction()
    ):
        result: Tensor = torch.ops.embcache.dot_interaction(dense, sparse, dim)
        return result
    return dot_interaction_reference(dense, sparse, dim)


def fm_interaction(fields: Tensor) -> Tensor:
    """Second-order factorisation machine: `B x F x D -> B x 1`, the sum over pairs i < j of <v_i, v_j>.

    By Rendle's identity: half of (sum of vectors) squared minus sum of squares, in O(F D).

    >>> fm_interaction(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])).tolist()        # 11 + 17 + 39
    [[67.0]]
    """
    total = fields.sum(dim=1)
    return 0.5 * (total.square() - fields.square().sum(dim=1)).sum(dim=1, keepdim=True)
