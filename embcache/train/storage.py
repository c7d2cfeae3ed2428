"""The settings of storage, what they build, and what the report says of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from embcache.store import EmbeddingStore
from embcache.tiers import Lmdb, Ram
from embcache.train.distributed import Session
from embcache.train.flags import flag
from embcache.train.task import BatchSource, Task

__all__ = ["StagedBatches", "StorageConfig", "Traffic", "checkpoint_folder", "disk_bytes", "parse_bytes"]


def parse_bytes(text: str) -> int:
    """A size as people write it.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 GB"), parse_bytes("4096")
    (2147483648, 1500000000, 4096)
    """
    match = re.fullmatch(r"([\d_]+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 500MB or 2GiB")
    power = " KMGT".index(match[2].upper()) if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def disk_bytes(folder: Path) -> int:
    """Bytes that the files in a folder take on the disk, holes excluded."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # merged and removed meanwhile
            total += path.lstat().st_blocks * 512
    return total


def checkpoint_folder(tiers: Sequence[str], store: str | Path | None, out: Path) -> Path:
    """Where the checkpoints of a run in ``out`` are, by its settings.

    >>> checkpoint_folder(["ram", "lmdb"], None, Path("run")), checkpoint_folder(["ram"], None, Path("run"))
    (PosixPath('run/store'), PosixPath('run/checkpoints'))
    """
    if tiers[-1] == "lmdb":
        return Path(store) if store is not None else out / "store"
    return out / "checkpoints"


@dataclass(frozen=True)
class StorageConfig:
    """Storage: where embedding rows live, how much of it is cache, and how far ahead rows are staged."""

    tiers: tuple[str, ...] = flag(("ram",), "where rows live, fastest first: ram, ram,lmdb or ram,ram,lmdb")
    cache_rows: tuple[int, ...] | None = flag(None, "rows of every table that a cache holds; with two caches, of each")
    cache_bytes: tuple[str, ...] | None = flag(None, "bytes of a cache, all tables together, as 500MB or 2GiB")
    policy: Literal["lfu", "lru", "lfu_decay", "lookahead"] = flag("lfu", "which rows a full cache keeps")
    store: Path | None = flag(None, "folder of the rows on disk and their checkpoints (none: store/ in --out)")
    depth: str = flag("auto", "batches whose rows are staged while one trains, a number or auto (as many as fit, up to "
                      "4; 0 where all rows are in memory)")  # fmt: skip
    window: int = flag(4, "further batches that the policy lookahead knows")

    def __post_init__(self) -> None:
        if not self.tiers or {*self.tiers[:-1]} - {"ram"} or self.tiers[-1] not in ("ram", "lmdb"):
            raise ValueError(
                f"--tiers {','.join(self.tiers)}: expected ram, or caches of ram over ram or lmdb: ram,lmdb"
            )
        if self.tiers == ("lmdb",):
            raise ValueError("--tiers lmdb: rows train in memory, so a cache stands over lmdb: ram,lmdb")
        self._check_sizes()
        if self.store is not None and not self.on_disk:
            raise ValueError(f"--store {self.store}: --tiers {','.join(self.tiers)} keeps no rows on disk")
        if self.depth != "auto" and not self.depth.isdecimal():
            raise ValueError(f"--depth {self.depth}: expected a number of batches or auto")
        for name, used in (("policy", self.caches > 0), ("window", self.policy == "lookahead")):
            if not used and getattr(self, name) != getattr(type(self), name):
                why = "there is no cache" if name == "policy" else f"the policy {self.policy} looks at no later batch"
                raise ValueError(f"--{name} {getattr(self, name)}: {why}")
        if self.window < 1:
            raise ValueError(f"--window must be at least 1, got {self.window}")

    def _check_sizes(self) -> None:
        given = {"--cache-rows": self.cache_rows, "--cache-bytes": self.cache_bytes}
        sizes = {name: value for name, value in given.items() if value is not None}
        if len(sizes) > 1:
            raise ValueError("--cache-rows and --cache-bytes: give one of them")
        if self.caches and not sizes:
            raise ValueError(f"--tiers {','.join(self.tiers)} needs --cache-rows or --cache-bytes")
        for name, values in sizes.items():
            if len(values) != self.caches:
                raise ValueError(f"{name} gives {len(values)} sizes, --tiers has {self.caches} caches")
            for value in values:
                if (parse_bytes(value) if isinstance(value, str) else value) < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def caches(self) -> int:
        """How many of the tiers are caches."""
        return len(self.tiers) - 1

    @property
    def on_disk(self) -> bool:
        """Whether rows outlive the process."""
        return self.tiers[-1] == "lmdb"

    def folder(self, out: Path) -> Path:
        """Where the checkpoints of a run in ``out`` are: with the rows, where those are on disk."""
        return checkpoint_folder(self.tiers, self.store, out)

    def chain(self, out: Path, folder: Path | None = None) -> list[Any]:
        """Descriptions of the tiers of a run in ``out``; rows on disk in ``folder`` if one is given."""
        caches = []
        for i in range(self.caches):
            rows = None if self.cache_rows is None else self.cache_rows[i]
            size = None if self.cache_bytes is None else parse_bytes(self.cache_bytes[i])
            caches.append(Ram(rows=rows, bytes=size, policy=self.policy))
        return [*caches, Lmdb(folder or self.folder(out)) if self.on_disk else Ram()]

    def staged(self, batches: BatchSource, store: EmbeddingStore, task: Task, parts: int) -> BatchSource:
        """The batches with the rows of their ``parts`` micro-batches staged ahead, where that helps."""
        if self.depth == "0" or (self.depth == "auto" and not self.caches):
            return batches
        depth: int | Literal["auto"] = "auto" if self.depth == "auto" else int(self.depth)
        window = self.window if self.policy == "lookahead" else 0

        def jagged(batch: Any) -> list[Any]:
            pieces = [batch] if parts == 1 else task.split(batch, parts)
            return [ids for piece in pieces for ids in task.jagged(piece)]

        return StagedBatches(batches, lambda loader: store.lookahead(loader, depth, ids=jagged, window=window))


