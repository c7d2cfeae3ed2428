"""Copies of a group's generations on a file system that outlives every rank's disk (``--checkpoint-dir``).

A folder holds exports of the rows, a full one and deltas that continue it, a file for each generation with the rest of
its state, and ``copies.json``, replaced by rename, which says what belongs together and holds the group's manifest. A
copy is made before ``save`` returns, so what was committed survives the loss of any node, or of all of them.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import statefile
from ..errors import CorruptStore, FormatVersion, NotSupported
from ..transfer.manifest import State
from .manifest import GroupManifest
from .peers import Peers
from .transfer import apply_exports, export_group, knows_changes

__all__ = ["Copies", "Copy"]

FORMAT, VERSION = "embcache-copies", 1
MANIFEST = "copies.json"
CHAIN = 16  # exports of a chain, at most
_NAME = re.compile(r"(export|state)-\d{8}-[0-9a-f]{8}(\.safetensors)?")


@dataclass(frozen=True)
class Copy:
    """One generation: its number and check, the exports that give its rows (``bytes``: of each), the rest's file."""

    number: int
    check: int
    chain: tuple[str, ...]
    bytes: tuple[int, ...]
    state: dict[str, Any]


class Copies:
    """The copies in a folder that every rank sees. Methods are collective, but for ``find``.

    Args:
        folder: made by the first copy.
        chain: exports until the next full one.
    """

    def __init__(self, folder: str | Path, chain: int = CHAIN) -> None:
        self.folder, self.chain = Path(folder).absolute(), chain
        self.copies: tuple[Copy, ...] = ()

    def learn(self, peers: Peers) -> GroupManifest:
        """Read what there is; the group's manifest as it was when the newest copy was made, an empty one before."""
        body = peers.told(peers.together(lambda: self._read() if peers.rank == 0 else None))
        if body is None:
            self.copies = ()
            return GroupManifest()
        self.copies = tuple(Copy(c["number"], c["check"], tuple(c["chain"]), tuple(c["bytes"]), c["state"])
                            for c in body["copies"])  # fmt: skip
        return GroupManifest.from_dict(body["group"], str(self.folder / MANIFEST))

    def find(self, number: int, check: int) -> Copy | None:
        """The copy of a generation."""
        return next((c for c in self.copies if (c.number, c.check) == (number, check)), None)

    def add(self, saved: Any, stores: Sequence[Any], rest: Any, own: Any) -> None:
        """Copy the newest generation: rows of the one store, ``rest`` of the state (rank 0's), ``own`` of each rank."""
        peers, latest = saved.peers, saved.latest
        if len(stores) != 1:
            raise NotSupported(f"copies of {len(stores)} stores together: put all tables into one store")
        parts = peers.gather(statefile.to_bytes(own))
        name = f"{latest.number:08d}-{latest.check:08x}"
        peers.together(lambda: self._clean(peers.rank))
        before = self._parent(saved, stores[0])
        since = None if before is None else self.folder / before.chain[-1]
        manifest = export_group(saved, stores[0], self.folder / f"export-{name}", since=since)
        size = sum(file.bytes for table in manifest.tables for file in table.files)

        def write() -> Any:
            if peers.rank:
                return None
            state = {"state": rest, "own": [statefile.from_bytes(part) for part in parts]}
            entry = statefile.write_file(self.folder, f"state-{name}.safetensors", statefile.to_bytes(state))
            chain = () if before is None else before.chain
            sizes = () if before is None else before.bytes
            new = Copy(latest.number, latest.check, (*chain, f"export-{name}"), (*sizes, size), entry)
            kept = {(g.number, g.check) for g in saved.generations}
            copies = [c for c in self.copies if (c.number, c.check) in kept and c.number != new.number]
            return self._write([*copies, new], saved.manifest)

        peers.together(write)
        self.learn(peers)
        peers.together(lambda: self._clean(peers.rank))

    def fetch(self, peers: Peers, stores: Sequence[Any], copy: Copy) -> dict[str, Any]:
        """Make the stores those of a copy; {"state": for all, "own": for each rank}."""
        if len(stores) != 1:
            raise NotSupported(f"copies of {len(stores)} stores together: put all tables into one store")
        found = apply_exports(peers, stores[0], [self.folder / name for name in copy.chain])
        if (found.generation, found.check) != (copy.number, copy.check):
            raise CorruptStore(f"{self.folder / copy.chain[-1]} holds {found}, {MANIFEST} says {copy.number}")
        data = peers.together(lambda: statefile.read_checked(self.folder, copy.state))
        return dict(statefile.from_bytes(data))

    def _parent(self, saved: Any, store: Any) -> Copy | None:
        """The copy that the next one may continue."""
        last = self.copies[-1] if self.copies else None
        if last is None or len(last.chain) >= self.chain or sum(last.bytes[1:]) > last.bytes[0]:
            return None
        return last if knows_changes(saved, store, State(saved.lineage, last.number, last.check)) else None

    def _read(self) -> Any:
        path = self.folder / MANIFEST
        try:
            body = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            raise CorruptStore(f"{path} is not JSON") from None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CorruptStore(f"{path} does not describe copies of a group")
        if isinstance(body.get("version"), int) and body["version"] > VERSION:
            raise FormatVersion(str(path), body["version"], VERSION)
        if body.pop("check", None) != _check(body):
            raise CorruptStore(f"{path}: the checksum does not match")
        return body

    def _write(self, copies: Sequence[Copy], group: GroupManifest) -> None:
        body = {
            "format": FORMAT,
            "version": VERSION,
            "copies": json.loads(json.dumps([asdict(c) for c in copies])),
            "group": group.as_dict(),
        }
        statefile.replace_json(self.folder, MANIFEST, {**body, "check": _check(body)})

    def _clean(self, rank: int) -> None:
        """Remove what no copy needs: older ones, and those that were not finished."""
        if rank:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        named = {name for c in self.copies for name in (*c.chain, c.state["file"])}
        for path in self.folder.iterdir():
            if _NAME.fullmatch(path.name) and path.name not in named:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
