"""In which order an epoch visits the rows: functions of (seed, epoch, position), nothing is stored.

``rows`` permutes single rows. ``blocks`` keeps runs of 2,048 rows together: blocks are permuted, then the rows inside
each window of 64 blocks; reads stay sequential by block where the cache is larger than memory.
"""

from __future__ import annotations

import numpy as np

from dlrm.data.hashing import bits_for, feistel, mix_python, permute_range
from embcache.kernels.jit import U64, kernel

BLOCK, WINDOW = 2048, 64
SHUFFLES = ("none", "rows", "blocks")


def epoch_order(shuffle: str, seed: int, epoch: int, rows: int, start: int, stop: int) -> np.ndarray:
    """int64 places ``[stop - start]`` in ``range(rows)`` that positions ``start..stop`` of an epoch visit."""
    out = np.empty(stop - start, np.int64)
    if shuffle == "none":
        out[:] = np.arange(start, stop)
    elif shuffle == "rows":
        permute_range(start, out, rows, np.uint64(mix_python(seed, epoch)))
    elif shuffle == "blocks":
        _permute_blocks(start, out, rows, np.uint64(mix_python(seed, epoch)), np.uint64(mix_python(seed, epoch, 1)))
    else:
        raise ValueError(f"shuffle: expected one of {', '.join(SHUFFLES)}, found {shuffle!r}")
    return out


@kernel
def _permute_blocks(start: int, out: np.ndarray, rows: int, block_key: U64, row_key: U64) -> None:
    # Only whole blocks move; the rows left over join the last window.
    blocks = rows // BLOCK
    windows = max(1, (blocks + WINDOW - 1) // WINDOW)
    block_bits = bits_for(max(blocks, 1))
    for i in range(out.shape[0]):
        window = min((start + i) // (BLOCK * WINDOW), windows - 1)
        first = window * BLOCK * WINDOW
        size = (rows if window == windows - 1 else first + BLOCK * WINDOW) - first
        place = feistel(np.uint64(start + i - first), np.uint64(size), bits_for(size), row_key + np.uint64(window))
        block = window * WINDOW + np.int64(place) // BLOCK
        if block < blocks:
            moved = np.int64(feistel(np.uint64(block), np.uint64(blocks), block_bits, block_key))
            out[i] = moved * BLOCK + np.int64(place) % BLOCK
        else:
            out[i] = first + np.int64(place)
