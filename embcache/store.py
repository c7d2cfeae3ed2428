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

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from . import kernels, options
from .config import TableConfig, check_tables
from .errors import BadConfig, NonFiniteGradient, NoOptimizer, NotSupported, SchemaMismatch, StaleLookup
from .init import table_key
from .jagged import KeyedJaggedTensor
from .layout import LayoutCache
from .optim import HYPER, STEP
from .staged import Gathered, Handle, Part, join
from .tiers.base import FrontTier
from .tiers.ram import Ram


class EmbeddingStore:
    """Embedding tables over a chain of tiers.

    Args:
        tables: their descriptions; names and features are unique.
        tiers: where rows live, fastest first; ``[Ram()]`` if None. Each but the last is a bounded cache.
        backend: "auto" (compiled kernels where they load), "native" or "reference" (plain torch).
    """

    def __init__(
        self, tables: Sequence[TableConfig], tiers: Sequence[FrontTier] | None = None, *, backend: str = "auto"
    ) -> None:
        self.tables = check_tables(tables)
        chain = [Ram()] if tiers is None else list(tiers)
        if len(chain) != 1:
            raise NotSupported(f"a chain of {len(chain)} tiers: this version keeps all rows in one tier, [Ram()]")
        self.backend = backend
        self.kernels = kernels.get(cast(Any, backend))
        self.front = chain[0]
        self.front.open(self.tables, self.kernels)
        self.names = [table.name for table in self.tables]
        self.rules = [table.optimizer for table in self.tables]
        self.steps = [0] * len(self.tables)
        self.version = 0
        self.frozen: frozenset[int] = frozenset()
        self.counts = [options.Counts() for _ in self.tables]
        self.guard: Callable[[], None] | None = None
        self._describe()
        self._gathering()
        self._zero_padding()

    def _describe(self) -> None:
        """Everything the kernels are told that never changes."""
        rows = [
            (
                t.embedding_dim,
                t.dtype_code,
                t.state_offset,
                t.optimizer.code,
                table_key(t.seed, t.name, "rounding"),
                t.flags,
            )
            for t in self.tables
        ]
        self._described = torch.tensor(rows, dtype=torch.int64).view(-1, 6)
        self._limits = torch.tensor([t.num_embeddings or 0 for t in self.tables], dtype=torch.int64)
        self._slabs = [arena.slab for arena in self.front.arenas]
        self._written = [arena.written for arena in self.front.arenas]
        self._slot_ids = [arena.slot_ids for arena in self.front.arenas]
        self.layouts = LayoutCache(self.tables)
        self._padded = any(t.padding_idx is not None for t in self.tables)
        self._normed = any(t.max_norm is not None for t in self.tables)
        self._by_freq = any(t.scale_grad_by_freq for t in self.tables)

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

    def _zero_padding(self) -> None:
        for t, table in enumerate(self.tables):
            if table.padding_idx is not None:
                self._weights(t)[table.padding_idx] = 0

    # stage, lookup, release -------------------------------------------------------------------------------------

    def stage(self, batch: Any, features: tuple[str, ...] | None = None, *, training: bool | None = None) -> Handle:
        """Make the rows of ``features`` (None: of every table's features) in ``batch`` resident and pin them.

        ``batch`` is a ``KeyedJaggedTensor``, ours or TorchRec's. Ids out of range raise ``IdOutOfRange`` before
        anything is touched, unless their table says otherwise. The handle owns the pins: a context manager, also
        released by garbage collection. ``training=False`` (None: where torch's gradients are off) stages for reading
        only: no cache keeps a row because of it, and an update with the handle raises.
        """
        training = torch.is_grad_enabled() if training is None else training
        batch = KeyedJaggedTensor.adopt(batch)
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
        parts = [Part(layout, batch, self.front, training) for layout in layouts]
        self.stages += 1
        self.ids_staged += batch.values().numel()
        return Handle(batch, parts, device)

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
            if self.tables[t].max_norm is not None:
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
        adjusted = part.adjusted(grad, self.tables) if self._by_freq or self._padded else (part, grad)
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
        pending = self._pending
        if not self.pending_tables():
            self.discard()
            return 0
        for item in pending:
            item.check_unchanged()
        update = join(pending, self.frozen)
        if self._normed:
            self._renormalise([item.part for item in pending])
        rows = self.kernels.fused_update(
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
        self.version += 1
        self.rows_updated += rows
        self.discard()
        return rows

    def _renormalise(self, parts: Sequence[Part]) -> None:
        for part in parts:
            for t in set(part.layout.tables) - self.frozen:
                if self.tables[t].max_norm is not None:
                    slots = part.slots()[part.positions(t)]
                    options.renormalise_rows(self._slabs[t], self.tables[t], slots)

    # whole tables -----------------------------------------------------------------------------------------------

    def index(self, table: str) -> int:
        """Position of a table by name."""
        if table not in self.names:
            raise BadConfig(f"no table {table!r}; tables are {self.names}")
        return self.names.index(table)

    def freeze(self, *tables: str, frozen: bool = True) -> None:
        """Stop (or resume, ``frozen=False``) training ``tables``, all of them where none is named."""
        which = {self.index(name) for name in tables or self.names}
        self.frozen = self.frozen | which if frozen else self.frozen - which

    def _weights(self, t: int) -> Tensor:
        table = self.tables[t]
        return self._slabs[t].view(table.dtype)[:, : table.embedding_dim]

    def _states(self, t: int) -> Tensor:
        table = self.tables[t]
        first = table.state_offset // 4
        if not table.state_floats:
            return torch.empty(self._slabs[t].shape[0], 0)
        return self._slabs[t].view(torch.float32)[:, first : first + table.state_floats]

    def weight(self, table: str) -> Tensor:
        """[rows, D] view of a table's weights in its storage dtype; no gradient. Rows changed through it are not noted
        as written, so checkpoints miss them: use ``load_weight``."""
        return self._weights(self.index(table))

    def state(self, table: str) -> Tensor:
        """fp32 [rows, floats] view of a table's optimizer state."""
        return self._states(self.index(table))

    def load_weight(self, table: str, weight: Tensor) -> None:
        """Replace all weights of a table; optimizer state stays."""
        t = self.index(table)
        mine = self._weights(t)
        if weight.shape != mine.shape:
            raise SchemaMismatch(f"shape of table {table!r}", list(weight.shape), list(mine.shape))
        mine.copy_(weight.detach())
        self._written[t].fill_(255)
        self.version += 1

    def read_state(self, table: int) -> Tensor:
        """Copy of a table's optimizer state, by index."""
        return self._states(table).clone()

    def check_state(self, table: int, state: Tensor | None) -> None:
        """Raise where ``state`` (None: nothing was saved) does not fit a table's optimizer state, by index."""
        saved, mine = [] if state is None else list(state.shape), list(self._states(table).shape)
        if saved != mine and (mine[1] or state is not None):
            raise SchemaMismatch(f"state of table {self.names[table]!r}", saved or "nothing", mine)

    def write_state(self, table: int, state: Tensor) -> None:
        """Replace a table's optimizer state, by index."""
        self.check_state(table, state)
        self._states(table).copy_(state)
        self._written[table].fill_(255)

    def scan(self, table: str, block: int = 65536) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(ids, weights, state) of all rows, ``block`` at a time, ids ascending; views, to be read at once."""
        t = self.index(table)
        weights, state = self._weights(t), self._states(t)
        for start in range(0, weights.shape[0], block):
            at = slice(start, min(start + block, weights.shape[0]))
            yield torch.arange(at.start, at.stop), weights[at], state[at]

    def stats(self) -> dict[str, Any]:
        """Counters for people: batches and ids staged, rows updated; per table ids dropped and mapped, rows written."""
        bits = [int(sum(((w >> i) & 1).sum() for i in range(8))) if w.numel() else 0 for w in self._written]
        tables = {
            name: {"steps": step, "dropped": c.dropped, "mapped": c.mapped, "rows_written": written}
            for name, step, c, written in zip(self.names, self.steps, self.counts, bits, strict=True)
        }
        return {
            "stages": self.stages,
            "ids": self.ids_staged,
            "rows_updated": self.rows_updated,
            "tables": tables,
        }

    def _refuse_pending(self) -> None:
        if self._pending:
            raise BadConfig("gradients are waiting for step(): the state in between can be neither saved nor copied")

    def state_dict(self) -> dict[str, Tensor]:
        """All rows as plain tensors: ``<table>.weight``, ``.state``, ``.written``, ``.step``. Copies; pending gradients
        raise."""
        self._refuse_pending()
        out: dict[str, Tensor] = {}
        for t, name in enumerate(self.names):
            out[f"{name}.weight"] = self._weights(t).clone(memory_format=torch.contiguous_format)
            out[f"{name}.state"] = self._states(t).clone(memory_format=torch.contiguous_format)
            out[f"{name}.written"] = self._written[t].clone()
            out[f"{name}.step"] = torch.tensor(self.steps[t])
        return out

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state_dict`` gave; missing, surplus or differently shaped tensors raise before any change."""
        mine = {
            f"{name}.{what}": shape
            for t, name in enumerate(self.names)
            for what, shape in (
                ("weight", (self._weights(t).shape, self._weights(t).dtype)),
                ("state", (self._states(t).shape, torch.float32)),
                ("written", (self._written[t].shape, torch.uint8)),
                ("step", (torch.Size([]), torch.int64)),
            )
        }
        saved = {key: (tensor.shape, tensor.dtype) for key, tensor in state.items()}
        differ = sorted(key for key in mine.keys() | saved.keys() if mine.get(key) != saved.get(key))
        if differ:
            raise SchemaMismatch(differ[0], saved.get(differ[0], "nothing"), mine.get(differ[0], "nothing"))
        for t, name in enumerate(self.names):
            self._weights(t).copy_(state[f"{name}.weight"])
            self._states(t).copy_(state[f"{name}.state"])
            self._written[t].copy_(state[f"{name}.written"])
            self.steps[t] = int(state[f"{name}.step"])
        self.version += 1
        self.discard()

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingStore:
        self._refuse_pending()
        copy = EmbeddingStore(self.tables, [self.front.fresh()], backend=self.backend)
        memo[id(self)] = copy
        for mine, other in zip(self._slabs + self._written, copy._slabs + copy._written, strict=True):
            other.copy_(mine)
        copy.steps, copy.frozen, copy.guard = list(self.steps), self.frozen, self.guard
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.tables, self.backend, self.state_dict(), self.frozen, self.guard)


def _rebuild(
    tables: list[TableConfig],
    backend: str,
    state: dict[str, Tensor],
    frozen: frozenset[int],
    guard: Callable[[], None] | None,
) -> EmbeddingStore:
    store = EmbeddingStore(tables, backend=backend)
    store.load_state_dict(state)
    store.frozen, store.guard = frozen, guard
    return store
