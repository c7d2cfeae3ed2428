"""State as files that cannot run code: nested values as JSON, tensors as safetensors, fsynced.

``pack`` and ``unpack`` carry what ``state_dict``s are made of: dictionaries with any plain keys, lists, tuples, numbers
(bit for bit, infinities and NaN too), strings, None, and tensors of any dtype that safetensors holds.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from embcache.errors import CorruptStore, StorageFull

__all__ = [
    "FileEntry",
    "named_when_full",
    "pack",
    "read_checked",
    "read_tensors",
    "replace_file",
    "sync_folder",
    "unpack",
    "write_file",
    "write_tensors",
]

FileEntry = dict[str, Any]  # {"file": relative name, "bytes": size, "crc32": checksum}


def pack(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split nested state into a JSON value and the tensors it refers to by number.

    >>> plain, tensors = pack({"lr": 0.1, 0: torch.ones(2)})
    >>> plain
    {'$map': [['lr', 0.1], [0, {'$tensor': '0'}]]}
    """
    tensors: dict[str, Tensor] = {}
    return _pack(state, tensors), tensors


def unpack(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """The state that ``pack`` split."""
    if isinstance(plain, list):
        return [unpack(v, tensors) for v in plain]
    if not isinstance(plain, dict):
        return plain
    if "$tensor" in plain:
        return tensors[plain["$tensor"]]
    if "$float" in plain:
        return float(plain["$float"])
    if "$tuple" in plain:
        return tuple(unpack(v, tensors) for v in plain["$tuple"])
    if "$map" in plain:
        return {k: unpack(v, tensors) for k, v in plain["$map"]}
    return {k: unpack(v, tensors) for k, v in plain.items()}


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # A copy where memory is shared or strided: safetensors wants each tensor whole and alone.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"$tensor": name}
    if isinstance(value, dict):
        items = [[key, _pack(v, tensors)] for key, v in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        if not all(isinstance(key, str | int) for key, _ in items):
            raise TypeError(f"state with keys {sorted(map(repr, value))} cannot be saved: strings and integers can")
        return {"$map": items}
    if isinstance(value, tuple):
        return {"$tuple": [_pack(v, tensors) for v in value]}
    if isinstance(value, list):
        return [_pack(v, tensors) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"state of type {type(value).__name__} cannot be saved: only plain values and tensors can")


def write_file(folder: Path, name: str, data: bytes) -> FileEntry:
    """Write and fsync a new file; a full disk raises StorageFull naming what was needed and what there is."""
    path = folder / name
    with named_when_full(path, len(data)), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"file": name, "bytes": len(data), "crc32": zlib.crc32(data)}


@contextmanager
def named_when_full(path: Path, need: int | None = None) -> Iterator[None]:
    """A full disk (or quota, or file size limit) while ``path`` is written raises StorageFull; other errors stay."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        there = next(p for p in (path, *path.absolute().parents) if p.is_dir())
        raise StorageFull(need, shutil.disk_usage(there).free, str(path)) from error


def write_tensors(folder: Path, name: str, tensors: dict[str, Tensor]) -> FileEntry:
    """Write tensors as one safetensors file."""
    return write_file(folder, name, save(tensors))


def read_checked(folder: Path, entry: FileEntry) -> bytes:
    """The bytes of a file; CorruptStore unless they are the ones written."""
    path = folder / str(entry["file"])
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CorruptStore(f"{path} is missing") from None
    if len(data) != entry["bytes"] or zlib.crc32(data) != entry["crc32"]:
        raise CorruptStore(f"{path}: expected {entry['bytes']} bytes with checksum {entry['crc32']}, found {len(data)}")
    return data


def read_tensors(folder: Path, entry: FileEntry) -> dict[str, Tensor]:
    """The tensors of a file written by ``write_tensors``."""
    data = read_checked(folder, entry)
    try:
        return load(data)
    except SafetensorError as error:
        raise CorruptStore(f"{folder / str(entry['file'])} is not a safetensors file: {error}") from error


def to_bytes(state: Any) -> bytes:
    """Nested state as bytes that ``from_bytes`` reads."""
    plain, tensors = pack(state)
    return save(tensors, {"state": json.dumps(plain, allow_nan=False)})


def from_bytes(data: bytes) -> Any:
    """The state that ``to_bytes`` was given."""
    length = int.from_bytes(data[:8], "little")
    plain = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["state"])
    return unpack(plain, load(data))


def write_json(folder: Path, name: str, value: Any) -> FileEntry:
    """Write a JSON file and fsync it."""
    return write_file(folder, name, json.dumps(value, indent=1, allow_nan=False).encode())


def replace_json(folder: Path, name: str, value: Any) -> None:
    """Replace a JSON file in one step that survives a crash."""
    replace_file(folder, name, json.dumps(value, indent=1, allow_nan=False).encode())


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Replace a file in one step that survives a crash: write aside, fsync, rename, fsync the folder."""
    write_file(folder, name + ".tmp", data)
    os.replace(folder / (name + ".tmp"), folder / name)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """fsync a directory, so that names made or removed in it are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def equal_states(a: Any, b: Any) -> bool:
    """Whether two nested states hold the same values, tensors bit for bit (NaN equals NaN)."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        same = isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return same and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_states(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(equal_states(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
