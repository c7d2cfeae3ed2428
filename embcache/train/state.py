"""Everything a run must remember to go on as if it had never stopped, as plain values and tensors."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embcache.errors import SchemaMismatch
from embcache.optim import SparseOptimizer
from embcache.store import EmbeddingStore

__all__ = ["dense_state", "load_dense_state", "load_optimizer", "load_random_state", "optimizer_state", "random_state"]


def stores_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[EmbeddingStore]:
    """The embedding stores that the optimizers train, each once."""
    stores: list[Any] = [store for o in optimizers if isinstance(o, SparseOptimizer) for store in o.stores]
    return [store for store in stores if isinstance(store, EmbeddingStore)]


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers outside embedding stores, by name."""
    return dict(_dense(model))


def load_dense_state(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy saved values into the model; other names or shapes raise SchemaMismatch before anything changes."""
    declared = dict(_dense(model))
    shapes = [{name: list(t.shape) for name, t in state.items()} for state in (saved, declared)]
    if shapes[0] != shapes[1]:
        names = [name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)]
        raise SchemaMismatch("dense parameters", *({n: s.get(n) for n in names} for s in shapes))
    with torch.no_grad():
        for name, tensor in declared.items():
            tensor.copy_(saved[name])


def _dense(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state; rows of embedding tables are left out, the checkpoint has them with their weights."""
    if isinstance(optimizer, SparseOptimizer):
        return {"param_groups": _without_params(optimizer.param_groups), "skipped_steps": optimizer.skipped_steps}
    return optimizer.state_dict()


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore what ``optimizer_state`` gave."""
    if not isinstance(optimizer, SparseOptimizer):
        optimizer.load_state_dict(saved)
        return
    optimizer.skipped_steps = saved["skipped_steps"]
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update(values)


def _without_params(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, numpy and Python; what ``random_state`` saves starts from here."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make the random numbers that follow a function of (seed, step, rank) alone."""
    mixed = int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()) >> 1
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed would also queue a call for devices not in use
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(mixed)
    np.random.seed(mixed % 2**32)  # noqa: NPY002
    random.seed(mixed)


def random_state() -> dict[str, Any]:
    """The global generators of torch (every device in use), numpy and Python."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.array(keys, np.int64)), *map(float, rest)],
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def load_random_state(state: dict[str, Any]) -> None:
    """Restore what ``random_state`` gave."""
    torch.set_rng_state(state["torch"])
    kind, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), int(place), int(has_gauss), gauss))  # noqa: NPY002
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
