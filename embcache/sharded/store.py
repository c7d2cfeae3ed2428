"""A store whose rows live with other ranks: what modules, optimizers and training loops see of it is an EmbeddingStore.

``local`` is an ordinary store of this rank with whatever tiers it has; everything that store promises stays its job.
Collective calls, which every rank makes in the same order: ``stage``, lookups, ``step`` (``apply``, ``agree_finite``),
and everything that reads or replaces rows by id.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..config import TableConfig
from ..errors import BadConfig, NonFiniteGradient, NotSupported, RemoteFault, StaleLookup
from ..layout import TABLE
from ..lookahead import AUTO_DEPTH, LookAhead
from ..optim import HYPER, LR, MULTIPLIER, C
from ..options import Counts
from ..staged import Gathered, Handle, Part, Update, join
from ..store import EmbeddingStore
from .columns import ColumnSums
from .front import Joined, Remote, RemoteFront
from .meeting import is_agreed, meet
from .occurrences import Occurrences
from .plan import Piece, ShardingPlan
from .pooling import reduced

__all__ = ["ShardedStore", "local_table", "local_tables"]


def local_table(table: TableConfig, piece: Piece, world: int) -> TableConfig:
    """A piece of a table as the local store has it: unpooled, a feature for each rank that asks."""
    return dataclasses.replace(
        table.part(*piece.columns, piece.name),
        features=[f"{piece.name}@{rank}" for rank in range(world)],
        pooling="none",
        out_of_range="raise",
        scale_grad_by_freq=table.scale_grad_by_freq and piece.pooled,
    )


def local_tables(tables: Sequence[TableConfig], plan: ShardingPlan) -> list[TableConfig]:
    """What each rank's local store has as tables, the same on all ranks."""
    return [local_table(tables[piece.table], piece, plan.world) for piece in plan.pieces(tables)]


class _Steps(MutableSequence[int]):
    """The steps of each table, as its pieces count them."""

    def __init__(self, steps: list[int], pieces: Sequence[Piece], tables: int) -> None:
        self._steps, self._tables = steps, tables
        self._of = [[p for p, piece in enumerate(pieces) if piece.table == t] for t in range(tables)]

    def __len__(self) -> int:
        return self._tables

    def __getitem__(self, t: Any) -> Any:
        return [self._steps[p] for p in range(self._tables)][t]

    def __setitem__(self, t: Any, step: Any) -> None:
        for p in self._of[t]:
            self._steps[p] = int(step)

    def __delitem__(self, t: Any) -> None:
        raise NotSupported("every table has a step count")

    def insert(self, index: int, value: int) -> None:
        raise NotSupported("every table has a step count")


class _Ready(NamedTuple):
    """An update that all ranks have agreed on."""

    joined: Joined
    update: Update


