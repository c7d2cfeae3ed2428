"""Dataclasses as command-line flags, and as the ``config.yaml`` of a run.

A configuration is one dataclass; a field that is itself a dataclass is a group whose fields become flags of the same
flat name space. Types give the parser: bool -> ``--name/--no-name``, ``Literal`` -> choices, ``tuple[int, ...]`` ->
``64,32``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from embcache.errors import EmbcacheError
from embcache.statefile import replace_file

__all__ = ["flag", "flatten", "load_yaml", "parse", "run", "save_yaml"]

Config = TypeVar("Config")
_REQUIRED = object()


def flag(default: Any = dataclasses.MISSING, help: str = "") -> Any:
    """A dataclass field with the words that ``--help`` prints; without a default the flag is required."""
    return dataclasses.field(default=default, metadata={"help": help})


def parse(cls: type[Config], argv: Sequence[str] | None = None, description: str | None = None) -> Config:
    """The configuration given on the command line (``sys.argv`` when ``argv`` is None).

    Wrong flags, wrong values and a ``ValueError`` of a ``__post_init__`` end the program with a message and status 2.
    ``--config FILE`` takes another run's ``config.yaml`` as the defaults.

    >>> @dataclasses.dataclass
    ... class Run:
    ...     lr: float = flag(0.1, "learning rate")
    ...     layers: tuple[int, ...] = flag((64, 32), "widths")
    ...     compile: bool = flag(False, "compile the model")
    >>> parse(Run, ["--layers", "8,4", "--compile"])
    Run(lr=0.1, layers=(8, 4), compile=True)
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--help] [--FLAG VALUE ...]",  # the list of all flags would hide the message after it
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="take the values of this config.yaml as defaults")
    known = {f.name: (f, hint) for f, hint, _ in _walk(cls)}
    _add_group(parser, cls)
    given = vars(parser.parse_args(argv))
    try:
        values = _values(given, known)
        missing = [_flag_name(n) for n, v in values.items() if v is _REQUIRED]
        if missing:
            parser.error(f"the following arguments are required: {', '.join(missing)}")
        return _build(cls, values)
    except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
        parser.error(str(error))


def flatten(config: Any) -> dict[str, Any]:
    """All values of a configuration by flag name, as plain YAML and JSON types.

    >>> @dataclasses.dataclass
    ... class Run:
    ...     out: Path = Path("runs")
    ...     sizes: tuple[int, ...] = (1, 2)
    >>> flatten(Run())
    {'out': 'runs', 'sizes': [1, 2]}
    """
    flat: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            flat.update(flatten(value))
        else:
            flat[f.name] = _plain(value)
    return flat


def save_yaml(config: Any, path: Path) -> None:
    """Write a configuration as one flat YAML mapping, in the order of its flags."""
    text = yaml.safe_dump(flatten(config), sort_keys=False, allow_unicode=True)
    replace_file(path.parent, path.name, text.encode())


def load_yaml(cls: type[Config], path: Path) -> Config:
    """The configuration saved at ``path``; unknown names and wrong types are a ValueError that names them."""
    known = {f.name: (f, hint) for f, hint, _ in _walk(cls)}
    values = _values({"config": path, **dict.fromkeys(known)}, known)
    missing = [name for name, value in values.items() if value is _REQUIRED]
    if missing:
        raise ValueError(f"{path}: missing {', '.join(missing)}")
    return _build(cls, values)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


