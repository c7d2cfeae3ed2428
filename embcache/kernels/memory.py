"""Memory for arenas: anonymous maps with huge pages asked for, since random rows of a large table otherwise miss the
TLB at every access. Pages are zero and cost nothing until touched."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20


def huge_empty(nbytes: int) -> Tensor:
    """uint8 [nbytes], zeroed, at a huge-page boundary where it spans at least one huge page."""
    if nbytes < HUGE_PAGE:
        return torch.zeros(nbytes, dtype=torch.uint8)
    area = mmap.mmap(-1, nbytes + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)  # holds a reference to the map
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + nbytes]


def available_bytes() -> int | None:
    """Memory the system could still give, or None where it does not say."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