class ShardedStore(EmbeddingStore):
    """Tables over the ranks of a group.

    Attributes:
        local: this rank's store of the pieces it holds.
        plan: where tables live.
        lanes: what the ranks meet on; ``ledger`` has the bytes and seconds.
    """

    front: RemoteFront  # type: ignore[assignment]

    def __init__(self, tables: Sequence[TableConfig], plan: ShardingPlan, local: EmbeddingStore, lanes: Any) -> None:
        if plan.world != lanes.world:
            raise BadConfig(f"a plan for {plan.world} ranks in a group of {lanes.world}")
        plan.check(tables)
        self.tables, self.plan, self.local, self.lanes = list(tables), plan, local, lanes
        self.pieces = plan.pieces(self.tables)
        if [t.name for t in local.tables] != [piece.name for piece in self.pieces]:
            raise BadConfig(f"the local store has tables {local.names}, the plan {[p.name for p in self.pieces]}")
        self.tiers, self.backend, self.kernels = local.tiers, local.backend, local.kernels
        bags = sum(len(t.feature_names) for t, piece in zip(self.tables, self.pieces, strict=False) if piece.pooled)
        self.front = RemoteFront(plan, self.pieces, local, lanes, bags)
        self.names = [table.name for table in self.tables]
        self.rules = [table.optimizer for table in self.tables]
        self.frozen = frozenset()
        self.counts = [Counts() for _ in self.tables]
        self.guard = None
        self._pid = os.getpid()
        self._describe()
        self._normed = False  # owners renormalise what they return
        self._by_freq = False  # how often ids occur on all ranks is known at the step
        self._adjusting = [dataclasses.replace(table, scale_grad_by_freq=False) for table in self.tables]
        self._occurrences = Occurrences(self.front.wire, local.tables, self.tables, lanes)
        local.row_parts.exchange = ColumnSums(self.pieces, lanes)
        self._gathering()
        self.recovered_from, self._checkpoints = local.recovered_from, None
        self._flushed = self._saved = 0
        self._ready: _Ready | None = None

    @property
    def ledger(self) -> Any:
        """Bytes and seconds by lane."""
        return self.lanes.ledger

    @property
    def version(self) -> int:
        """Counts the changes of rows, the same on every rank."""
        return self.front.version

    @version.setter
    def version(self, value: int) -> None:
        self.front.version = value

    @property
    def steps(self) -> Any:  # type: ignore[override]
        """Steps of each table; the local store counts them."""
        return _Steps(self.local.steps, self.pieces, len(self.tables))

    def renewed(self) -> None:
        """Rows of local stores were replaced behind this store's back; every rank says so."""
        self.front.version += 1

    @property
    def on_nonfinite(self) -> str:
        """Backward only notes what is wrong: all ranks raise it, at the step."""
        return "agreed"

    # stage, lookup ------------------------------------------------------------------------------------------------

    def stage(
        self,
        batch: Any,
        features: tuple[str, ...] | None = None,
        *,
        training: bool | None = None,
        overflow: bool = True,
    ) -> Handle:
        """Collective. As ``EmbeddingStore.stage``; a rank's error is raised by all. What an owner cannot make resident
        is raised, by all, at the lookup."""
        try:
            return super().stage(batch, features, training=training, overflow=overflow)
        except Exception as error:
            if is_agreed(error):
                raise
            self.front.refuse(error)
            raise

    def lookahead(
        self,
        loader: Iterable[Any],
        depth: int | Literal["auto"] = 1,
        *,
        ids: Callable[[Any], Any] | None = None,
        window: int = 0,
        training: bool = True,
    ) -> LookAhead:
        """Collective: as ``EmbeddingStore.lookahead``, every rank with as many batches. With ``depth="auto"`` rows that
        do not fit into an owner's cache get memory beyond it instead of waiting, which ranks could not agree on. Where
        it ends early, what was due is staged first, since other ranks may have begun it."""
        waits = depth == "auto"
        stage = self.front.ahead(
            lambda jagged, overflow: self._stage_ahead(jagged, overflow or waits, training), training
        )
        depth = AUTO_DEPTH if depth == "auto" else depth
        return LookAhead(stage, loader, depth, ids, window, self.announce if window else None, steady=True)

    def read_part(self, part: Part, out_dtype: int) -> Tensor:
        """Collective unless the rows were read since the last step."""
        if not part.open:
            raise StaleLookup("this handle was released: stage the batch again")
        self.require_usable()
        slabs = self.front.read(part.lease)
        part.version = self.version
        features, slots, offsets, weights = self.front.view(part)
        pooled = [] if part.lease.pooled is None else [part.lease.pooled]
        flat = self.kernels.pooled_lookup(
            slabs, self.front.descriptions(pooled), features, slots, offsets, weights, part.numel, out_dtype
        )
        return flat.resize_(part.shape)

    def fetch(self, handle: Handle) -> None:
        """Collective: bring the rows of a staged batch here; lookups until the next step find them."""
        self.require_usable()
        for part in handle.parts:
            self.front.read(part.lease)

    def weight_gradient(self, part: Part, grad: Tensor) -> Tensor:
        if part.version != self.version:
            raise StaleLookup(
                "the gradient of per_sample_weights was asked for after the rows it needs were updated: "
                "call backward() before step()"
            )
        features, grad = part.update_features(part.readable(grad))
        return self.kernels.grad_weights(
            part.lease.slabs, self.front.described, self.front.features(features), part.slots(), part.offsets, [grad]
        )

    # gradients --------------------------------------------------------------------------------------------------

    def update(self, handle: Handle, grads: Mapping[str, Tensor]) -> None:
        """Gather the gradients of a lookup's outputs; what is not finite is raised, by all ranks, at the step."""
        for part, grad in [(part, part.merge(grads)) for part in handle.parts]:
            self.gather(part, grad)

    def _keep(self, part: Part, grad: Tensor) -> None:
        self._unready()
        super()._keep(part, grad)

    def discard(self) -> None:
        """Forget gathered gradients."""
        self._unready()
        super().discard()

    def _unready(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None and ready.joined.own:
            ready.joined.handle.release()

    def agree_finite(self, found: bool = False) -> bool:
        """Collective: everything that can go wrong with the coming step goes wrong here, on all ranks, and nothing has
        changed. A gradient that is not finite anywhere is everybody's ``problem``. Returns whether any rank has
        ``found`` an infinity. Once agreed it costs nothing until another gradient is gathered."""
        if self._ready is not None:
            return False
        ready, error = None, None
        try:
            ready = self._prepared()
        except Exception as problem:
            error = problem
        numbers = [item.source.lease.number for item in self._pending if item.source.lease is not None]
        signature = zlib.crc32(np.array([*numbers, -1, *sorted(self.frozen)], dtype=np.int64).tobytes())
        rows = np.zeros((self.plan.world, 2), dtype=np.int64)
        rows[:] = self.problem is not None, found
        try:
            heads, _ = meet(self.lanes.grads, signature, error, None, rows)
        except BaseException:
            if ready is not None and ready.joined.own:
                ready.joined.handle.release()
            raise
        self._ready = ready
        bad = np.flatnonzero(heads[:, 0])
        if len(bad) and self.problem is None:
            self.problem = RemoteFault.of(int(bad[0]), NonFiniteGradient.__name__, "a gradient is not finite")  # type: ignore[assignment]
            self._marked[:] = float("nan")
        return bool(heads[:, 1].any())

    def _prepared(self) -> _Ready | None:
        pending = self._pending
        if not self.pending_tables():
            return None
        self.require_writable("step")
        for item in pending:
            item.check_unchanged()
        leases: list[Remote] = list({item.source.lease.number: item.source.lease for item in pending}.values())
        joined = self.front.join(leases, self.frozen)
        return _Ready(joined, self._joined_update(pending, joined))

    def _joined_update(self, pending: Sequence[Gathered], joined: Joined) -> Update:
        items, slots, firsts, first = [], [], {}, len(self.pieces)
        for item in pending:
            lease: Remote = item.source.lease
            mine = lease.out if joined.slots is None else joined.slots[lease.number]
            if lease.pooled is not None and lease.number not in firsts:
                firsts[lease.number] = first
                first += len(lease.pooled.dims)
            if lease.pooled is not None:
                item, mine = self._reduced(item, mine, firsts[lease.number])
            items.append(item)
            slots.append(mine)
        update = join(items, self.frozen, slots)
        return update._replace(features=self.front.features(update.features))

    def _reduced(self, item: Gathered, slots: Tensor, first: int) -> tuple[Gathered, Tensor]:
        """A gradient as that of the sums its bags are made of; features of frozen tables are left out."""
        part, pooled = item.part._clone(), item.source.lease.pooled
        assert part.offsets is not None
        seen = reduced(pooled, part.features, part.offsets, part.weights, first)
        kept = torch.tensor([t not in self.frozen for t in part.features[:, TABLE].tolist()], dtype=torch.bool)
        part.features, part.offsets, part.weights = seen.features[kept], seen.offsets, seen.weights
        return item._replace(part=part), seen.slots(slots)

    def apply(self, hyper: Tensor) -> int:
        """Collective. Sum what was gathered, send each id's sum to its owner once, and apply the rules there; returns
        the rows updated here."""
        self.agree_finite()
        if self.problem is not None and self.check_finite:
            problem = self.problem
            self.discard()
            raise problem
        ready = self._ready
        if ready is None:
            self.discard()
            return 0
        if self._occurrences.scaled:
            ready = _Ready(ready.joined, self._scaled(ready.joined))
        self.local.frozen = frozenset(p for p, piece in enumerate(self.pieces) if piece.table in self.frozen)
        for part, rows in self.front.send_gradients(ready.joined, self._summed(ready)):
            self.local._keep(part, rows)
        if self._occurrences.counted:
            self._occurrences.tell(self._pending, ready.joined, self.local.front)
        count = self.local.apply(hyper[[piece.table for piece in self.pieces]])
        self.version += 1
        self.rows_updated += count
        self.discard()
        return count

    def _scaled(self, joined: Joined) -> Update:
        """The update with gradients divided by how often their id occurs, of tables that ask for it."""
        items = []
        for item, weights in zip(self._pending, self._occurrences.weights(self._pending), strict=True):
            part, own = item.part._clone(), item.part.float_weights()
            part.weights = weights if own is None else own * weights
            items.append(item._replace(part=part))
        return self._joined_update(items, joined)

    def _summed(self, ready: _Ready) -> list[Tensor]:
        """By dimension: the sum of each id's gradients in (call, feature, position) order."""
        buffers, slabs = self.front.zeros(ready.joined)
        hyper = torch.zeros(len(slabs), HYPER, dtype=torch.float64)
        hyper[:, LR], hyper[:, C], hyper[:, MULTIPLIER] = -1.0, 1.0, 1.0
        none = [torch.empty(0, dtype=torch.uint8)] * len(slabs)
        nobody = [torch.empty(0, dtype=torch.int64)] * len(slabs)
        features, slots, offsets, weights, grads = ready.update
        described = self.front.descriptions(ready.joined.pooled)
        self.kernels.fused_update(slabs, none, described, hyper, features, slots, offsets, weights, grads, nobody)
        return buffers

    # rows by id: every call is collective, each rank gives ids of its own ------------------------------------------

    def _checked(self, t: int, ids: Tensor) -> Tensor:
        error, checked = None, torch.empty(0, dtype=torch.int64)
        try:
            checked = super()._checked(t, ids)
        except Exception as problem:
            error = problem
        meet(self.lanes.rows, zlib.crc32(b"ids", t), error)
        return checked

    @property
    def generation(self) -> int:
        """Of this rank's store."""
        return self.local.generation

    # the store as a whole ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Collective: as ``EmbeddingStore.stats``; rows written are counted over all ranks, the rest is this rank's."""
        return super().stats()

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingStore:
        raise NotSupported("copying a sharded store: copy the model before ec.shard")

    def __reduce__(self) -> tuple[Any, ...]:
        raise NotSupported("pickling a sharded store: it belongs to a group of processes")

    def close(self) -> None:
        """Close this rank's store; the lanes stay, other stores may use them."""
        self.local.close()
        self._pid = -1
