"""Schema: which column of a log is the label, a number, an id or the time, and how it is written.

A schema is data (YAML or JSON, or these dataclasses) and holds no code. ``criteo`` and ``avazu`` are built in.
Times and ids turn into int64 keys here, rows of tables later (see :mod:`dlrm.data.ids`).
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm.data.errors import SchemaError

ENCODINGS = ("hex", "decimal", "string")
TRANSFORMS = ("log1p", "identity")
TIME_FORMATS = ("yymmddhh", "unix", "unix_ms", "iso")
TIME_CATEGORICAL = ("hour_of_day", "weekday")
TIME_DENSE = ("hour_sin", "hour_cos")


@dataclass(frozen=True)
class Label:
    """The label column. As it is, a number in [0, 1]; or 1 where the number is >= ``threshold``; or 1 where the
    text is one of ``positive``."""

    column: str
    threshold: float | None = None
    positive: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dense:
    """A number. ``log1p``: log(1 + max(x, 0)), missing = 0. ``identity``: x, missing = 0."""

    column: str
    transform: str = "log1p"


@dataclass(frozen=True)
class Categorical:
    """An id, or a bag of ids.

    ``encoding``: ``hex`` (up to 16 digits), ``decimal`` (int64) or ``string`` (hashed to 64 bits).
    ``separator``: set for a bag of ids in one text field; ``multi`` for a list column of a Parquet file (implied by a
    separator). ``table``: features with the same table name share rows; by default each has its own.
    """

    column: str
    encoding: str = "string"
    separator: str | None = None
    multi: bool = False
    table: str | None = None

    @property
    def is_bag(self) -> bool:
        """Whether a sample may hold any number of ids."""
        return self.multi or self.separator is not None


@dataclass(frozen=True)
class Time:
    """The time column: split by day, and features of the hour (UTC).

    ``format``: ``yymmddhh`` (Avazu), ``unix`` (seconds), ``unix_ms``, or ``iso`` (YYYY-MM-DD, optionally
    followed by ``T`` or a space and HH:MM:SS). ``categorical``/``dense`` add those features of the time.
    """

    column: str
    format: str = "unix"
    categorical: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schema:
    """All of a log's columns.

    ``columns``: every column's name in file order, for text without a header line. ``missing``: the texts that mean
    "no value", beside the empty text. ``quote``: one character, or empty for none.
    """

    label: Label
    dense: tuple[Dense, ...] = ()
    categorical: tuple[Categorical, ...] = ()
    time: Time | None = None
    delimiter: str = ","
    header: bool = True
    columns: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    quote: str = ""
    name: str = field(default="table", compare=False)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the sparse features: the categorical columns, then those made of the time."""
        return tuple(c.column for c in self.categorical) + (self.time.categorical if self.time else ())

    @property
    def dense_features(self) -> tuple[str, ...]:
        """Names of the dense features: the number columns, then those made of the time."""
        return tuple(d.column for d in self.dense) + (self.time.dense if self.time else ())

    @property
    def tables(self) -> tuple[str, ...]:
        """The table of each feature, in the order of ``features``."""
        own = tuple(c.table or c.column for c in self.categorical)
        return own + (self.time.categorical if self.time else ())

    @property
    def bags(self) -> tuple[bool, ...]:
        """Whether each feature holds a bag of ids, in the order of ``features``."""
        return tuple(c.is_bag for c in self.categorical) + (False,) * (len(self.features) - len(self.categorical))

    @property
    def used_columns(self) -> tuple[str, ...]:
        """Every column that is read, each once."""
        names = [self.label.column, *(d.column for d in self.dense), *(c.column for c in self.categorical)]
        return tuple(dict.fromkeys(names + ([self.time.column] if self.time else [])))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the inverse of :meth:`from_dict`."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Schema:
        """Build from plain data; a column may be given by its name alone.

        >>> s = Schema.from_dict({"label": "click", "dense": ["age"], "categorical": [{"column": "user"}]})
        >>> s.features, s.dense[0].transform
        (('user',), 'log1p')
        """
        if not isinstance(data, dict):
            raise SchemaError(f"a schema is a mapping, found {type(data).__name__}")
        values = dict(data)
        if "label" not in values:
            raise SchemaError("a schema needs a label column")
        for name in ("dense", "categorical", "columns", "missing"):
            if not isinstance(values.get(name) or [], list | tuple):
                raise SchemaError(f"{name}: expected a list, found {values[name]!r}")
            values[name] = tuple(values.get(name) or ())
        values["label"] = _column(Label, values["label"])
        values["dense"] = tuple(_column(Dense, v) for v in values["dense"])
        values["categorical"] = tuple(_column(Categorical, v) for v in values["categorical"])
        values["time"] = None if values.get("time") is None else _column(Time, values["time"])
        return _make(cls, values)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Schema:
        """``"criteo"``, ``"avazu"``, or a YAML or JSON file."""
        builtin = {"criteo": criteo, "avazu": avazu}.get(str(name_or_path))
        if builtin is not None:
            return builtin()
        path = Path(name_or_path)
        if not path.is_file():
            raise SchemaError(f"no schema {str(name_or_path)!r}: give criteo, avazu, or a YAML or JSON file")
        import yaml

        try:
            text = path.read_text("utf-8")
            return cls.from_dict(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text))
        except (ValueError, yaml.YAMLError) as error:  # not UTF-8, JSON or YAML; or what it says is no schema
            raise SchemaError(f"{path}: {' '.join(str(error).split())}") from None


