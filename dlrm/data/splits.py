"""Which rows train, which validate, which test.

========================  ================================================================================
``last:V,T``              the last T of the rows test, the V before them validate (fractions, file order)
``random:V,T,SEED``       by a hash of (row number, seed): a row's split never depends on the others
``time:V,T``              the last T days test, the V days before validate (needs a time column)
``files``                 the input files are given per split
========================  ================================================================================

Row numbers count good rows, in input order. Fractions and days may be 0, and a trailing ``,T`` alone may be given:
``last:0.2`` means no validation rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlrm.data.hashing import GOLDEN, mix64, mix_python
from embcache.kernels.jit import U64, kernel

NAMES = ("train", "valid", "test")
TRAIN, VALID, TEST = range(3)
DAY = 86_400


@dataclass(frozen=True)
class SplitSpec:
    """``kind`` is last, random, time or files; ``valid`` and ``test`` are fractions of rows, or days for time."""

    kind: str = "last"
    valid: float = 0.0
    test: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("last", "random", "time", "files"):
            raise ValueError(f"split {self.kind!r}: expected last, random, time or files")
        if self.valid < 0 or self.test < 0 or (self.kind in ("last", "random") and self.valid + self.test > 1):
            raise ValueError(f"split {self.kind}: valid {self.valid} and test {self.test} must be >= 0, in sum <= 1")
        if self.kind == "time" and (self.valid % 1 or self.test % 1):
            raise ValueError("split time: whole days expected")

    @classmethod
    def parse(cls, text: str) -> SplitSpec:
        """From the notation above.

        >>> SplitSpec.parse("random:0.1,0.2,7")
        SplitSpec(kind='random', valid=0.1, test=0.2, seed=7)
        >>> SplitSpec.parse("time:1")
        SplitSpec(kind='time', valid=0.0, test=1.0, seed=0)
        """
        kind, _, rest = text.partition(":")
        try:
            numbers = [float(x) for x in rest.split(",")] if rest else []
        except ValueError:
            raise ValueError(f"split {text!r}: numbers expected after the colon") from None
        if len(numbers) > (3 if kind == "random" else 0 if kind == "files" else 2):
            raise ValueError(f"split {text!r}: too many numbers")
        if kind == "files" or not numbers:
            return cls(kind, 0.0, {"time": 1.0, "files": 0.0}.get(kind, 0.1))
        valid, test = (0.0, numbers[0]) if len(numbers) == 1 else numbers[:2]
        return cls(kind, valid, test, int(numbers[2]) if len(numbers) == 3 else 0)


def last_ranges(rows: int, valid: float, test: float) -> dict[str, range]:
    """Contiguous train, valid and test rows.

    >>> last_ranges(10, 0.1, 0.2)
    {'train': range(0, 7), 'valid': range(7, 8), 'test': range(8, 10)}
    """
    n_test = int(rows * test)
    n_valid = min(int(rows * valid), rows - n_test)
    n_train = rows - n_test - n_valid
    return {"train": range(n_train), "valid": range(n_train, n_train + n_valid), "test": range(rows - n_test, rows)}


def random_splits(first_row: int, rows: int, spec: SplitSpec) -> np.ndarray:
    """uint8 ``[rows]``: 0 train, 1 valid, 2 test, for row numbers from ``first_row``."""
    out = np.empty(rows, np.uint8)
    test, valid = int(spec.test * 2**53), int(spec.valid * 2**53)
    _random_splits(first_row, out, np.uint64(mix_python(spec.seed)), test, test + valid)
    return out


def time_splits(times: np.ndarray, last_day: int, spec: SplitSpec) -> np.ndarray:
    """uint8 ``[rows]`` for times in seconds; ``last_day`` = largest time // 86400."""
    age = last_day - times // DAY
    out = np.zeros(times.shape[0], np.uint8)
    out[age < spec.test + spec.valid] = VALID
    out[age < spec.test] = TEST
    return out


@kernel
def _random_splits(first_row: int, out: np.ndarray, key: U64, below_test: int, below_valid: int) -> None:
    for i in range(out.shape[0]):
        u = np.int64(mix64(mix64(np.uint64(first_row + i) * GOLDEN + key)) >> np.uint64(11))
        out[i] = 2 if u < below_test else 1 if u < below_valid else 0
