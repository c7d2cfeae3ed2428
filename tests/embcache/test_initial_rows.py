"""Initial rows made by the serial kernel: the same bits as the native op and as plain torch."""

import threading

import numpy as np
import pytest
import torch

from embcache import init, kernels, optim
from embcache.config import TableConfig
from embcache.kernels.initial import InitialRows

EDGES = np.array([0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32) - 1])
IDS = np.concatenate([EDGES, np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 400)])
INITS = [
    init.Zeros(),
    init.Constant(0.3),
    init.Uniform(0.01),
    init.Uniform(1e-6, 0.5),
    init.Uniform(1e6, -3.0),  # beyond the range of fp16
    init.Normal(1.0),
    init.Normal(3e-6, 1e-7),  # subnormal in fp16
    init.TruncatedNormal(0.02, 0.1),
]
RULES = [optim.SGD(), optim.Adam(), optim.RowWiseAdagrad(initial_accumulator_value=0.1)]


def by_torch(table: TableConfig, ids: np.ndarray, backend: str) -> np.ndarray:
    slab = torch.zeros(len(ids), table.row_bytes, dtype=torch.uint8)
    code, p0, p1 = table.init.code(table.num_embeddings, table.embedding_dim)
    kernels.get(backend).init_rows(
        slab,
        torch.arange(len(ids)),
        torch.from_numpy(ids),
        0,
        table.embedding_dim,
        table.dtype_code,
        table.state_offset,
        code,
        p0,
        p1,
        init.table_key(table.seed, table.name),
        torch.tensor(table.optimizer.initial_state(table.embedding_dim), dtype=torch.float32),
        init.normal_table(),
    )
    return slab.numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", INITS, ids=repr)
def test_every_bit_of_the_other_kernels(backend: str, start: init.Initializer, dtype: torch.dtype) -> None:
    for dim in (1, 3, 16, 63, 64, 65, 130):
        for rule in RULES:
            table = TableConfig("t", None, dim, init=start, dtype=dtype, optimizer=rule, seed=-5)
            slab = np.full((len(IDS) + 3, table.row_bytes), 255, dtype=np.uint8)  # a reused slot
            slots = np.random.default_rng(1).permutation(len(IDS) + 3)[: len(IDS)]
            untouched = np.setdiff1d(np.arange(len(slab)), slots)
            InitialRows(table).fill(slab, slots, IDS)
            assert np.array_equal(slab[slots], by_torch(table, IDS, backend))
            assert (slab[untouched] == 255).all()


def test_without_slots_the_rows_are_filled_in_order() -> None:
    table = TableConfig("t", 1000, 5)
    rows = np.empty((3, table.row_bytes), dtype=np.uint8)
    InitialRows(table).fill(rows, None, np.array([9, 0, 999]))
    assert np.array_equal(rows, by_torch(table, np.array([9, 0, 999]), "reference"))
    InitialRows(table).fill(rows[:0], None, np.empty(0, dtype=np.int64))


def test_the_padding_row_starts_at_zero() -> None:
    table = TableConfig("t", 1000, 5, padding_idx=7, optimizer=optim.RowWiseAdagrad(initial_accumulator_value=0.5))
    rows = np.empty((3, table.row_bytes), dtype=np.uint8)
    InitialRows(table).fill(rows, np.array([2, 0, 1]), np.array([7, 8, 9]))
    expected = by_torch(table, np.array([8, 9, 7]), "reference")
    expected[2, :20] = 0
    assert np.array_equal(rows, expected)


def test_threads_fill_different_rows() -> None:
    table = TableConfig("t", None, 33, init=init.Normal(1.0))
    start, ids = InitialRows(table), np.arange(4000)
    slab = np.zeros((4000, table.row_bytes), dtype=np.uint8)
    parts = [threading.Thread(target=start.fill, args=(slab, np.arange(k, 4000, 4), ids[k::4])) for k in range(4)]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    assert np.array_equal(slab, by_torch(table, ids, "reference"))
