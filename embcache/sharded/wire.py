"""Wire formats: how rows and ids look while they travel.

| wire | bytes a row | what arrives |
|---|---|---|
| fp32 | 4 D | the same bits |
| fp16, bf16 | 2 D | the nearest value (ties to even); too large becomes an infinity; NaN and infinities pass |
| int8 | D + 8 | ``minimum + scale * q``, q in 0..255, scale = (maximum - minimum) / 255 |

int8 is at most half a scale (and fp32 rounding) from the value. A row of equal values arrives exactly. A row that holds
a NaN or an infinity arrives as NaN in every column, so that what looks for them finds them.

The bits are a function of the values alone on every machine. Ids travel in 4 bytes where the table's declared rows fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embcache.errors import BadConfig
from embcache.kernels import codecs

__all__ = ["WIRES", "Wire", "decode_ids", "encode_ids", "id_bytes"]

WIRES = ("fp32", "fp16", "bf16", "int8")
_FLOAT32 = (np.dtype(np.float32), torch.float32)
Rows = tuple[Any, Any]  # fp32 [m, D], and int32 or int64 [n]: which rows of it (None: all)


class Wire:
    """A format by name.

    >>> wire = Wire("int8")
    >>> rows, back = np.float32([[0, 127.5, 255], [3, 3, 3]]), np.zeros((2, 3), np.float32)
    >>> data = np.zeros(2 * wire.row_bytes(3), np.uint8)
    >>> wire.encode(rows, data), wire.decode(data, back), back.tolist()
    (22, 22, [[0.0, 128.0, 255.0], [3.0, 3.0, 3.0]])
    """

    def __init__(self, name: str) -> None:
        if name not in WIRES:
            raise BadConfig(f"wire = {name!r}, must be one of {', '.join(WIRES)}")
        self.name = name
        self._encode = getattr(codecs, f"encode_{name}")
        self._decode = getattr(codecs, f"decode_{name}")

    def __repr__(self) -> str:
        return f"Wire({self.name!r})"

    @property
    def exact(self) -> bool:
        """Whether rows arrive with the same bits."""
        return self.name == "fp32"

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of ``dim`` values on the wire."""
        return {"fp32": 4 * dim, "fp16": 2 * dim, "bf16": 2 * dim, "int8": dim + 8}[self.name]

    def encode(self, rows: Any, data: Any, index: Any = None) -> int:
        """Write rows fp32 [m, D] (those at ``index``, or all) to the front of ``data`` uint8; bytes written."""
        return self.encode_many([(rows, index)], data)

    def decode(self, data: Any, rows: Any, index: Any = None) -> int:
        """Read rows from the front of ``data`` into ``rows`` (at ``index``); bytes read."""
        return self.decode_many(data, [(rows, index)])

    def encode_many(self, parts: Sequence[Rows], data: Any) -> int:
        """Blocks of rows one after another, in one call; bytes written."""
        lines, total, _keep = self._lines(parts, data)
        self._encode(lines)
        return total

    def decode_many(self, data: Any, parts: Sequence[Rows]) -> int:
        """Blocks that lie one after another into their rows; bytes read."""
        lines, total, _keep = self._lines(parts, data)
        self._decode(lines)
        return total

    def encode_lines(self, lines: np.ndarray) -> None:
        """Blocks described as int64 [n, codecs.FIELDS] of addresses, for callers that compute them; nothing is checked.

        With a 2-byte wire each block's bytes begin at an even address.
        """
        self._encode(lines)

    def decode_lines(self, lines: np.ndarray) -> None:
        """The same for what came."""
        self._decode(lines)

    def _lines(self, parts: Sequence[Rows], data: Any) -> tuple[np.ndarray, int, list[Any]]:
        address, room = _memory(data, "data")
        lines: list[tuple[int, ...]] = []
        total, keep = 0, []
        for rows, index in parts:
            if rows.ndim != 2 or rows.dtype not in _FLOAT32:
                raise ValueError(f"rows must be float32 [n, D], not {rows.dtype} {list(rows.shape)}")
            where, wide, count = 0, 0, rows.shape[0]
            if index is not None:
                index = np.ascontiguousarray(index)
                if index.dtype not in (np.int32, np.int64):
                    raise ValueError(f"an index must be int32 or int64, not {index.dtype}")
                if len(index) and not 0 <= int(index.min()) <= int(index.max()) < count:
                    raise IndexError(f"an index lies outside the {count} rows")
                where, wide, count = _address(index), index.dtype == np.int64, len(index)
                where = where if count else 0
                keep.append(index)
            lines.append((_memory(rows, "rows")[0], where, wide, count, rows.shape[1], address + total))
            total += count * self.row_bytes(rows.shape[1])
        if total > room:
            raise ValueError(f"data holds {room} bytes, the rows take {total}")
        if self.name in ("fp16", "bf16") and address % 2:
            raise ValueError("data begins at an odd address")
        return np.array(lines, np.int64).reshape(-1, codecs.FIELDS), total, keep


def id_bytes(num_embeddings: int | None) -> int:
    """Bytes of an id on the wire.

    >>> id_bytes(2**32), id_bytes(2**32 + 1), id_bytes(None)
    (4, 8, 8)
    """
    return 4 if num_embeddings is not None and num_embeddings <= 2**32 else 8


def encode_ids(ids: np.ndarray, data: np.ndarray, width: int) -> int:
    """Write int64 ids to the front of ``data`` uint8 in ``width`` bytes each; bytes written."""
    codecs.encode_ids(ids, _ids_in(data, len(ids), width))
    return len(ids) * width


def decode_ids(data: np.ndarray, ids: np.ndarray, width: int) -> int:
    """Read ``len(ids)`` ids from the front of ``data``; bytes read."""
    codecs.decode_ids(_ids_in(data, len(ids), width), ids)
    return len(ids) * width


def _ids_in(data: np.ndarray, count: int, width: int) -> np.ndarray:
    if len(data) < count * width:
        raise ValueError(f"data holds {len(data)} bytes, {count} ids take {count * width}")
    return data[: count * width].view(np.uint32 if width == 4 else np.int64)


def _memory(data: Any, what: str) -> tuple[int, int]:
    """(address, bytes) of a contiguous array or CPU tensor."""
    if isinstance(data, Tensor):
        if not data.is_contiguous() or data.device.type != "cpu":
            raise ValueError(f"{what} must be contiguous and on the CPU")
        return data.data_ptr(), data.numel() * data.element_size()
    if not data.flags.c_contiguous:
        raise ValueError(f"{what} must be contiguous")
    return _address(data), data.nbytes


def _address(array: np.ndarray) -> int:
    # ctypes.data builds an object of its own: ten times slower
    return torch.from_numpy(array).data_ptr() if array.flags.writeable else int(array.ctypes.data)
