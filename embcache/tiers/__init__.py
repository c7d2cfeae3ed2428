"""Where rows live."""

from .lmdb import Lmdb
from .ram import Ram
from .unplaced import Unplaced

__all__ = ["Lmdb", "Ram", "Unplaced"]
