"""Initial rows as a pure function ``f(seed, table, id, column)`` of integers: the same bits on every device,
instruction set, tier and cache size, so that a row which was never written needs no storage.

Random bits come from Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) with
counter ``(id_lo, id_hi, column // 4, stream)`` and the table's 64-bit key. Values come from integer arithmetic and one
float multiply; the normal distribution from an integer inverse-CDF table, so that no math library is involved.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from .errors import BadConfig

CONSTANT, UNIFORM, NORMAL, TRUNCATED = 0, 1, 2, 3
NORMAL_KNOTS = 1602
NORMAL_CHECKSUM = "9e20cd025bc00d1a"
TRUNCATED_LOW = 97_711_073  # round(Phi(-2) * 2**32)
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Initializer:
    """How new rows of a table begin. ``code(rows, dim)`` gives the kernel's (code, p0, p1)."""

    def code(self, rows: int | None, dim: int) -> tuple[int, float, float]:
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Initializer):
    """Every weight is ``value``."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _finite(self, value=self.value)

    def code(self, rows: int | None, dim: int) -> tuple[int, float, float]:
        return CONSTANT, float(self.value), 0.0


@dataclass(frozen=True)
class Zeros(Initializer):
    """Every weight is 0."""

    def code(self, rows: int | None, dim: int) -> tuple[int, float, float]:
        return CONSTANT, 0.0, 0.0


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform on ``[center - scale, center + scale)``; ``scale=None`` is ``sqrt(1 / num_embeddings)``, the choice of
    DLRM (Naumov et al., 2019), and 0.01 for a table without a bound.

    >>> rows(Uniform(0.5), seed=0, table="user", ids=torch.tensor([0, 7]), dim=2).shape
    torch.Size([2, 2])
    """

    scale: float | None = None
    center: float = 0.0

    def __post_init__(self) -> None:
        _finite(self, center=self.center)
        if self.scale is not None:
            _finite(self, scale=self.scale)
            if self.scale < 0:
                raise BadConfig(f"init.Uniform: scale = {self.scale}, must be >= 0")

    def code(self, rows: int | None, dim: int) -> tuple[int, float, float]:
        scale = self.scale if self.scale is not None else (math.sqrt(1.0 / rows) if rows else 0.01)
        return UNIFORM, float(scale), float(self.center)


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal with standard deviation ``std`` around ``mean``; tails reach 6.3 standard deviations."""

    std: float = 1.0
    mean: float = 0.0

    def __post_init__(self) -> None:
        _finite(self, std=self.std, mean=self.mean)
        if self.std < 0:
            raise BadConfig(f"init.{type(self).__name__}: std = {self.std}, must be >= 0")

    def code(self, rows: int | None, dim: int) -> tuple[int, float, float]:
        return NORMAL, float(self.std), float(self.mean)


@dataclass(frozen=True)
class TruncatedNormal(Normal):
    """Normal of parameter ``std`` around ``mean``, restricted to within two ``std`` of the mean."""

    def code(self, rows: int | None, dim: int) -> tuple[int, float, float]:
        return TRUNCATED, float(self.std), float(self.mean)


@dataclass(frozen=True)
class XavierUniform(Initializer):
    """Uniform on ``±gain * sqrt(6 / (num_embeddings + embedding_dim))`` (Glorot & Bengio, 2010), for bounded tables."""

    gain: float = 1.0

    def __post_init__(self) -> None:
        _finite(self, gain=self.gain)
        if self.gain < 0:
            raise BadConfig(f"init.XavierUniform: gain = {self.gain}, must be >= 0")

    def code(self, rows: int | None, dim: int) -> tuple[int, float, float]:
        if rows is None:
            raise BadConfig("init.XavierUniform needs num_embeddings; use init.Uniform(scale) for an unbounded table")
        return UNIFORM, self.gain * math.sqrt(6.0 / (rows + dim)), 0.0


def _finite(owner: object, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadConfig(f"init.{type(owner).__name__}: {name} = {value!r}, must be a finite number")


def table_key(seed: int, table: str, purpose: str = "") -> int:
    """The 64-bit Philox key of a table, as a signed integer (the form a tensor or an op takes).

    >>> table_key(0, "user") == table_key(0, "user"), table_key(0, "user") == table_key(1, "user")
    (True, False)
    """
    text = f"{seed}:{table}:{purpose}" if purpose else f"{seed}:{table}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@functools.cache
def normal_table() -> Tensor:
    """int32 [1602]: knots of the inverse normal CDF in units of 2^-28 sigma; read-only by convention.

    Segment ``64 s + k`` begins at ``w = (64 + k) << s`` where ``w - 64`` is a 31-bit uniform; so precision grows
    octave by octave towards the tail.
    """
    inverse = NormalDist().inv_cdf
    knots = [-inverse((((64 + i % 64) << (i // 64)) - 64 + 0.5) / 2.0**32) for i in range(NORMAL_KNOTS)]
    table = torch.tensor([round(z * 2.0**28) for z in knots], dtype=torch.int32)
    if normal_checksum(table) != NORMAL_CHECKSUM:
        raise RuntimeError("the inverse normal table differs on this machine: its math library rounds unusually")
    return table


def normal_checksum(table: Tensor) -> str:
    """16 hex digits over the table's little-endian bytes."""
    return hashlib.blake2b(table.numpy().astype("<i4").tobytes(), digest_size=8).hexdigest()


