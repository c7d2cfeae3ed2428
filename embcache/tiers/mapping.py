"""Read-only views of growing files, by address: a map may reach past the end of its file, which then grows into it."""

from __future__ import annotations

import ctypes
import mmap
import os

__all__ = ["Mapping"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
PAGE = mmap.PAGESIZE


class Mapping:
    """``length`` bytes of a file from its beginning, readable at ``address`` as long as this object lives.

    Bytes past the end of the file must not be touched (SIGBUS). OSError where the system refuses the address space.
    ``random``: no reading ahead.
    """

    def __init__(self, descriptor: int, length: int, random: bool = False) -> None:
        self.length = -(-length // PAGE) * PAGE
        self.address = 0
        address = _libc.mmap(None, self.length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address is None or address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: mapping {self.length} bytes")
        self.address = int(address)
        if random:
            _libc.madvise(self.address, self.length, mmap.MADV_RANDOM)

    def shrink(self, length: int) -> None:
        """Give back the address space past ``length``."""
        keep = max(PAGE, -(-length // PAGE) * PAGE)
        if keep < self.length:
            _libc.munmap(self.address + keep, self.length - keep)
            self.length = keep

    def __del__(self) -> None:
        if self.address:
            _libc.munmap(self.address, self.length)
            self.address = 0
