"""Where ranks meet: a header with a flag, then one exchange; errors are agreed before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BadConfig
from .agree import settle

__all__ = ["HEAD", "agreed", "is_agreed", "meet"]

FLAG, SIGNATURE, HEAD = range(3)
Exchange = Callable[[np.ndarray], tuple[Any, np.ndarray, np.ndarray]]


def meet(
    lane: Any,
    signature: int,
    error: Exception | None = None,
    exchange: Exchange | None = None,
    rows: np.ndarray | None = None,
) -> tuple[np.ndarray, Tensor]:
    """Collective. (what each rank's header says to this one, the bytes that came).

    ``rows`` int64 [W, n] is what the header says to each rank. ``exchange`` is told what came and gives the bytes to
    send, how many for each rank and how many will come from each. With an ``error`` on any rank nothing is exchanged:
    that rank raises it, the others RemoteFault. ``signature`` must be the same on all ranks: BadConfig on all
    otherwise, since they are at different points of their programs.
    """
    heads = np.zeros((lane.world, HEAD), dtype=np.int64)
    heads[:, FLAG], heads[:, SIGNATURE] = error is not None, signature
    heads = heads if rows is None else np.column_stack([heads, rows])

    def together() -> tuple[np.ndarray, Tensor | None]:
        found = lane.header(heads)
        settle(lane, bool(found[:, FLAG].any()), error)
        if (found[:, SIGNATURE] != signature).any():
            return found, None
        if exchange is None:
            return found, torch.empty(0, dtype=torch.uint8)
        send, splits, sizes = exchange(found)
        return found, lane.all_to_all((send, splits), sizes)

    try:
        found, answer = lane.submit(together).result()
    except Exception as problem:
        raise agreed(problem) from None
    if answer is None:
        raise agreed(
            BadConfig(
                f"the ranks are not at the same point on lane {lane.name!r}: every rank stages, looks up and updates "
                "the same features in the same order, a rank without samples with an empty batch"
            )
        )
    return found[:, HEAD:], answer


def agreed(error: Exception) -> Exception:
    """Mark an error that every rank raises."""
    error.agreed = True  # type: ignore[attr-defined]
    return error


def is_agreed(error: BaseException) -> bool:
    """Whether every rank raises it, so that nobody has to be told."""
    return getattr(error, "agreed", False)
