"""A table as JSON and back, so that a store can be reopened from its folder alone, and nothing that is read runs code.

A description holds every argument of ``TableConfig``, dtypes by name, rules and initialisers by class name with their
numbers, and the row layout that follows from them. Parsing is strict: unknown names, missing ones, values that
``TableConfig`` refuses, or a layout that this version would not give raise ``CorruptStore``.

Of a saved table and one declared anew, what rows are made of must agree (``TableConfig.schema``, row layout, initial
values); learning rates and the other numbers a scheduler may change, features, pooling and the handling of bad ids may
differ. Pure functions: safe from any thread.

>>> import json
>>> from embcache.optim import Adagrad
>>> table = TableConfig("user", num_embeddings=None, embedding_dim=4, optimizer=Adagrad(lr=0.1))
>>> restore(json.loads(json.dumps(describe(table)))) == table
True
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from types import ModuleType
from typing import Any

from . import init, optim
from .config import DTYPES, Admission, Columns, Expiry, TableConfig
from .errors import BadConfig, CorruptStore, NotSupported, SchemaMismatch

__all__ = ["agree", "describe", "restore"]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def _classes(module: ModuleType, base: type) -> dict[str, type]:
    found = vars(module).items()
    return {
        name: kind for name, kind in found if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }


# the classes that each argument may hold; nothing else is ever constructed from a file
_KINDS: dict[str, dict[str, type]] = {
    "optimizer": _classes(optim, optim.Rule),
    "init": _classes(init, init.Initializer),
    "admission": {"Admission": Admission},
    "expiry": {"Expiry": Expiry},
    "columns": {"Columns": Columns},
}
_LATER = {"columns": None}  # arguments that are left out where they have this value: what is saved stays as it was


def describe(table: TableConfig) -> dict[str, Any]:
    """The JSON description of a table. NotSupported where its rule or initialiser is a class of the caller's own."""
    names = [field.name for field in fields(table)]
    out = {name: _plain(table, name) for name in names if name not in _LATER or getattr(table, name) != _LATER[name]}
    return {**out, "layout": _layout(table)}


def restore(description: Mapping[str, Any], where: str = "the saved tables") -> TableConfig:
    """The table that was described. CorruptStore, naming ``where``, on anything that ``describe`` would not write."""
    if not isinstance(description, Mapping):
        raise CorruptStore(f"{where}: a table is described by {type(description).__name__}, must be an object")
    name = description.get("name")
    place = f"{where}: table {name!r}"
    saved = [field for field in fields(TableConfig) if field.name not in _LATER or field.name in description]
    _check_names(description, [*(field.name for field in saved), "layout"], place)
    try:
        table = TableConfig(**{field.name: _value(field, description[field.name], place) for field in saved})
        again = describe(table)
    except (BadConfig, NotSupported, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, CorruptStore):
            raise
        raise CorruptStore(f"{place}: {error}") from error
    for key in description:
        if _text(again.get(key)) != _text(description[key]) or key not in again:
            raise CorruptStore(f"{place}: {key} = {description[key]!r}, this version would write {again.get(key)!r}")
    return table


def agree(saved: Sequence[TableConfig], declared: Sequence[TableConfig], where: str = "tables") -> None:
    """Raise SchemaMismatch, listing what differs on both sides, unless the rows of ``saved`` fit ``declared``.

    >>> agree([TableConfig("t", 10, 4, seed=1)], [TableConfig("t", 10, 4, seed=2)])
    Traceback (most recent call last):
    ...
    embcache.errors.SchemaMismatch: tables: saved [{'name': 't', 'seed': 1}], declared [{'name': 't', 'seed': 2}]
    """
    names = [[table.name for table in tables] for tables in (saved, declared)]
    if names[0] != names[1]:
        raise SchemaMismatch(where, *names)
    old: list[dict[str, Any]] = []
    new: list[dict[str, Any]] = []
    for before, after in zip(map(_must_agree, saved), map(_must_agree, declared), strict=True):
        differ = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        if differ:
            old.append({key: before.get(key) for key in ("name", *differ)})
            new.append({key: after.get(key) for key in ("name", *differ)})
    if old:
        raise SchemaMismatch(where, old, new)


def _must_agree(table: TableConfig) -> dict[str, Any]:
    return {
        **table.schema(),
        "layout": _layout(table),
        "initial_accumulator_value": getattr(table.optimizer, "initial_accumulator_value", 0.0),
        "padding_idx": table.padding_idx,
    }


def _layout(table: TableConfig) -> dict[str, int]:
    names = ("state_offset", "state_floats", "meta_offset", "meta_bytes", "row_bytes")
    return {name: getattr(table, name) for name in names}


def _plain(table: TableConfig, key: str) -> Any:
    value = getattr(table, key)
    if key == "dtype":
        return str(value).removeprefix("torch.")
    if key in _KINDS and value is not None:
        kind = type(value).__name__
        if _KINDS[key].get(kind) is not type(value) or not is_dataclass(value):
            known = sorted(_KINDS[key])
            raise NotSupported(f"table {table.name!r}: {key} = {value!r} cannot be saved, only {known} can")
        return {"kind": kind, **{field.name: _number(getattr(value, field.name)) for field in fields(value)}}
    return list(value) if isinstance(value, tuple) else _number(value)


def _number(value: Any) -> Any:
    """JSON has no infinity: it becomes {"float": "inf"}."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _value(field: Field[Any], saved: Any, place: str) -> Any:
    key = field.name
    if field.type == "bool" and not isinstance(saved, bool):  # annotations are text here
        raise CorruptStore(f"{place}: {key} = {saved!r}, must be true or false")
    if key == "dtype":
        if not isinstance(saved, str) or saved not in _DTYPES:
            raise CorruptStore(f"{place}: dtype = {saved!r}, must be one of {sorted(_DTYPES)}")
        return _DTYPES[saved]
    if key == "features":
        if not isinstance(saved, list):
            raise CorruptStore(f"{place}: features = {saved!r}, must be a list")
        return tuple(saved)
    if key not in _KINDS or saved is None:
        return _finite(saved)
    kind = saved.get("kind") if isinstance(saved, Mapping) else None
    if not isinstance(kind, str) or kind not in _KINDS[key]:
        raise CorruptStore(f"{place}: {key} = {saved!r}, must be one of {sorted(_KINDS[key])}")
    known = _KINDS[key][kind]
    names = [field.name for field in fields(known)]
    _check_names(saved, ["kind", *names], f"{place}: {key}")
    return known(**{name: _finite(saved[name]) for name in names})


def _finite(saved: Any) -> Any:
    if isinstance(saved, Mapping) and set(saved) == {"float"}:
        return float(saved["float"])
    return saved


def _check_names(saved: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    unknown = sorted(set(saved) - set(known))
    missing = [name for name in known if name not in saved]
    if unknown or missing:
        what = f"unknown {unknown}" if unknown else f"{missing} missing"
        raise CorruptStore(f"{place}: {what}; this version knows {list(known)}")


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