def _walk(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Any, type]]:
    """(field, type, owning dataclass) of every leaf, groups opened."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _walk(hints[f.name])
        else:
            yield f, hints[f.name], cls


def _add_group(parser: argparse.ArgumentParser, cls: type) -> None:
    groups: dict[type, Any] = {}
    for f, hint, owner in _walk(cls):
        if owner not in groups:
            doc = (owner.__doc__ or owner.__name__).strip().splitlines()[0].rstrip(".")
            groups[owner] = parser.add_argument_group(doc)
        groups[owner].add_argument(_flag_name(f.name), dest=f.name, default=None, **_argument(f, hint))


def _argument(f: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Keyword arguments of ``add_argument`` for one field."""
    default = _default(f)
    shown = "required" if default is _REQUIRED else "none" if default is None else _shown(default)
    help_text = f"{f.metadata.get('help', '')} ({shown})".strip().replace("%", "%%")
    kind, _ = _strip_optional(hint)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "help": help_text}
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind), "help": help_text}
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]

        def items(text: str) -> tuple[Any, ...]:
            return tuple(_scalar(item)(part) for part in text.split(",") if part)

        items.__name__ = f"comma-separated {item.__name__}"
        return {"type": items, "metavar": f"{item.__name__.upper()},…", "help": help_text}
    return {"type": _scalar(kind), "metavar": kind.__name__.upper(), "help": help_text}


def _scalar(kind: type) -> Any:
    """``int`` that also reads 8_000_000 and 1e6; every other type as it is."""
    if kind is not int:
        return kind

    def integer(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            number = float(text)
            if not number.is_integer():
                raise ValueError(text) from None
            return int(number)

    integer.__name__ = "int"
    return integer


def _values(given: dict[str, Any], known: dict[str, tuple[dataclasses.Field[Any], Any]]) -> dict[str, Any]:
    """Flag, else the value of the file, else the field's default."""
    path = given.pop("config", None)
    file = _read_yaml(path, known) if path is not None else {}
    values = {name: file.get(name, _default(f)) for name, (f, _) in known.items()}
    values.update({name: value for name, value in given.items() if value is not None})
    return values


def _read_yaml(path: Path, known: dict[str, tuple[dataclasses.Field[Any], Any]]) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: expected a mapping of flag names to values")
    unknown = sorted(str(name) for name in loaded if name not in known)
    if unknown:
        raise ValueError(f"{path}: unknown {', '.join(unknown)}")
    return {name: _from_plain(value, known[name][1], f"{path}: {name}") for name, value in loaded.items()}


def _from_plain(value: Any, hint: Any, where: str) -> Any:
    kind, optional = _strip_optional(hint)
    if value is None and optional:
        return None
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_from_plain(v, typing.get_args(kind)[0], where) for v in value)
    if typing.get_origin(kind) is Literal and value in typing.get_args(kind):
        return value
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(value)  # YAML 1.1 reads 1e-8 as a string
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool) == isinstance(value, bool):
        return value
    raise ValueError(f"{where} = {value!r}, expected {getattr(kind, '__name__', kind)}")


def _build(cls: Any, values: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    arguments = {}
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        arguments[f.name] = _build(hint, values) if dataclasses.is_dataclass(hint) else values[f.name]
    return cls(**arguments)


def _default(f: dataclasses.Field[Any]) -> Any:
    if f.default is not dataclasses.MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else _REQUIRED


def _strip_optional(hint: Any) -> tuple[Any, bool]:
    """(type without None, whether None is allowed)."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        rest = [a for a in typing.get_args(hint) if a is not type(None)]
        if len(rest) == 1:
            return rest[0], True
        raise TypeError(f"a flag has one type or that or None, got {hint}")
    return hint, False


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def run(main: Callable[[Config], None], cls: type[Config], description: str | None = None) -> None:
    """A script: flags to configuration, then ``main``; a mistake of the user ends it with one line and status 1.

    Mistakes are whatever the file system refuses (a missing file, a full disk, a folder of someone else's) and
    everything this project raises on purpose (malformed data, a checkpoint of another model, a NaN in a gradient); any
    other exception keeps its traceback.
    """
    config = parse(cls, description=description)
    warnings.formatwarning, before = _one_line, warnings.formatwarning
    try:
        main(config)
    except (EmbcacheError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: --resume goes on from the last checkpoint")
    finally:
        warnings.formatwarning = before


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """What a script says of a warning: its words, for they are meant for people; where it was raised is not."""
    where = "warning" if category is UserWarning else f"{filename}:{lineno}: {category.__name__}"
    return f"{where}: {message}\n"
