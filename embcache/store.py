"""Tables and the tiers their rows live in: stage, lookup, update, release.

``stage(batch)`` makes the rows of a batch resident and pins them; ``lookup`` pools them; ``update`` gathers gradients;
``step`` (or a ``SparseOptimizer``) sums the gradients of equal ids in (call, feature, position) order and applies each
table's rule once a row. Reading never writes.

>>> import torch, embcache as ec
>>> table = ec.TableConfig("user", num_embeddings=100, embedding_dim=2, init=ec.init.Constant(1.0),
...                        optimizer=ec.optim.SGD(lr=0.5))
>>> store = ec.EmbeddingStore([table])
>>> batch = ec.KeyedJaggedTensor(["user"], torch.tensor([3, 3, 9]), lengths=torch.tensor([2, 1]))
>>> with store.stage(batch) as handle:
...     pooled = store.lookup(handle)
...     store.update(handle, {"user": torch.ones(2, 2)})
>>> pooled["user"]
tensor([[2., 2.],
        [1., 1.]])
>>> store.step(), store.weight("user")[3]
(2, tensor([0., 0.]))
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from . import kernels, options
from .cache import open_chain
from .config import TableConfig, check_tables
from .errors import BadConfig, EmbcacheError, NonFiniteGradient, NoOptimizer, NotSupported, StaleLookup
from .init import table_key
from .jagged import KeyedJaggedTensor
from .kernels.memory import available_bytes
from .layout import LayoutCache, PartLayout
from .lookahead import LookAhead
from .optim import HYPER, STEP
from .rowparts import Arenas, RowParts
from .staged import Gathered, Handle, Part, join
from .store_disk import StoreDisk, check_folder, tables_of
from .tiers import Lmdb, Ram


class EmbeddingStore(StoreDisk):
    """Embedding tables over a chain of tiers.

    ``stage``, ``release`` of handles and garbage collection may happen on any thread; everything else on one thread at
    a time. What is saved: rows and optimizer state, step counts, admission filters and expiry marks; not statistics,
    scores of the cache, frozen tables or gathered gradients.

    Args:
        tables: their descriptions; names and features are unique.
        tiers: where rows live, fastest first; ``[Ram()]`` if None. Each but the last is a bounded cache; the last holds
            everything. A tier on disk that has committed rows gives them back (see ``recovered_from``).
        backend: "auto" (compiled kernels where they load), "native" or "reference" (plain torch).

    Raises:
        StoreLocked, SchemaMismatch, CorruptStore, FormatVersion: of a tier on disk, before anything is written.
        TableTooLarge: tables that were to live in memory do not fit.
    """

    def __init__(
        self, tables: Sequence[TableConfig], tiers: Sequence[Any] | None = None, *, backend: str = "auto"
    ) -> None:
        self.tables = check_tables(tables)
        if tiers is not None and not isinstance(tiers, Sequence):
            raise BadConfig(f"tiers = {tiers!r}, must be a list of tiers, fastest first")
        self.tiers = [Ram()] if tiers is None else list(tiers)
        self.backend = backend
        self.kernels = kernels.get(cast(Any, backend))
        check_folder(self.tables, self.tiers)
        self.front = open_chain(self.tables, self.tiers, self.kernels)
        self.names = [table.name for table in self.tables]
        self.rules = [table.optimizer for table in self.tables]
        self.steps = [0] * len(self.tables)
        self.version = 0
        self.frozen: frozenset[int] = frozenset()
        self.counts = [options.Counts() for _ in self.tables]
        self.guard: Callable[[], None] | None = None
        self._pid = os.getpid()
        try:
            self._describe()
            self._gathering()
            self._open_disk()
        except BaseException:
            self.front.close()
            raise

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        readonly: bool = False,
        rows: int | dict[str, int] | None = None,
        backend: str = "auto",
    ) -> EmbeddingStore:
        """Reopen a store from its folder alone, tables as they were declared; ``rows`` of each are cached (None: a
        sixteenth of memory over all tables). ``readonly``: for serving, beside a writer; see ``refresh``."""
        front = Ram(rows=rows) if rows is not None else Ram(bytes=cache_bytes())
        return cls(tables_of(path), [front, Lmdb(path, readonly=readonly)], backend=backend)

    def _describe(self) -> None:
        """Everything the kernels are told that never changes."""
        rows = [
            (
                t.embedding_dim,
                t.dtype_code,
                t.state_offset,
                t.optimizer.code,
                table_key(t.seed, t.random_name, "rounding"),
                t.flags,
                t.first_column,
                t.whole_dim,
            )
            for t in self.tables
        ]
        self._described = torch.tensor(rows, dtype=torch.int64).view(-1, 8)
        self._limits = torch.tensor([-1 if t.unbounded else t.num_embeddings for t in self.tables], dtype=torch.int64)
        self._slabs = [arena.slab for arena in self.front.arenas]
        self._written = [arena.written for arena in self.front.arenas]
        self._slot_ids = [arena.slot_ids for arena in self.front.arenas]
        self.layouts = LayoutCache(self.tables)
        self._padded = any(t.padding_idx is not None for t in self.tables)
        self._normed = any(t.max_norm is not None for t in self.tables)
        arenas = Arenas(self.kernels, self._described, self._slabs, self._written, self._slot_ids)
        self.row_parts = RowParts(self.tables, arenas)
        self._by_freq = any(t.scale_grad_by_freq for t in self.tables)
        self._adjusting = self.tables  # with what part.adjusted is to see to

    def _gathering(self) -> None:
        """Gradients waiting for the step, and the markers through which torch's tools see them.

        A marker's ``grad`` is 1, so that what GradScaler multiplies it by can be read off, or NaN where a gradient was
        not finite.
        """
        self.anchor = torch.zeros(1, requires_grad=True)
        self.markers = [torch.zeros(1, requires_grad=True) for _ in self.tables]
        self._marks = torch.ones(len(self.tables))
        for t, marker in enumerate(self.markers):
            marker.grad = self._marks[t : t + 1]
        self._marked = self._marks.numpy()  # the same memory
        self._pending: list[Gathered] = []
        self._owner: weakref.ref[Any] | None = None
        self.problem: NonFiniteGradient | None = None
        self.check_finite = True
        self.stages = self.ids_staged = self.rows_updated = 0

    # stage, lookup, release -------------------------------------------------------------------------------------

    def stage(
        self,
        batch: Any,
        features: tuple[str, ...] | None = None,
        *,
        training: bool | None = None,
        overflow: bool = True,
    ) -> Handle:
        """Make the rows of ``features`` (None: of every table's features) in ``batch`` resident and pin them.

        ``batch`` is a ``KeyedJaggedTensor``, ours or TorchRec's. Ids out of range raise ``IdOutOfRange`` before
        anything is touched, unless their table says otherwise. The handle owns the pins: a context manager, also
        released by garbage collection. ``training=False`` (None: where torch's gradients are off) stages for reading
        only: no cache keeps a row because of it, and an update with the handle raises. ``overflow=False``: raise
        ``CacheTooSmall``, with nothing staged, where the rows do not fit into the cache beside those that are pinned;
        otherwise they get memory beyond it until the handle is released.
        """
        self.require_usable()
        training = torch.is_grad_enabled() if training is None else training
        batch, given, layouts = self._checked_batch(batch, features)
        device = given.device()
        parts: list[Part] = []
        try:
            parts.extend(Part(layout, batch, given, self.front, training, overflow) for layout in layouts)
        except BaseException:
            Handle(batch, parts, device).release()
            raise
        self.stages += 1
        self.ids_staged += batch.values().numel()
        return Handle(batch, parts, device)

    def _checked_batch(
        self, batch: Any, features: tuple[str, ...] | None
    ) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor, tuple[PartLayout, ...]]:
        """(the batch as it will be read, as it was given, how its parts lie); what is wrong with its ids raises."""
        batch = given = KeyedJaggedTensor.adopt(batch)
        device = batch.device()
        if device.type != "cpu":
            batch = batch.to("cpu")
        wanted = self.layouts.all_features if features is None else features
        layouts = self.layouts.get(wanted, batch)
        bad = any(
            self.kernels.check_ids(batch.values(), batch.offsets(), layout.features, self._limits) >= 0
            for layout in layouts
        )
        if bad or self._padded:
            named = [at for layout in layouts for at in zip(layout.names, layout.tables, layout.columns, strict=True)]
            batch = options.repair(batch, named, self.tables, self.counts)
        return batch, given, layouts

    def lookahead(
        self,
        loader: Iterable[Any],
        depth: int | Literal["auto"] = 1,
        *,
        ids: Callable[[Any], Any] | None = None,
        window: int = 0,
        training: bool = True,
    ) -> LookAhead:
        """``for batch in store.lookahead(loader, depth=2)``: the rows of later batches are staged on another thread
        while this one trains, those of the features that tables read. Results are the same bits for every depth; see
        ``LookAhead``."""

        def stage(jagged: Any, overflow: bool) -> Handle:
            return self._stage_ahead(jagged, overflow, training)

        return LookAhead(stage, loader, depth, ids, window, self.announce if window else None)

    def _stage_ahead(self, jagged: Any, overflow: bool, training: bool) -> Handle:
        there = set(KeyedJaggedTensor.adopt(jagged).keys())
        features = tuple(name for name in self.layouts.all_features if name in there)
        return self.stage(jagged, features, training=training, overflow=overflow)

    def announce(self, batch: Any, ahead: int) -> None:
        """Tell the cache that the ``ahead``-th batch from now (1: the next that is staged) needs these ids:
        policy="lookahead" keeps their rows. Never raises for what is wrong with the batch; ``stage`` will."""
        with contextlib.suppress(EmbcacheError):
            batch = KeyedJaggedTensor.adopt(batch)
            there = set(batch.keys())
            features = tuple(name for name in self.layouts.all_features if name in there)
            for layout in self.layouts.get(features, batch):
                self.front.announce(layout.features, batch.values(), batch.offsets(), ahead)

    def lookup(self, handle: Handle) -> dict[str, Tensor]:
        """Outputs by feature: [B, D] pooled, [ids, D] unpooled; fp32, no gradient."""
        out: dict[str, Tensor] = {}
        for part in handle.parts:
            out.update(part.split(self.read_part(part, 0)))
        return {name: tensor.to(handle.device) for name, tensor in out.items()}

    def read_part(self, part: Part, out_dtype: int) -> Tensor:
        """One kernel call: the output of a part in its shape; ``out_dtype`` 0 fp32, 1 bf16, 2 fp16."""
        if not part.open:
            raise StaleLookup("this handle was released: stage the batch again")
        self.require_usable()
        slots, slabs = part.slots(), self._slabs
        if self._normed:
            slabs, slots = self._overlaid(part, slots)
        part.version = self.version
        flat = self.kernels.pooled_lookup(
            slabs, self._described, part.features, slots, part.offsets, part.float_weights(), part.numel, out_dtype
        )
        part.relax()
        return flat.resize_(part.shape)  # not a view, so that callers may change their output in place

    def _overlaid(self, part: Part, slots: Tensor) -> tuple[list[Tensor], Tensor]:
        slabs = list(self._slabs)
        for t in set(part.layout.tables):
            if self.tables[t].max_norm is not None and t not in self.row_parts.tables:
                slabs[t], slots = options.overlay(slabs[t], self.tables[t], part.positions(t), slots)
        return slabs, slots

    def weight_gradient(self, part: Part, grad: Tensor) -> Tensor:
        """fp32 [n]: gradient of the weights per id; needs the rows the lookup read, so an update in between raises."""
        if part.version != self.version:
            raise StaleLookup(
                "the gradient of per_sample_weights was asked for after the rows it needs were updated: "
                "call backward() before step()"
            )
        slots, slabs = part.slots(), self._slabs
        if self._normed:
            slabs, slots = self._overlaid(part, slots)
        features, grad = part.update_features(part.readable(grad))
        return self.kernels.grad_weights(slabs, self._described, features, slots, part.offsets, [grad])

    # gradients --------------------------------------------------------------------------------------------------

    def update(self, handle: Handle, grads: Mapping[str, Tensor]) -> None:
        """Gather the gradients of a lookup's outputs, by feature; ``step`` applies them."""
        merged = [(part, part.readable(part.merge(grads).detach())) for part in handle.parts]
        for part, grad in merged:
            problem = self._nonfinite(part, grad)
            if problem is not None:
                raise problem
        for part, grad in merged:
            self._keep(part, grad)

    def gather(self, part: Part, grad: Tensor) -> None:
        """Keep the gradient of a part's output for the next step; NaN and infinity are found here."""
        grad = part.readable(grad.detach())
        self._keep(part, grad)
        problem = self._nonfinite(part, grad)
        if problem is not None:
            self.problem = problem
            self._marked[:] = float("nan")

    def _keep(self, part: Part, grad: Tensor) -> None:
        part.hold()
        if not self._pending:
            self._marked[:] = 1.0
        adjusted = part.adjusted(grad, self._adjusting) if self._by_freq or self._padded else (part, grad)
        self._pending.append(Gathered.of(*adjusted, part))

    def _nonfinite(self, part: Part, grad: Tensor) -> NonFiniteGradient | None:
        if not self.check_finite or self.kernels.all_finite([grad]):
            return None
        for k, (name, block) in enumerate(part.split(grad).items()):
            found = (~torch.isfinite(block)).nonzero()
            if found.numel():
                bag, column = found[0].tolist()
                table = self.names[part.layout.tables[k]]
                return NonFiniteGradient(table, name, bag, column, float(block[bag, column]))
        raise RuntimeError("a non-finite gradient was reported but none is there")

    def require_owner(self, part: Part) -> None:
        """Raise where a gradient would be lost: an unfrozen table that no SparseOptimizer holds."""
        if self._owner is None or self._owner() is None:
            lost = [self.names[t] for t in dict.fromkeys(part.layout.tables) if t not in self.frozen]
            if lost:
                raise NoOptimizer(
                    f"backward reached table {lost[0]!r}, which no SparseOptimizer holds: create "
                    "ec.optim.SparseOptimizer(model) before backward, or freeze the table"
                )

    @property
    def on_nonfinite(self) -> str:
        """The owner's policy."""
        owner = None if self._owner is None else self._owner()
        return getattr(owner, "on_nonfinite", "raise")

    def claim(self, owner: object) -> None:
        """Make ``owner`` the optimizer of all tables."""
        if self._owner is not None and self._owner() is not None:
            raise BadConfig(f"tables {self.names} already belong to another SparseOptimizer")
        self._owner = weakref.ref(owner)

    def agree_finite(self, found: bool = False) -> bool:
        """Whether the step is to be skipped because of an infinity that a GradScaler has ``found``, here or, where
        tables are sharded, on any rank; ``problem`` is then set everywhere too. Collective there: all ranks ask."""
        return found

    def pending_tables(self) -> set[int]:
        """Unfrozen tables with gradients waiting."""
        return {t for item in self._pending for t in item.part.layout.tables} - self.frozen

    def multipliers(self) -> Any:
        """numpy fp32 [T]: what ``GradScaler.unscale_`` has multiplied each table's gradient by."""
        return self._marked

    def discard(self) -> None:
        """Forget gathered gradients."""
        gathered, self._pending = self._pending, []
        for item in gathered:
            item.source.drop()
        self.problem = None
        self._marked[:] = 1.0

    def step(self) -> int:
        """Apply gathered gradients with each table's rule as declared; returns the number of rows updated."""
        hyper = torch.zeros(len(self.tables), HYPER, dtype=torch.float64)
        for t, rule in enumerate(self.rules):
            row = [0.0] * HYPER
            rule.fill_hyper(row, rule.options())
            row[STEP] = self.steps[t] + 1
            hyper[t] = torch.tensor(row, dtype=torch.float64)
        return self.apply(hyper)

    def apply(self, hyper: Tensor) -> int:
        """Sum what was gathered and apply the rules with the numbers in ``hyper``; returns the rows updated."""
        if self.guard is not None:
            self.guard()
        pending, trained = self._pending, self.pending_tables()
        if not trained:
            self.discard()
            return 0
        self.require_writable("step")
        self.row_parts.require(trained)
        for item in pending:
            item.check_unchanged()
        leases = [item.source.lease for item in pending]
        for item in pending:
            item.source.slots()  # pins every row before the first one changes
        redirected = self.front.admit(leases, self.frozen)
        update = join(pending, self.frozen, redirected)
        if self._normed:
            self._renormalise([item.part for item in pending], redirected or [None] * len(pending))
        update, rows = self.row_parts.apply(update, hyper)
        rows += self.kernels.fused_update(
            self._slabs,
            self._written,
            self._described,
            hyper,
            update.features,
            update.slots,
            update.offsets,
            update.weights,
            update.grads,
            self._slot_ids,
        )
        for t in set(range(len(self.tables))) - self.frozen:  # a step of the model, also of tables it gave no gradient
            self.steps[t] += 1
        self.front.stepped(leases, self.frozen, self.steps)
        self.version += 1
        self.rows_updated += rows
        self.discard()
        return rows

    def _renormalise(self, parts: Sequence[Part], redirected: Sequence[Tensor | None]) -> None:
        apart: dict[int, list[Tensor]] = {}
        for part, other in zip(parts, redirected, strict=True):
            for t in set(part.layout.tables) - self.frozen:
                if self.tables[t].max_norm is not None:
                    slots = part.slots(other)[part.positions(t)]
                    if t in self.row_parts.tables:
                        apart.setdefault(t, []).append(slots)
                    else:
                        options.renormalise_rows(self._slabs[t], self.tables[t], slots)
        self.row_parts.renormalise({t: torch.cat(slots) for t, slots in apart.items()})

    # the store as a whole ---------------------------------------------------------------------------------------

    def freeze(self, *tables: str, frozen: bool = True) -> None:
        """Stop (or resume, ``frozen=False``) training ``tables``, all of them where none is named."""
        which = {self.index(name) for name in tables or self.names}
        self.frozen = self.frozen | which if frozen else self.frozen - which

    def stats(self) -> dict[str, Any]:
        """Counters for people: batches and ids staged, rows updated; per table steps, ids dropped and mapped, rows
        written; ``cache``: unique ids, hits, misses, evictions, seconds by stage; ``tiers``: rows and bytes moved by
        each tier below. Counting written rows reads through the tiers."""
        self.require_usable()
        tables = {
            name: {"steps": step, "dropped": c.dropped, "mapped": c.mapped, "rows_written": self.front.count_written(t)}
            for t, (name, step, c) in enumerate(zip(self.names, self.steps, self.counts, strict=True))
        }
        return {
            "stages": self.stages,
            "ids": self.ids_staged,
            "rows_updated": self.rows_updated,
            "tables": tables,
            **self.traffic(),
        }

    def traffic(self) -> dict[str, Any]:
        """The part of ``stats`` that costs nothing to ask for: ``cache`` and ``tiers``."""
        self.require_usable()
        return {"cache": self.front.stats(), "tiers": [tier.stats() for tier in self.front.below]}

    def _settled(self) -> None:
        if self._pending:
            raise BadConfig("gradients are waiting for step(): the state in between can be neither saved nor copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingStore:
        if self.durable is not None:
            raise NotSupported(f"copying a store on disk: open {self.durable.folder} read-only instead")
        copy = EmbeddingStore(self.tables, [tier.fresh() for tier in self.tiers], backend=self.backend)
        memo[id(self)] = copy
        copy.load_state_dict(self.state_dict())
        copy.frozen, copy.guard = self.frozen, self.guard
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        tiers = [tier.fresh() for tier in self.tiers]
        if self.durable is not None:  # the path travels; what is opened from it elsewhere reads only
            self._settled()
            return _reopen, (self.tables, tiers, self.backend, self.frozen, self.guard)
        return _rebuild, (self.tables, tiers, self.backend, self.state_dict(), self.frozen, self.guard)


def cache_bytes() -> int:
    """The memory that a reopened store caches rows in where nobody says: a sixteenth of what is available."""
    return max(1 << 20, (available_bytes() or 4 << 30) // 16)


def _rebuild(
    tables: list[TableConfig],
    tiers: list[Any],
    backend: str,
    state: dict[str, Tensor],
    frozen: frozenset[int],
    guard: Callable[[], None] | None,
) -> EmbeddingStore:
    store = EmbeddingStore(tables, tiers, backend=backend)
    store.load_state_dict(state)
    store.frozen, store.guard = frozen, guard
    return store


def _reopen(
    tables: list[TableConfig],
    tiers: list[Any],
    backend: str,
    frozen: frozenset[int],
    guard: Callable[[], None] | None,
) -> EmbeddingStore:
    store = EmbeddingStore(tables, [*tiers[:-1], tiers[-1].reader()], backend=backend)
    store.frozen, store.guard = frozen, guard
    return store
