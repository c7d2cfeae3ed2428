"""The manifest of a group: which generations there are, and which rank's folder holds which part of each.

``manifest.json`` in the group's folder is replaced by rename and is the only commit point of all ranks; the folders
beside it, one a rank, may hold generations that it does not name, and those do not exist.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import statefile
from ..errors import BadConfig, CorruptStore, FormatVersion

__all__ = ["MANIFEST", "GroupGeneration", "GroupManifest", "Part", "placed"]

FORMAT, VERSION = "embcache-group", 1
MANIFEST = "manifest.json"
HISTORY = 1000


@dataclass(frozen=True)
class Part:
    """One rank's part of a generation: number and checksum of the generation in its folder, and that one's lineage."""

    folder: str
    lineage: str
    number: int
    check: int


@dataclass(frozen=True)
class GroupGeneration:
    """One committed checkpoint of all ranks.

    Attributes:
        number: counts up from 1; a move to other ranks keeps it, since the rows are the same.
        notes: the caller's, plain JSON.
        best: whether it is the best so far.
        check: random; with number and lineage it names the state, wherever that lies.
        plans: of the ranks that hold it, as ``ShardingPlan.as_dict`` gives them, one a store.
        ranks: their parts.
    """

    number: int
    notes: dict[str, Any]
    best: bool
    check: int
    plans: list[dict[str, Any]]
    ranks: tuple[Part, ...]

    @property
    def world(self) -> int:
        """How many ranks hold it."""
        return len(self.ranks)


@dataclass(frozen=True)
class GroupManifest:
    """``lineage``: random, made with the first generation. ``history``: (number, check, number in each rank's folder)
    of generations since rows last moved between ranks, oldest first: what a delta may start from."""

    lineage: str = ""
    generations: tuple[GroupGeneration, ...] = ()
    history: tuple[tuple[int, int, tuple[int, ...]], ...] = field(default=())

    @property
    def latest(self) -> GroupGeneration | None:
        """The newest generation."""
        return self.generations[-1] if self.generations else None

    def with_new(self, new: GroupGeneration, keep: int) -> GroupManifest:
        """One generation more, and those dropped that are no longer kept."""
        older = [replace(g, best=g.best and not new.best) for g in self.generations if g.number < new.number]
        everything = [*older, new]
        best = next((g for g in reversed(everything) if g.best), None)
        kept = tuple(g for g in everything if g in everything[-keep:] or g is best)
        latest = self.latest
        follows = latest is not None and placed(latest.plans) == placed(new.plans) and _folders(latest) == _folders(new)
        history = [*(self.history if follows else ()), (new.number, new.check, tuple(p.number for p in new.ranks))]
        return GroupManifest(self.lineage or secrets.token_hex(8), kept, tuple(history[-HISTORY:]))

    def moved(self, new: GroupGeneration) -> GroupManifest:
        """The latest generation lies elsewhere now; any after it are lost."""
        kept = (*(g for g in self.generations if g.number < new.number), new)
        return GroupManifest(self.lineage, kept, ((new.number, new.check, tuple(p.number for p in new.ranks)),))

    def held(self, folder: str, lineage: str) -> frozenset[int]:
        """Numbers of the generations in a rank's folder that are named here."""
        parts = [part for g in self.generations for part in g.ranks]
        return frozenset(p.number for p in parts if (p.folder, p.lineage) == (folder, lineage))

    def named(self) -> set[str]:
        """All folders named here."""
        return {part.folder for g in self.generations for part in g.ranks}

    # as a file --------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        body = {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(asdict(self)))}
        return {**body, "check": _check(body)}

    @classmethod
    def from_dict(cls, body: Any, where: str) -> GroupManifest:
        """What ``as_dict`` gave. CorruptStore, FormatVersion, and BadConfig where it is of a run without ranks."""
        if isinstance(body, Mapping) and body.get("format") == "embcache-checkpoint":
            raise BadConfig(
                f"{where} is of a run in one process: to go on with it on several, export its rows and import them"
            )
        if not isinstance(body, Mapping) or body.get("format") != FORMAT:
            raise CorruptStore(f"{where} is not the manifest of a group of ranks")
        if isinstance(body.get("version"), int) and body["version"] > VERSION:
            raise FormatVersion(where, body["version"], VERSION)
        if body.get("check") != _check({key: value for key, value in body.items() if key != "check"}):
            raise CorruptStore(f"{where}: the checksum does not match")
        try:
            generations = tuple(
                GroupGeneration(**{**g, "ranks": tuple(Part(**part) for part in g["ranks"])})
                for g in body["generations"]
            )
            history = tuple((int(n), int(check), tuple(map(int, parts))) for n, check, parts in body["history"])
            return cls(body["lineage"], generations, history)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStore(f"{where} lacks what a manifest has: {error!r}") from None

    @classmethod
    def read(cls, folder: Path) -> GroupManifest:
        """An empty one where there is none."""
        path = folder / MANIFEST
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return cls()
        try:
            body = json.loads(data)
        except ValueError:
            raise CorruptStore(f"{path} is not JSON") from None
        return cls.from_dict(body, str(path))

    def write(self, folder: Path) -> None:
        """Commit: written aside, fsynced, renamed, and the folder fsynced."""
        statefile.replace_json(folder, MANIFEST, self.as_dict())


def placed(plans: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What of plans decides where rows lie."""
    return [
        [plan["world"], plan["buckets"], {name: (e["kind"], e.get("ranks")) for name, e in plan["tables"].items()}]
        for plan in plans
    ]


def _folders(generation: GroupGeneration) -> list[tuple[str, str]]:
    return [(part.folder, part.lineage) for part in generation.ranks]


def _check(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
