"""The front of tables that have no place yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..config import TableConfig
from ..errors import NotSupported
from ..tiers.base import Arena


class UnplacedFront:
    """Refuses whatever would need rows."""

    durable = None
    below: tuple[Any, ...] = ()

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        self._names = [table.name for table in tables]
        self.arenas = [Arena(torch.empty(0, table.row_bytes, dtype=torch.uint8)) for table in tables]

    def settle(self) -> None:
        """Nothing is being saved."""

    def close(self) -> None:
        """Nothing is held."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSupported(f"the tables {self._names} have no place yet (tiers.Unplaced): call ec.shard(model) first")
