"""A stack of Linear + ReLU layers as one autograd node, for CPU training.

At a batch of thousands the matrix products of an MLP run near the processor's peak, and what surrounds them costs as
much again as it needs to: fresh activations touch fresh pages, ReLU and its gradient are passes of their own over
memory that has left the caches, the bias is copied before each product. Here hidden activations and gradients live in
buffers that are used again each step, ReLU and bias are applied in place while a layer's output is still in the cache,
and the gradient of an input that does not need one (dense features) is never formed. The values are those of
`nn.Linear` and `torch.relu` up to the rounding of the bias addition (product + bias, once each, both times).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class BufferPool:
    """Flat tensors kept for use again, by dtype and size; at most `max_bytes` idle bytes, the oldest dropped first."""

    def __init__(self, max_bytes: int = 1 << 28) -> None:
        self.max_bytes = max_bytes
        self._idle: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised [rows, columns] tensor that nobody else holds."""
        numel = rows * columns
        with self._lock:
            for i in range(len(self._idle) - 1, -1, -1):
                if self._idle[i].dtype == dtype and self._idle[i].numel() == numel:
                    return self._idle.pop(i).view(rows, columns)
        return torch.empty(rows, columns, dtype=dtype)

    def give(self, buffers: Iterable[Tensor]) -> None:
        """Takes buffers back; the caller must hold no view of them that it still reads."""
        with self._lock:
            self._idle.extend(buffer.view(-1) for buffer in buffers)
            size = sum(buffer.nbytes for buffer in self._idle)
            while size > self.max_bytes:
                size -= self._idle.pop(0).nbytes


class Lease:
    """Buffers on loan from a pool; they go back when the lease dies, with the graph that holds it."""

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self.buffers: list[Tensor] = []

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        buffer = self.pool.take(rows, columns, dtype)
        self.buffers.append(buffer)
        return buffer

    def __del__(self) -> None:
        self.pool.give(self.buffers)


_POOL = BufferPool()


def fused_mlp_applies(x: Tensor, layers: Iterable[nn.Module]) -> bool:
    """Whether the fused path computes this: CPU, fp32 or CPU autocast to bf16, gradients on, no hooks."""
    if (
        x.device.type != "cpu"
        or x.dtype not in (torch.float32, torch.bfloat16)
        or x.dim() != 2
        or x.shape[0] == 0
        or not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    autocast = torch.is_autocast_enabled("cpu")
    if x.dtype == torch.bfloat16 and not autocast:
        return False
    if autocast and torch.get_autocast_dtype("cpu") != torch.bfloat16:
        return False
    modules = list(layers)
    return bool(modules) and all(
        type(layer) is nn.Linear
        and layer.bias is not None
        and layer.weight.dtype == torch.float32
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)
        for layer in modules
    )


def fused_mlp(x: Tensor, layers: Iterable[nn.Module], last_relu: bool) -> Tensor:
    """`x` [B, in] through Linear + ReLU layers -> [B, out]; ReLU after the last one if `last_relu`.

    Under CPU autocast to bf16 the products run in bf16 and the result is bf16, else all is fp32.
    """
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
    result: Tensor = _FusedMLP.apply(x, dtype, last_relu, *parameters)
    return result


def _native() -> bool:
    """Whether the C++ passes around the products are loaded (whoever built an embedding table has loaded them)."""
    return hasattr(torch.ops.embcache, "bias_relu_")


def _bias_relu_(x: Tensor, bias: Tensor, relu: bool) -> None:
    """x + bias, then ReLU if asked, in place."""
    if _native():
        torch.ops.embcache.bias_relu_(x, bias, relu)
        return
    x.add_(bias)
    if relu:
        x.relu_()


def _relu_backward(grad: Tensor, output: Tensor | None, to: Tensor) -> Tensor:
    """Writes grad where output > 0, else 0, into `to` (no output: nothing); returns the sum over rows of that, fp32."""
    if _native():
        if grad.stride(1) != 1:
            grad = grad.contiguous()
        summed: Tensor = torch.ops.embcache.relu_backward(grad, output, to)
        return summed
    if output is not None:
        torch.ops.aten.threshold_backward.grad_input(grad, output, 0, grad_input=to)
        grad = to
    return grad.sum(0, dtype=torch.float32)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, whose columns are made a multiple of 16 for the product: ragged ones cost it up to half as much again.

    What fills the further columns does not matter, they are cut off again.
    """
    width = b.shape[1]
    padded = (width + 15) // 16 * 16
    if width == padded or width < 64:
        return torch.mm(a, b)
    room = b.untyped_storage().nbytes() // b.element_size() - b.storage_offset()
    if b.stride(1) == 1 and b.stride(0) >= padded and (b.shape[0] - 1) * b.stride(0) + padded <= room:
        wide = b.as_strided((b.shape[0], padded), b.stride())  # the rows have the columns already
    else:
        wide = b.new_zeros(b.shape[0], padded)
        wide[:, :width] = b
    return torch.mm(a, wide)[:, :width]


def _weight_gradient(grad: Tensor, h: Tensor) -> Tensor:
    """grad^T @ h [out, in] fp32. A narrow input is faster the other way round."""
    if h.shape[1] < 64:
        return torch.mm(h.t(), grad).t().to(torch.float32, memory_format=torch.contiguous_format)
    return _product(grad.t(), h).to(torch.float32, memory_format=torch.contiguous_format)


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, last_relu: bool, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[0::2], parameters[1::2]
        lease = Lease(_POOL)
        ctx.in_dtype = x.dtype
        h = x.to(dtype)
        casted = [w.to(dtype) for w in weights]
        inputs = []
        with torch.autocast("cpu", enabled=False):
            for i, (weight, bias) in enumerate(zip(casted, biases, strict=True)):
                inputs.append(h)
                last = i + 1 == len(casted)
                rows, columns = h.shape[0], weight.shape[0]
                out = torch.empty(rows, columns, dtype=dtype) if last else lease.take(rows, columns, dtype)
                torch.mm(h, weight.t(), out=out)
                _bias_relu_(out, bias, not last or last_relu)
                h = out
        ctx.lease, ctx.inputs, ctx.weights, ctx.last_relu = lease, inputs, casted, last_relu
        ctx.save_for_backward(x, *([h] if last_relu else []), *parameters)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # checks that no parameter was changed in place since the forward
        lease = Lease(ctx.lease.pool)
        grads: list[Tensor | None] = []
        output = saved[1] if ctx.last_relu else None
        grad = grad.to(ctx.weights[0].dtype)
        for i in range(len(ctx.weights) - 1, -1, -1):
            h, weight = ctx.inputs[i], ctx.weights[i]
            incoming = i + 1 == len(ctx.weights)  # autograd's own tensor, not to be written
            masked = lease.take(grad.shape[0], grad.shape[1], grad.dtype) if incoming and output is not None else grad
            grads.append(_relu_backward(grad, output, masked))
            grad = masked
            grads.append(_weight_gradient(grad, h))
            if i > 0:
                grad = torch.mm(grad, weight, out=lease.take(grad.shape[0], weight.shape[1], grad.dtype))
                output = h
        first = _product(grad, ctx.weights[0]).to(ctx.in_dtype) if ctx.needs_input_grad[0] else None
        return first, None, None, *reversed(grads)
