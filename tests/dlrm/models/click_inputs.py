"""Small tables, batches and planted problems for the model tests."""

from __future__ import annotations

import torch
from torch import Tensor

import embcache as ec


def tables(
    dims: list[int], rows: int = 50, optimizer: object | None = None, init: ec.init.Initializer | None = None
) -> list[ec.TableConfig]:
    """One table a dim, feature `f{i}` each."""
    return [
        ec.TableConfig(
            f"t{i}",
            num_embeddings=rows,
            embedding_dim=dim,
            features=[f"f{i}"],
            optimizer=optimizer or ec.optim.RowWiseAdagrad(lr=0.1),
            init=init or ec.init.Uniform(0.5),
        )
        for i, dim in enumerate(dims)
    ]


def batch(
    n_tables: int, size: int, n_dense: int = 4, rows: int = 50, bag: int = 1, seed: int = 0
) -> tuple[Tensor, ec.KeyedJaggedTensor]:
    """Random dense values and ids; every bag of feature i has `bag` ids."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(size, n_dense, generator=generator)
    values = torch.randint(rows, (n_tables * size * bag,), generator=generator)
    lengths = torch.full((n_tables * size,), bag, dtype=torch.int32)
    return dense, ec.KeyedJaggedTensor.from_lengths_sync([f"f{i}" for i in range(n_tables)], values, lengths)
