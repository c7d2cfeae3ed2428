"""Checkpoints of a group of ranks: numbered generations, each complete on all ranks or absent, committed by one rename.

A folder holds ``manifest.json`` of the group and for every rank a folder ``rank-00000`` with its generations, as
``embcache.checkpoint`` writes them. A save is made on every rank, then all say so to one another, then rank 0 replaces
the manifest, then all learn of it. So until the rename the generation before is what there is, on every rank: what a
rank saved in vain is forgotten when its folder is next opened. Ranks keep what the manifest names.

The state given to ``save`` is rank 0's for all, except what is named in ``per_rank``, which each rank gets back from
itself (from rank 0 where the number of ranks has changed). Other ranks, or the same under another plan, read a
generation too: rows move to whoever holds them now (``reshard.py``), and the generation is committed anew, in its new
place under its old number, because it holds the same.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import schema, statefile
from ..checkpoint import Checkpoints, Generation
from ..config import TableConfig
from ..errors import BadConfig, CorruptStore, SchemaMismatch
from ..lock import FolderLock
from ..transfer.importing import IMPORTED
from ..transfer.manifest import State
from .manifest import GroupGeneration, GroupManifest, Part, placed
from .peers import Peers
from .plan import ShardingPlan
from .reshard import Lost, Resharded, reshard, seen
from .shard import RANK_FOLDER, rank_folder

__all__ = ["GroupCheckpoints"]

GROUP = "group"  # in the notes of a rank's generation: the number of the group's that it is made for


class GroupCheckpoints:
    """The generations of a group of ranks; what ``embcache.checkpoint.Checkpoints`` is to one process.

    Every method that is not a property is collective: all ranks call it, at the same point and with the same arguments
    (``state`` apart), and what goes wrong on one is raised by all. Stores are sharded ones.

    Args:
        folder: of the group; on a file system of its own for every rank, or shared.
        lanes: of the group.
        keep: newest generations kept; the best is kept besides.
        per_rank: keys of the state that each rank keeps for itself.
        copies: ``Copies`` of another folder, that survive the loss of this one or of parts of it; each ``save`` makes
            one before it returns.
        tell: gets lines for people, on rank 0.
    """

    def __init__(
        self,
        folder: str | Path,
        lanes: Any,
        keep: int = 2,
        *,
        per_rank: Sequence[str] = ("random",),
        copies: Any = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep}, must be at least 1")
        self.folder, self.keep = Path(folder).absolute(), keep
        self.peers = Peers(lanes)
        self.per_rank = tuple(per_rank)
        self.copies = copies
        self.moved: Resharded | None = None
        """What the last ``load`` moved between ranks, on this rank."""
        self._tell = tell
        self._own: Checkpoints | None = None
        self._lock: FolderLock | None = None
        self._current: tuple[GroupGeneration, list[int]] | None = None
        self._saving: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._manifest = GroupManifest()
        self._learn()

    # what there is ----------------------------------------------------------------------------------------------

    @property
    def generations(self) -> list[GroupGeneration]:
        """Committed on all ranks, oldest first."""
        return list(self._manifest.generations)

    @property
    def lineage(self) -> str:
        """Hex digits that tell these generations from those of any other folder; "" before the first."""
        return self._manifest.lineage

    @property
    def latest(self) -> GroupGeneration | None:
        """The newest generation."""
        return self._manifest.latest

    @property
    def best(self) -> GroupGeneration | None:
        """The generation last saved with ``best=True``."""
        return next((g for g in reversed(self.generations) if g.best), None)

    @property
    def manifest(self) -> GroupManifest:
        """As it was last read or written."""
        return self._manifest

    def plan(self, store: int = 0) -> ShardingPlan | None:
        """The plan of the newest generation for as many ranks as there are now; None before the first."""
        latest = self.latest
        return None if latest is None else ShardingPlan.from_dict(latest.plans[store]).for_world(self.peers.world)

    def find(self, which: str | int = "latest") -> GroupGeneration:
        """A generation by "latest", "best" or number; FileNotFoundError where there is none. No exchange."""
        if which == "latest":
            found = self.latest
        elif which == "best":
            found = self.best
        elif isinstance(which, int) and not isinstance(which, bool):
            found = next((g for g in self.generations if g.number == which), None)
        else:
            raise BadConfig(f"generation {which!r} of {self.folder}: must be 'latest', 'best' or a number")
        if found is None:
            raise FileNotFoundError(f"{self.folder} holds no checkpoint{'' if which == 'latest' else f' {which}'}")
        return found

    # opening ----------------------------------------------------------------------------------------------------

    def claim(self, tables: Sequence[TableConfig] | None = None) -> Path:
        """Keep other processes from writing here, and bring this rank's folder back to what the group committed; before
        a store on disk is opened in it. Returns that folder: one whose rows have the form of ``tables``, the local
        ones, or a new one where there are others. StoreLocked; CorruptStore where the manifest was lost."""
        self.peers.together(self._lock_group)
        self._learn()
        self.peers.together(lambda: self._claim_own(tables))
        return self.own.folder

    @property
    def own(self) -> Checkpoints:
        """This rank's part."""
        if self._own is None:
            raise BadConfig(f"{self.folder}: call claim() before stores are saved or loaded")
        return self._own

    def _learn(self) -> None:
        """Rank 0's manifest is everybody's, whatever lies on their disks."""
        body = self.peers.together(lambda: GroupManifest.read(self.folder).as_dict() if self.peers.rank == 0 else None)
        mine = self._manifest = GroupManifest.from_dict(self.peers.told(body), str(self.folder))
        copied = GroupManifest() if self.copies is None else self.copies.learn(self.peers)
        if copied.latest is None:
            return
        if mine.latest is None:
            self._manifest = copied
        elif mine.lineage != copied.lineage:
            raise BadConfig(f"{self.copies.folder} holds copies of another run than the one in {self.folder}")
        elif copied.latest.number > mine.latest.number:  # an older state of this disk
            self._manifest = copied

    def _lock_group(self) -> None:
        if self.peers.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock.take(self.folder)

    def _claim_own(self, tables: Sequence[TableConfig] | None) -> None:
        rank, latest = self.peers.rank, self.latest
        name = rank_folder("", rank).name
        if latest is not None and rank < latest.world:
            name = latest.ranks[rank].folder
        if tables is not None and not self._fits(name, tables):
            taken = self._manifest.named() | {name}
            name = next(other for k in range(1, len(taken) + 2) if (other := f"rank-{rank:05d}.{k}") not in taken)
            shutil.rmtree(self.folder / name, ignore_errors=True)  # of a move that was not finished
        own = Checkpoints(self.folder / name, keep=1)
        own.claim()
        self._own = own
        own.held = self._manifest.held(name, own.lineage)
        if not own.held:
            self._check_forgotten(own)
        if own.held <= {g.number for g in own.generations}:  # else it is not what the manifest knew: nothing is removed
            own.retain(own.held)

    def _fits(self, name: str, tables: Sequence[TableConfig]) -> bool:
        saved = Checkpoints(self.folder / name)
        named = [g for g in saved.generations if g.number in self._manifest.held(name, saved.lineage)]
        try:
            return all(not g.disk or _agree(saved.tables(g.number), tables) for g in named)
        except SchemaMismatch:
            return False

    def _check_forgotten(self, own: Checkpoints) -> None:
        """Generations of a folder that the manifest does not name were never committed, or it is not the manifest that
        was written over them."""
        for generation in own.generations:
            made_for = generation.notes.get(GROUP)
            if not isinstance(made_for, dict):
                raise CorruptStore(f"{own.folder} holds generations that no group of ranks has made")
            others = self.lineage and made_for["lineage"] not in ("", self.lineage)
            if others or (not self.lineage and made_for["number"] > 1):
                raise CorruptStore(
                    f"{own.folder} holds a part of generation {made_for['number']} of a group, but {self.folder} has "
                    f"{'another manifest' if self.lineage else 'no manifest.json'}: it was lost, or the folder is "
                    "another group's; remove the folder where its rows are not wanted"
                )

    # saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        state: Any,
        stores: Sequence[Any] = (),
        *,
        notes: dict[str, Any] | None = None,
        best: bool = False,
        wait: bool = True,
    ) -> GroupGeneration | None:
        """Commit a new generation of all ranks and drop those no longer kept.

        ``wait=False`` returns (None) once everything is copied; another thread makes it durable and commits, and the
        next ``save`` or ``wait`` raises, on all ranks, what went wrong there (with ``copies`` all is done at once).
        Raises: StorageFull with everything committed before intact, RuntimeError where gradients wait for the step: on
        the rank concerned; RemoteFault on the others. The same call may be tried again.
        """
        self.wait()
        number = 1 + max((g.number for g in self.generations), default=0)
        plans = [store.plan.as_dict() for store in stores]

        def commit(part: Generation) -> GroupGeneration:
            new = GroupGeneration(number, part.notes["notes"], best, 0, plans, ())
            return self._commit(part, lambda parts, check: self._manifest.with_new(
                dataclasses.replace(new, ranks=parts, check=check), self.keep))  # fmt: skip

        noted = {GROUP: {"lineage": self.lineage, "number": number}, "notes": notes or {}}
        part = self._part_of(state)
        new = self._save(part, stores, noted, commit, wait or self.copies is not None)
        if self.copies is not None:
            self.copies.add(self, stores, part["state"], part["own"])
        return new

    def _save(
        self,
        state: Any,
        stores: Sequence[Any],
        notes: dict[str, Any],
        commit: Callable[[Generation], GroupGeneration],
        wait: bool,
    ) -> GroupGeneration | None:
        locals_ = [store.local for store in stores]
        own = self.own

        def save() -> Generation:
            if any(store.pending_tables() for store in stores):
                raise RuntimeError("a checkpoint between backward and step would lose gradients: save after step()")
            return own.save(state, locals_, notes=notes, wait=wait)

        part = self.peers.patiently(save)
        versions = [local.version for local in locals_]
        if wait:
            new = commit(part)
            self._current = new, versions
            return new

        def finish() -> None:
            try:
                self.peers.patiently(own.wait)
                self._current = commit(next(g for g in own.generations if g.number == part.number)), versions
            except BaseException as error:  # raised again by the next call
                self._failure = error

        self._saving = threading.Thread(target=finish, name="embcache-group-commit")
        self._saving.start()
        return None

    def wait(self) -> None:
        """Return when a save in the background is committed; raises what went wrong with it, on all ranks."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _part_of(self, state: Any) -> dict[str, Any]:
        """What this rank saves of the state: rank 0 all of it, the others what is their own."""
        own = {key: state[key] for key in self.per_rank if isinstance(state, dict) and key in state}
        if self.peers.rank:
            return {"state": None, "own": own}
        rest = {key: value for key, value in state.items() if key not in own} if own else state
        return {"state": rest, "own": own}

    def _commit(self, part: Generation, change: Callable[[tuple[Part, ...], int], GroupManifest]) -> GroupGeneration:
        """All parts are on the disks: rank 0 makes the generation exist, and everybody learns of it."""
        own = self.own
        own.held |= {part.number}  # from here on the manifest may name it, whatever becomes of this process
        mine = Part(own.folder.name, own.lineage, part.number, part.check)
        parts = tuple(Part(**each) for each in self.peers.all_told(dataclasses.asdict(mine)))

        def write() -> Any:
            if self.peers.rank:
                return None
            manifest = change(parts, secrets.randbits(32))
            manifest.write(self.folder)
            return manifest.as_dict()

        body = self.peers.together(write)
        self._manifest = GroupManifest.from_dict(self.peers.told(body), str(self.folder))
        own.held = self._manifest.held(own.folder.name, own.lineage)
        self._sweep()
        latest = self.latest
        assert latest is not None
        return latest

    def _sweep(self) -> None:
        """Remove folders of ranks that no generation names and nobody is about to use."""
        using = {*self.peers.all_told(self.own.folder.name), *self._manifest.named()}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if RANK_FOLDER.fullmatch(path.name) and path.name not in using:
                shutil.rmtree(path, ignore_errors=True)

    # loading ----------------------------------------------------------------------------------------------------

    def load(self, stores: Sequence[Any] = (), which: str | int = "latest", *, disk_only: bool = False) -> Any:
        """Read a generation ("latest", "best" or a number) into the stores and return its state.

        Where other ranks hold it than the stores' plans say, rows move; the newest generation is then committed anew in
        its new place. CorruptStore where a rank's folder is missing, foreign or not what the manifest names, before any
        store has changed.
        """
        self.wait()
        generation = asked = self.find(which)
        self.moved = None
        self._current = None
        newest, moves = self.latest, False
        try:
            moves = not self._in_place(generation, stores)
            part = self._reshard(generation, stores) if moves else self._load_own(generation, stores)
        except Lost as lost:
            generation, part = self._recover(generation, stores, lost)
            moves = True
        if moves and asked == newest:
            self._recommit(generation, part, stores)
        self._current = generation, [store.local.version for store in stores]
        for store in stores:
            store.discard()
            store.renewed()
        return _joined(part["state"], part["own"])

    def _recover(
        self, generation: GroupGeneration, stores: Sequence[Any], lost: Lost
    ) -> tuple[GroupGeneration, dict[str, Any]]:
        """A generation, or instead of the newest one the last that was copied, from the copies."""
        copies, newest = self.copies, generation == self.latest
        listed = [g for g in reversed(self.generations) if g == generation or newest]
        able = [g for g in listed if copies is not None and copies.find(g.number, g.check) is not None]
        if not able:
            raise lost
        found = able[0]
        if self._tell is not None and self.peers.rank == 0:
            self._tell(f"{lost}: generation {found.number} comes from {copies.folder}")
        self._empty(stores)
        state = copies.fetch(self.peers, stores, copies.find(found.number, found.check))
        own = state["own"]
        return found, {"state": state["state"], "own": own[self.peers.rank if len(own) == self.peers.world else 0]}

    def _empty(self, stores: Sequence[Any]) -> None:
        kept = [description for g in self.own.generations for description in g.disk]
        for store in stores:
            store.local.begin_restore(None, kept if store.local.durable is not None else ())
            store.local.load_extra_state({})

    def _in_place(self, generation: GroupGeneration, stores: Sequence[Any]) -> bool:
        """Whether every rank holds what it held."""
        own = self.own
        mine = generation.world == self.peers.world
        mine = mine and placed(generation.plans) == placed([store.plan.as_dict() for store in stores])
        part = generation.ranks[self.peers.rank] if self.peers.rank < generation.world else None
        mine = mine and part is not None and part.folder == own.folder.name
        if mine and part is not None:
            saved = self._there(part)
            mine = saved is None or [s.disk for s in saved] == [store.local.durable is not None for store in stores]
        return all(self.peers.all_told(mine))

    def _there(self, part: Part) -> Any:
        try:
            return self.own.stores(part.number)
        except (CorruptStore, FileNotFoundError):
            return None

    def _load_own(self, generation: GroupGeneration, stores: Sequence[Any]) -> dict[str, Any]:
        part = generation.ranks[self.peers.rank]
        problems = self.peers.all_told(self.peers.together(lambda: seen(self.folder, part)))
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise Lost(f"rank {rank} of generation {generation.number}: {problem}")
        found = self.peers.patiently(lambda: self.own.load([store.local for store in stores], part.number))
        return {"state": _broadcast(self.peers, [found["state"]]), "own": found["own"]}

    def _reshard(self, generation: GroupGeneration, stores: Sequence[Any]) -> dict[str, Any]:
        dense, here, self.moved = reshard(self.peers, self.folder, generation, stores, self.own, self.own.folder.name)
        first = _broadcast(self.peers, dense)
        own = here[0] if here[0] is not None else first
        self._report(generation)
        return {"state": first["state"], "own": own["own"]}

    def _report(self, generation: GroupGeneration) -> None:
        assert self.moved is not None
        mine = self.moved.totals()
        said = self.peers.all_told([mine.rows, mine.bytes, mine.wire])
        rows, size, wire = (sum(each[k] for each in said) for k in range(3))
        if self._tell is not None and self.peers.rank == 0:
            self._tell(
                f"resharded generation {generation.number} from {generation.world} to {self.peers.world} ranks: "
                f"{rows:,} rows, {size:,} bytes changed ranks, {wire:,} bytes travelled"
            )

    def _recommit(self, generation: GroupGeneration, state: dict[str, Any], stores: Sequence[Any]) -> None:
        """The generation lies with the ranks of today."""
        plans = [store.plan.as_dict() for store in stores]
        notes = {GROUP: {"lineage": self.lineage, "number": generation.number}, "notes": generation.notes}
        whole = {"state": state["state"] if self.peers.rank == 0 else None, "own": state["own"]}

        def commit(part: Generation) -> GroupGeneration:
            return self._commit(part, lambda parts, _: self._manifest.moved(
                dataclasses.replace(generation, plans=plans, ranks=parts)))  # fmt: skip

        self._save(whole, stores, notes, commit, wait=True)

    # what exports ask -------------------------------------------------------------------------------------------

    def state_of(self, store: Any, any_of: bool = False) -> Any:
        """The state whose rows a store holds. BadConfig where it was trained since (``any_of``: [] then, else a list of
        all that it may be called)."""
        self.wait()
        current = self._current
        fits = current is not None and store.local.version in current[1] and not store.pending_tables()
        if not all(self.peers.all_told(fits)):
            if any_of:
                return []
            raise BadConfig("an export holds what is committed: save() or load() first")
        assert current is not None
        state = State(self.lineage, current[0].number, current[0].check)
        noted = current[0].notes.get(IMPORTED)
        return state if not any_of else [state] if noted is None else [State(**noted), state]

    def number_of(self, state: State) -> int | None:
        """The number in this rank's folder that a state has; None where it is not known any more."""
        for number, check, parts in reversed(self._manifest.history):
            if (self.lineage, number, check) == (state.lineage, state.generation, state.check):
                return parts[self.peers.rank]
        return None

    def forget(self, store: Any) -> None:
        """A store is as in the newest generation again, or empty where there is none."""
        if self.latest is not None:
            self.load([store])
        else:
            self._empty([store])
            store.renewed()

    # looking after ----------------------------------------------------------------------------------------------

    def tables(self, which: str | int = "latest") -> list[TableConfig]:
        """The local tables of this rank's store on disk."""
        return self.own.tables(self.find(which).ranks[self.peers.rank].number)

    def verify(self) -> Iterator[str]:
        """A line for each file of this rank that is not what was written."""
        return self.own.verify()


def _joined(rest: Any, own: dict[str, Any]) -> Any:
    """The state as it was given to ``save``."""
    return {**rest, **own} if own else rest


def _agree(saved: Sequence[TableConfig], tables: Sequence[TableConfig]) -> bool:
    schema.agree(saved, tables)
    return True


def _broadcast(peers: Peers, mine: Sequence[Any]) -> Any:
    """The state of the one rank that has one, on all."""
    holders = [rank for rank, has in enumerate(peers.all_told(bool(mine) and mine[0] is not None)) if has]
    if not holders:
        return None
    root = holders[0]
    if peers.world == 1:
        return mine[0]
    packed = b""
    if peers.rank == root:
        packed = statefile.to_bytes(mine[0])
    return statefile.from_bytes(peers.broadcast(packed, root))