def _mulhilo(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    # int64 cannot hold a 64-bit product unsigned: multiply by 16-bit halves of the constant
    low = a * (constant & 0xFFFF)
    high = a * (constant >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (total >> 32)) & _MASK32, total & _MASK32


def philox(key: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of four counter words (int64 tensors holding uint32, broadcast together) under a 64-bit key."""
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    for _ in range(10):
        hi0, lo0 = _mulhilo(c0, 0xD2511F53)
        hi1, lo1 = _mulhilo(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def random_words(key: int, ids: Tensor, dim: int, stream: int = 0, first: int = 0) -> Tensor:
    """int64 [n, dim] holding uint32: the random word of (id, column) in a stream, of columns ``first`` and on."""
    ids = ids.to(torch.int64).reshape(-1, 1)
    blocks = torch.arange(first // 4, (first + dim + 3) // 4, dtype=torch.int64).reshape(1, -1)
    words = philox(key, ids & _MASK32, (ids >> 32) & _MASK32, blocks, torch.tensor(stream & _MASK32))
    return torch.stack(words, dim=2).reshape(ids.shape[0], -1)[:, first % 4 : first % 4 + dim]


def normal_fixed(x: Tensor, truncated: bool, table: Tensor | None = None) -> Tensor:
    """int64: standard normal in units of 2^-28, from int64 holding uint32; linear interpolation in integers between
    the entries of ``table`` (``normal_table()``)."""
    table = (normal_table() if table is None else table).to(torch.int64)
    u = x & 0x7FFFFFFF
    if truncated:
        u = TRUNCATED_LOW + (u * (0x80000000 - TRUNCATED_LOW) >> 31)
    w = u + 64
    s = torch.frexp(w.to(torch.float64)).exponent.to(torch.int64) - 7
    i = s * 64 + (w >> s) - 64
    low = table[i]
    z = low + ((table[i + 1] - low) * (w - ((w >> s) << s)) >> s)
    return torch.where(x >> 31 != 0, -z, z)


def values(
    code: int, p0: float, p1: float, key: int, ids: Tensor, dim: int, table: Tensor | None = None, first: int = 0
) -> Tensor:
    """fp32 [n, dim]: initial weights of ``ids``, columns ``first`` and on; the plain-torch twin of the kernel, equal in
    every bit."""
    if code == CONSTANT:
        return torch.full((ids.numel(), dim), p0, dtype=torch.float32)
    x = random_words(key, ids, dim, first=first)
    one = functools.partial(torch.tensor, dtype=torch.float32)
    if code == UNIFORM:
        step = one(p0) / one(2.0**23)
        out = ((x >> 8) - 2**23).to(torch.float32) * step
    elif code in (NORMAL, TRUNCATED):
        out = normal_fixed(x, code == TRUNCATED, table).to(torch.int32).to(torch.float32) * one(2.0**-28) * one(p0)
    else:
        raise BadConfig(f"init code {code} is unknown")
    return out + one(p1) if p1 != 0 else out


def rows(init: Initializer, seed: int, table: str, ids: Tensor, dim: int, num_embeddings: int | None = None) -> Tensor:
    """fp32 [n, dim]: the initial rows of ``ids``, without any table.

    >>> rows(Constant(0.25), 0, "t", torch.tensor([9]), 3)
    tensor([[0.2500, 0.2500, 0.2500]])
    """
    code, p0, p1 = init.code(num_embeddings, dim)
    return values(code, p0, p1, table_key(seed, table), ids, dim)