class StagedBatches:
    """A source of batches whose iteration runs through ``wrap``, a look-ahead say."""

    def __init__(self, batches: BatchSource, wrap: Callable[[BatchSource], Iterator[Any]]) -> None:
        self._batches, self._wrap = batches, wrap

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return self._wrap(self._batches)

    def set_position(self, epoch: int, batch: int) -> None:
        """The next iteration starts there."""
        self._batches.set_position(epoch, batch)


class Traffic:
    """What the caches and tiers of some stores did since it was last asked."""

    def __init__(self, stores: Sequence[EmbeddingStore], session: Session | None = None) -> None:
        self._stores = [store for store in stores if len(store.tiers) > 1]
        self._session = session or Session()
        self._before: dict[str, float] = self._totals()

    def point(self) -> dict[str, float]:
        """For a point of the curves, of all ranks: ``hit_rate`` of unique ids, ``bytes_read`` and ``bytes_written``
        below the caches, and ``seconds_<stage>`` of staging. Empty where nothing is cached."""
        if not self._stores:
            return {}
        now, before = self._totals(), self._before
        self._before = now
        new = {name: value - before.get(name, 0.0) for name, value in now.items()}
        hits, misses = new.pop("hits", 0.0), new.pop("misses", 0.0)
        return {"hit_rate": hits / (hits + misses) if hits + misses else 0.0, **new}

    def _totals(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for store in self._stores:
            for name, value in _counters(store.traffic()).items():
                totals[name] = totals.get(name, 0.0) + value
        return dict(zip(totals, self._session.total(*totals.values()), strict=True))


def _counters(traffic: Mapping[str, Any]) -> dict[str, float]:
    cache, last = traffic["cache"], traffic["tiers"][-1]
    counters = {"hits": cache["hits"], "misses": cache["misses"]}
    counters |= {f"seconds_{stage}": seconds for stage, seconds in cache["seconds"].items()}
    return counters | {name: last[name] for name in ("bytes_read", "bytes_written")}
