"""Memory for arenas of rows: aligned, lazily committed, on huge pages where the system offers them, since random rows
of a large table otherwise miss the address translation cache at every access."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
# older Pythons do not name the flag, whose number is part of Linux's interface on x86-64 and aarch64
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def huge_empty(nbytes: int) -> Tensor:
    """uint8 [nbytes], zeroed; pages cost nothing until they are touched.

    From 2 MiB on it begins at a huge-page boundary and is marked for transparent huge pages. The memory is private to
    the process (a fork gets a copy) and is freed with the last tensor that views it. OSError where the system refuses.

    >>> block = huge_empty(3 << 20)
    >>> block.numel() == 3 << 20, block.data_ptr() % HUGE_PAGE == 0, int(block[-1])
    (True, True, 0)
    """
    if nbytes < 0:
        raise ValueError(f"huge_empty: nbytes = {nbytes}, must be >= 0")
    if nbytes < HUGE_PAGE:
        return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))  # torch.zeros would wake all threads and touch it
    # private: a shared map is shmem, which gets no huge pages in most systems; no reserve: a table may be mostly unused
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_ANONYMOUS", 0) | NO_RESERVE
    area = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=flags)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8, count=nbytes, offset=start)  # holds a reference to the map


def reserve(nbytes: int, huge: int = 0) -> Tensor:
    """uint8 [nbytes], zeroed: address space whose pages are committed when they are first written, on ordinary pages
    but for the first ``huge`` bytes. OSError where the system refuses so much.

    >>> reserve(1 << 40)[-1:]
    tensor([0], dtype=torch.uint8)
    """
    if nbytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_ANONYMOUS", 0) | NO_RESERVE
    try:
        area = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=flags)
    except (OverflowError, ValueError) as error:
        raise OSError(f"cannot reserve {nbytes} bytes: {error}") from error
    start = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            first = -(-(start + huge) // mmap.PAGESIZE) * mmap.PAGESIZE if huge else 0
            area.madvise(mmap.MADV_NOHUGEPAGE, first, len(area) - first)
            if huge:
                area.madvise(mmap.MADV_HUGEPAGE, 0, first)
    return torch.frombuffer(area, dtype=torch.uint8, count=nbytes, offset=start)


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


def address_space() -> int:
    """Bytes of address space that the process may still reserve: what its limit (``ulimit -v``) leaves, or 2^46."""
    most = 1 << 46
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return most
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    except (ImportError, OSError):
        return most
    return max(0, min(most, limit - used))


def huge_pages() -> str:
    """The system's setting of transparent huge pages: "always", "madvise", "never", or "unknown"."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.index("[") + 1 : text.index("]")] if "[" in text else "unknown"
