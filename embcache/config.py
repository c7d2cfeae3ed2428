"""What a table is: plain data, checked when it is written down.

>>> TableConfig("user", num_embeddings=1000, embedding_dim=8, features=["user", "friend"]).feature_names
('user', 'friend')
>>> TableConfig("user", num_embeddings=1000, embedding_dim=0)
Traceback (most recent call last):
...
embcache.errors.BadConfig: table 'user': embedding_dim = 0, must be an integer >= 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from .errors import BadConfig
from .init import Initializer, Uniform
from .optim import ROUNDING_FLAG, SGD, Rule

POOLING = {"sum": 0, "mean": 1, "none": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
OUT_OF_RANGE = ("raise", "drop", "map")
MAX_ID = 2**63 - 1
_OPTIONS = ("admission", "expiry", "columns")


def _whole(owner: str, what: str, value: object, least: int, most: int = 2**31 - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadConfig(f"{owner}: {what} = {value!r}, must be an integer in [{least}, {most}]")


@dataclass(frozen=True)
class Admission:
    """Which ids may have a row: those trained on ``min_count`` times, counted over occurrences in steps.

    Until then an id reads as its initial value and its gradient is dropped; the step in which the count is reached is
    its first. Counts live in a counting Bloom filter (Fan et al., "Summary Cache", 2000): ``cells`` counters, four per
    id, none above ``min_count``, tell about ``cells / 8`` ids apart; beyond, ids that share their counters
    with others come in early. A row that exists is never asked again; an id whose row was deleted or has expired is
    known already. What is admitted is a function of the batches alone, not of their order within a step.
    """

    min_count: int
    cells: int = 1 << 22

    def __post_init__(self) -> None:
        _whole("Admission", "min_count", self.min_count, 1)
        _whole("Admission", "cells", self.cells, 1, 2**40)


@dataclass(frozen=True)
class Expiry:
    """Which rows are forgotten, so that they read as their initial value again.

    After every ``every``-th step of the table a sweep at step s takes the rows whose last update is more than ``idle``
    steps ago (s - last > idle) and that were updated in fewer than ``below`` steps; a condition that is None is not
    asked. Step and count are stored with the row, 8 bytes; a row that is loaded without them counts as updated in that
    step, and often enough for ``below``.
    """

    idle: int | None = None
    below: int | None = None
    every: int = 1000

    def __post_init__(self) -> None:
        if self.idle is None and self.below is None:
            raise BadConfig("Expiry: idle and below are both None, at least one must be given")
        if self.idle is not None:
            _whole("Expiry", "idle", self.idle, 0)
        if self.below is not None:
            _whole("Expiry", "below", self.below, 1)
        _whole("Expiry", "every", self.every, 1)


@dataclass(frozen=True)
class Columns:
    """That a table is some columns of a wider one: from column ``first`` on, of rows that have ``of`` columns, of the
    table named ``table``.

    Its initial rows and its rounding are those of the wider table's columns, bit for bit.
    """

    first: int
    of: int
    table: str

    def __post_init__(self) -> None:
        _whole("Columns", "first", self.first, 0)
        _whole("Columns", "of", self.of, 1)
        if not isinstance(self.table, str) or not self.table:
            raise BadConfig(f"Columns: table = {self.table!r}, must be a non-empty string")


@dataclass(frozen=True)
class TableConfig:
    """One embedding table and the features that read it.

    Args:
        name: unique in its store; part of the key of its random initial rows.
        num_embeddings: rows; ids are in ``[0, num_embeddings)``. None: any int64 is an id.
        embedding_dim: columns, any number from 1.
        features: names of the model inputs that read this table; empty means one feature with the table's name.
        pooling: how a bag becomes one vector: "sum", "mean", or "none" for one vector per id.
        optimizer: the update rule of its rows.
        init: the initial value of a row, a pure function of (seed, name, id, column).
        seed: of initial values and of stochastic rounding.
        dtype: of stored weights: float32, bfloat16 or float16 (the last two without a master copy, rounded
            stochastically in updates). Optimizer state is float32.
        out_of_range: an id outside the range raises ("raise"), counts as absent from its bag ("drop"), or reads and
            trains ``reserved_row`` ("map"). The last two are counted in ``store.stats()``.
        reserved_row: the row of out_of_range="map".
        padding_idx: this id contributes nothing to a pooled bag and is never updated; its row starts at 0.
        max_norm: rows longer than this are scaled back to it, as ``torch.nn.Embedding`` does: the lookup returns
            renormalised rows, the table is written in the optimizer's step only.
        norm_type: the p of that norm.
        scale_grad_by_freq: divide an id's gradient by its number of occurrences in the batch.
        admission: which ids may have a row of their own; None: all.
        expiry: which rows are forgotten; None: none.
        columns: which columns of a wider table these are (see ``part``); None: whole rows.
    """

    name: str
    num_embeddings: int | None
    embedding_dim: int
    features: Sequence[str] = ()
    pooling: str = "sum"
    optimizer: Rule = field(default_factory=SGD)
    init: Initializer = field(default_factory=Uniform)
    seed: int = 0
    dtype: torch.dtype = torch.float32
    out_of_range: str = "raise"
    reserved_row: int = 0
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    admission: Admission | None = None
    expiry: Expiry | None = None
    columns: Columns | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise BadConfig(f"table name = {self.name!r}, must be a non-empty string")
        self._check_shape()
        self._check_features()
        if self.pooling not in POOLING:
            self._refuse("pooling", self.pooling, f"must be one of {sorted(POOLING)}")
        if not isinstance(self.optimizer, Rule) or self.optimizer.code < 0:
            self._refuse("optimizer", self.optimizer, "must be a rule such as ec.optim.RowWiseAdagrad(lr=0.02)")
        if not isinstance(self.init, Initializer):
            self._refuse("init", self.init, "must be an initialiser such as ec.init.Uniform(0.01)")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            self._refuse("seed", self.seed, "must be an integer")
        if self.dtype not in DTYPES:
            self._refuse("dtype", self.dtype, "must be torch.float32, torch.bfloat16 or torch.float16")
        for what, kind in (("admission", Admission), ("expiry", Expiry), ("columns", Columns)):
            if not isinstance(getattr(self, what), kind | None):
                self._refuse(what, getattr(self, what), f"must be {kind.__name__}(...) or None")
        if self.columns is not None and self.columns.first + self.embedding_dim > self.columns.of:
            self._refuse("columns", self.columns, f"has no room for embedding_dim = {self.embedding_dim}")
        self._check_ids()
        self.init.code(self.num_embeddings, self.whole_dim)

    def _refuse(self, what: str, value: object, rule: str) -> None:
        raise BadConfig(f"table {self.name!r}: {what} = {value!r}, {rule}")

    def _check_shape(self) -> None:
        for what, value in (("num_embeddings", self.num_embeddings), ("embedding_dim", self.embedding_dim)):
            if what == "num_embeddings" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ID:
                self._refuse(what, value, "must be an integer >= 1")

    def _check_features(self) -> None:
        if isinstance(self.features, str):
            self._refuse("features", self.features, "must be a list of names, not one string")
        names = tuple(self.features) or (self.name,)
        for i, name in enumerate(names):
            if not isinstance(name, str) or not name:
                self._refuse(f"features[{i}]", name, "must be a non-empty string")
            if name in names[:i]:
                self._refuse(f"features[{i}]", name, f"already at position {names.index(name)}")
        object.__setattr__(self, "features", names)

    def _check_ids(self) -> None:
        rows = self.num_embeddings
        for what, value in (("reserved_row", self.reserved_row), ("padding_idx", self.padding_idx)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                self._refuse(what, value, "must be an integer")
        if self.out_of_range not in OUT_OF_RANGE:
            self._refuse("out_of_range", self.out_of_range, f"must be one of {list(OUT_OF_RANGE)}")
        if rows is None and self.out_of_range != "raise":
            self._refuse("out_of_range", self.out_of_range, "has no meaning where every int64 is an id")
        if rows is not None and not 0 <= self.reserved_row < rows:
            self._refuse("reserved_row", self.reserved_row, f"valid range [0, {rows})")
        if self.padding_idx is not None:
            if rows is not None and not -rows <= self.padding_idx < rows:
                self._refuse("padding_idx", self.padding_idx, f"valid range [{-rows}, {rows})")
            if rows is not None and self.padding_idx < 0:
                object.__setattr__(self, "padding_idx", self.padding_idx + rows)
        if self.max_norm is not None and not (math.isfinite(self.max_norm) and self.max_norm > 0):
            self._refuse("max_norm", self.max_norm, "must be a finite number > 0, or None")
        if not self.norm_type > 0:
            self._refuse("norm_type", self.norm_type, "must be > 0")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The features that read this table, in order."""
        return tuple(self.features)

    def part(self, first: int, last: int, name: str | None = None) -> TableConfig:
        """The table of columns [first, last) of this one, under another name or the same.

        >>> table = TableConfig("user", num_embeddings=10, embedding_dim=8)
        >>> table.part(2, 5).embedding_dim, table.part(2, 5).columns
        (3, Columns(first=2, of=8, table='user'))
        >>> table.part(0, 8) == table
        True
        """
        if not 0 <= first < last <= self.embedding_dim:
            self._refuse("columns", (first, last), f"valid range [0, {self.embedding_dim})")
        if last - first == self.embedding_dim and name in (None, self.name):
            return self
        columns = Columns(self.first_column + first, self.whole_dim, self.random_name)
        return replace(self, name=name or self.name, embedding_dim=last - first, columns=columns)

    def whole(self) -> TableConfig:
        """The table that this one is columns of, under its name and with the options of this one."""
        if self.columns is None:
            return self
        return replace(self, name=self.columns.table, embedding_dim=self.columns.of, columns=None)

    @property
    def random_name(self) -> str:
        """The name that, with ``seed``, decides its initial rows and its rounding."""
        return self.name if self.columns is None else self.columns.table

    @property
    def first_column(self) -> int:
        """The first of its columns in rows that ids have."""
        return 0 if self.columns is None else self.columns.first

    @property
    def whole_dim(self) -> int:
        """Columns of the rows that ids have."""
        return self.embedding_dim if self.columns is None else self.columns.of

    @property
    def unbounded(self) -> bool:
        """Whether every int64 is an id."""
        return self.num_embeddings is None

    @property
    def dtype_code(self) -> int:
        return DTYPES[self.dtype]

    @property
    def state_offset(self) -> int:
        """Byte of a row at which optimizer state begins: weights rounded up to 4 bytes."""
        return -(-self.embedding_dim * self.dtype.itemsize // 4) * 4

    @property
    def state_floats(self) -> int:
        """fp32 numbers of optimizer state in a row."""
        return self.optimizer.state_floats(self.embedding_dim)

    @property
    def meta_offset(self) -> int:
        """Byte of a row behind its optimizer state."""
        return self.state_offset + 4 * self.state_floats

    @property
    def meta_bytes(self) -> int:
        """Bytes there of int32 (step of the last update, number of steps that updated it), for tables with expiry."""
        return 8 if self.expiry is not None else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row: weights, state and meta, rounded up to 64 or 16 where that costs at most a quarter.

        >>> TableConfig("t", num_embeddings=10, embedding_dim=64).row_bytes
        256
        """
        raw = self.meta_offset + self.meta_bytes
        for unit in (64, 16):
            if -(-raw // unit) * unit <= 1.25 * raw:
                return -(-raw // unit) * unit
        return raw

    @property
    def flags(self) -> int:
        """The kernels' flag word."""
        return self.optimizer.flags | (ROUNDING_FLAG if self.dtype != torch.float32 else 0)

    def schema(self) -> dict[str, object]:
        """What must agree between a saved table and a declared one."""
        return {
            "name": self.name,
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "dtype": str(self.dtype),
            "optimizer": self.optimizer.name,
            "state_floats": self.state_floats,
            "init": repr(self.init),
            "seed": self.seed,
            **{key: repr(option) for key in _OPTIONS if (option := getattr(self, key)) is not None},
        }


def check_tables(tables: Iterable[TableConfig]) -> list[TableConfig]:
    """The tables as a list; two of one name, or a feature that two tables claim, raise."""
    checked: list[TableConfig] = []
    owner: dict[str, str] = {}
    for i, table in enumerate(tables):
        if not isinstance(table, TableConfig):
            raise BadConfig(f"tables[{i}] = {table!r}, must be a TableConfig")
        if any(table.name == other.name for other in checked):
            raise BadConfig(f"tables[{i}]: table {table.name!r} is declared twice")
        for feature in table.feature_names:
            if feature in owner:
                raise BadConfig(f"feature {feature!r} is claimed by tables {owner[feature]!r} and {table.name!r}")
            owner[feature] = table.name
        checked.append(table)
    return checked
