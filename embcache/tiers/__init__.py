"""Where rows live."""

from .lmdb import Lmdb
from .ram import Ram

__all__ = ["Lmdb", "Ram"]