def criteo() -> Schema:
    """Criteo Kaggle and Terabyte: label, 13 integers, 26 hexadecimal ids; tab separated, no header.

    >>> s = criteo()
    >>> len(s.dense), len(s.categorical), s.columns[0], s.columns[39]
    (13, 26, 'label', 'C26')
    """
    dense = tuple(Dense(f"I{i}") for i in range(1, 14))
    ids = tuple(Categorical(f"C{i}", "hex") for i in range(1, 27))
    columns = ("label", *(d.column for d in dense), *(c.column for c in ids))
    return Schema(Label("label"), dense, ids, delimiter="\t", header=False, columns=columns, name="criteo")


def avazu() -> Schema:
    """Avazu: ``id`` is dropped, ``hour`` gives time features, the rest are ids (hexadecimal or decimal)."""
    hexadecimal = ("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category", "device_id",
                   "device_ip", "device_model")  # fmt: skip
    names = ("C1", "banner_pos", *hexadecimal, "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22)))
    ids = tuple(Categorical(n, "hex" if n in hexadecimal else "decimal") for n in names)
    time = Time("hour", "yymmddhh", categorical=TIME_CATEGORICAL, dense=TIME_DENSE)
    return Schema(Label("click"), (), ids, time=time, name="avazu")


def _column(kind: type, value: Any) -> Any:
    if isinstance(value, str):
        return kind(value)
    if not isinstance(value, dict):
        raise SchemaError(f"{kind.__name__.lower()}: expected a column name or a mapping, found {value!r}")
    return _make(kind, {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})


def _make(kind: type, values: dict[str, Any]) -> Any:
    known = [f.name for f in dataclasses.fields(kind)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise SchemaError(f"{kind.__name__.lower()}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise SchemaError(f"{kind.__name__.lower()}: {name} = {value!r}, expected {_words(hints[name])}")
    try:
        return kind(**values)
    except TypeError as error:
        raise SchemaError(f"{kind.__name__.lower()}: {error}") from None


def _fits(value: Any, hint: Any) -> bool:
    options = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(v, options[0]) for v in value)
    if options:  # X | None
        return any(_fits(value, option) for option in options)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    names = {str: "a text (in quotes)", float: "a number", bool: "true or false"}
    if typing.get_origin(hint) is tuple:
        return f"a list, each {_words(typing.get_args(hint)[0])}"
    kinds = [h for h in typing.get_args(hint) or (hint,) if h is not type(None)]
    return " or ".join(names.get(k, "a mapping") for k in kinds)


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SchemaError(f"{what}: expected one of {', '.join(allowed)}, found {value!r}")


def _check(s: Schema) -> None:
    for d in s.dense:
        _one_of(f"transform of {d.column!r}", d.transform, TRANSFORMS)
    for c in s.categorical:
        _one_of(f"encoding of {c.column!r}", c.encoding, ENCODINGS)
    if s.time is not None:
        _one_of(f"format of {s.time.column!r}", s.time.format, TIME_FORMATS)
        for name in s.time.categorical:
            _one_of("categorical features of the time", name, TIME_CATEGORICAL)
        for name in s.time.dense:
            _one_of("dense features of the time", name, TIME_DENSE)
    for what, names in (("sparse features", s.features), ("dense features", s.dense_features), ("columns", s.columns)):
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise SchemaError(f"{what}: {', '.join(twice)} given twice")
    roles = [s.label.column, *(d.column for d in s.dense), *(c.column for c in s.categorical)]
    roles += [s.time.column] if s.time else []
    twice = sorted({n for n in roles if roles.count(n) > 1})
    if twice:
        raise SchemaError(f"{', '.join(twice)}: a column has one role, found two")
    if s.label.threshold is not None and s.label.positive:
        raise SchemaError("label: give a threshold or the positive texts, not both")
    _check_text(s)


def _check_text(s: Schema) -> None:
    marks = [("delimiter", s.delimiter), ("quote", s.quote)]
    marks += [(f"separator of {c.column!r}", c.separator) for c in s.categorical if c.separator is not None]
    for what, text in marks:
        if len(text.encode()) != 1 and not (what == "quote" and text == ""):
            raise SchemaError(f"{what}: expected one ASCII character, found {text!r}")
        if text in ("\n", "\r") or (text == s.delimiter and what != "delimiter"):
            raise SchemaError(f"{what}: {text!r} already means something else")
    absent = [n for n in s.used_columns if n not in s.columns]
    if not s.header and not s.columns and s.delimiter:
        raise SchemaError("text without a header needs `columns`, every column's name in file order")
    if s.columns and absent:
        raise SchemaError(f"columns: {', '.join(absent)} missing")
