"""A staged batch: the handle that owns its pins, its parts (one kernel call each), and the joining of several into one
update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import options
from .cache import Front
from .config import DTYPES, TableConfig
from .errors import BadJagged, BadJaggedType, StaleLookup
from .jagged import KeyedJaggedTensor
from .layout import BAGS, FIRST, OFFSET, POOL, STRIDE, SUM, TABLE, TENSOR, PartLayout


def _version(tensor: Tensor | None) -> int:
    """Counts torch's writes to the tensor (inference tensors have no count)."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(_version(tensor) for tensor in tensors)


class Part:
    """One kernel call of a staged batch.

    Attributes:
        layout: what is looked up and where it goes.
        features: int64 [F, 7] for the lookup.
        offsets: of the bags, or None where every id is its own.
        weights: per id, possibly requiring grad, or None.
        numel, shape: of the output.
        version: of the store when the part was last read.
        lease: the front's, on the rows of this part.
    """

    def __init__(
        self,
        layout: PartLayout,
        batch: KeyedJaggedTensor,
        given: KeyedJaggedTensor,
        front: Front,
        training: bool,
        overflow: bool,
    ) -> None:
        self.layout = layout
        self.weights = batch.weights_or_none()
        self.version = -1
        self.sizes: list[int] | None = None
        self.offsets: Tensor | None
        self.shape: tuple[int, ...]
        if layout.pooled:
            self.features, self.offsets, self.shape = layout.features, batch.offsets(), layout.shape
            self.numel = self.shape[0] * self.shape[1] if len(self.shape) == 2 else self.shape[0]
        else:
            self.features, self.sizes = layout.unpooled(batch.offset_per_key())
            self.offsets, self.numel = None, sum(self.sizes)
            self.shape = (self.numel,)
        self.open, self.training = True, training
        self._values = batch.values()
        self._offsets = batch.offsets()
        self._seen = _versions(self._values, self._offsets)
        # where ids had to be repaired, a copy is read: whether it still holds shows in what the caller gave
        self._given = given.values(), given.offsets(), given.weights_or_none()
        self._given_seen = _versions(*self._given)
        self._front = front
        more = {"weights": self.weights} if front.takes_weights else {}
        self.lease = front.stage(self.features, batch.values(), self.offsets, training, overflow=overflow, **more)
        self._holders = 1

    def hold(self) -> None:
        """One more owner of the lease: a gradient that waits for the step."""
        if not self.open:
            raise StaleLookup("this handle was released: stage the batch again")
        if not self.training:
            raise StaleLookup("this batch was staged for reading only: stage it with training=True")
        self._holders += 1

    def drop(self) -> None:
        """One owner less; the last gives the rows free."""
        self._holders -= 1
        if self._holders == 0:
            self._front.release(self.lease)
            self.lease = None

    def serves(self, front: Front) -> bool:
        """Whether it can be read, from ``front``, for the ids as they are now."""
        return self.open and self._front is front and self._given_seen == _versions(*self._given)

    def check_unchanged(self) -> None:
        """Raise where the ids were overwritten since the batch was staged, by a loader that reuses memory say."""
        if self._seen != _versions(self._values, self._offsets):
            raise StaleLookup("the ids of a batch were changed in place between its lookup and step()")

    def slots(self, redirected: Tensor | None = None) -> Tensor:
        """The slot of each id; the rows are resident and pinned afterwards. ``redirected``: slots to use in their
        place, since of ids that are not admitted yet another slot takes the update."""
        return self._front.slots(self.lease) if redirected is None else redirected

    def chosen(self, by_id: Tensor) -> Tensor:
        """Of numbers by staged id those that its slots are of."""
        return by_id

    def relax(self) -> None:
        """Until the next ``slots`` the rows may leave."""
        self._front.relax(self.lease)

    def float_weights(self) -> Tensor | None:
        """Weights as the kernels take them."""
        return None if self.weights is None else self.weights.detach().to(torch.float32)

    def positions(self, table: int) -> Tensor:
        """Positions in the ids of everything that reads ``table``."""
        spans = []
        for row in self.features.tolist():
            if row[TABLE] == table:
                first, last = row[FIRST], row[FIRST] + row[BAGS]
                if self.offsets is not None:
                    first, last = int(self.offsets[first]), int(self.offsets[last])
                spans.append(torch.arange(first, last))
        return torch.cat(spans)

    # outputs and gradients --------------------------------------------------------------------------------------

    def split(self, out: Tensor) -> dict[str, Tensor]:
        """The output (or its gradient) by feature: views [rows, D]."""
        layout = self.layout
        if len(self.shape) == 2:
            blocks = out.split(list(layout.dims), dim=1)
            return dict(zip(layout.names, blocks, strict=True))
        flat = out.split(self.block_sizes())
        return {name: block.reshape(-1, dim) for name, block, dim in zip(layout.names, flat, layout.dims, strict=True)}

    def block_sizes(self) -> list[int]:
        """Elements of each feature's block in a one-dimensional output."""
        if self.sizes is None:
            sizes = [0] * len(self.layout.names)
            for k, row in zip(self.layout.order, self.features.tolist(), strict=True):
                sizes[k] = row[BAGS] * self.layout.dims[k]
            self.sizes = sizes
        return self.sizes

    def merge(self, grads: Mapping[str, Tensor]) -> Tensor:
        """One gradient of the output from one per feature; shapes and dtypes are checked."""
        blocks = []
        for name, block in self.split(torch.empty(self.numel, device="meta").view(self.shape)).items():
            if name not in grads:
                raise BadJagged(f"update: no gradient for feature {name!r}")
            grad = grads[name]
            if grad.shape != block.shape:
                raise BadJagged(f"feature {name!r}: gradient has shape {list(grad.shape)}, must be {list(block.shape)}")
            if grad.dtype not in DTYPES:
                raise BadJaggedType(f"feature {name!r}: gradient has dtype {grad.dtype}, must be one of {list(DTYPES)}")
            blocks.append(grad)
        if len(self.shape) == 2:
            return torch.cat(blocks, dim=1)
        return torch.cat([block.reshape(-1) for block in blocks])

    def readable(self, grad: Tensor) -> Tensor:
        """``grad`` with contiguous rows that do not overlap: itself, or a copy where autograd gave something else."""
        if len(self.shape) == 1:
            return grad.contiguous()
        rows, columns = self.shape
        if columns and (grad.stride(1) != 1 or (rows > 1 and grad.stride(0) < columns)):
            return grad.contiguous()
        return grad

    def update_features(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """(features, contiguous tensor) for an update with a readable gradient: a slice of columns of a larger matrix
        is passed as the stretch of memory it lies in, its row stride in the features."""
        if grad.is_contiguous() or grad.numel() == 0:
            return self.features, grad.contiguous()
        rows, columns = self.shape
        features = self.features.clone()
        features[:, STRIDE] = grad.stride(0)
        return features, grad.as_strided(((rows - 1) * grad.stride(0) + columns,), (1,))

    def adjusted(self, grad: Tensor, tables: Sequence[TableConfig]) -> tuple[Part, Tensor]:
        """This part as an update must see it where a table scales by frequency or has a padding id."""
        used = [tables[t] for t in self.layout.tables]
        if any(table.scale_grad_by_freq for table in used):
            part = self._clone()
            scale = torch.ones(self._values.numel())
            for t in set(self.layout.tables):
                if tables[t].scale_grad_by_freq:
                    at = self.positions(t)
                    scale[at] = options.inverse_frequency(self._values[at])
            weights = self.float_weights()
            part.weights = scale if weights is None else weights * scale
            return part._without_padding(grad, tables)
        return self._without_padding(grad, tables)

    def _without_padding(self, grad: Tensor, tables: Sequence[TableConfig]) -> tuple[Part, Tensor]:
        if self.layout.pooled or all(tables[t].padding_idx is None for t in self.layout.tables):
            return self, grad
        return UnpooledUpdate.build(self, grad, tables)

    def _clone(self) -> Part:
        other = Part.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other


class UnpooledUpdate(Part):
    """The update of an unpooled part without the ids that are padding."""

    _chosen: Tensor

    @staticmethod
    def build(part: Part, grad: Tensor, tables: Sequence[TableConfig]) -> tuple[Part, Tensor]:
        """(the part without padding, the gradient without its rows)."""
        rows, kept, blocks, ids, base = [], [], [], 0, 0
        flat = grad.reshape(-1)
        for k, row in zip(part.layout.order, part.features.tolist(), strict=True):
            dim, table = part.layout.dims[k], tables[row[TABLE]]
            at = torch.arange(row[FIRST], row[FIRST] + row[BAGS])
            block = flat[row[OFFSET] : row[OFFSET] + row[BAGS] * dim].view(-1, dim)
            if table.padding_idx is not None:
                keep = part._values[at] != table.padding_idx
                at, block = at[keep], block[keep]
            rows.append([row[TABLE], row[1], ids, at.numel(), 0, base, dim])
            kept.append(at)
            blocks.append(block.reshape(-1))
            ids, base = ids + at.numel(), base + at.numel() * dim
        other = UnpooledUpdate.__new__(UnpooledUpdate)
        other.__dict__.update(part._clone().__dict__)
        other._chosen = torch.cat(kept)
        other.features = torch.tensor(rows, dtype=torch.int64).view(-1, 7)
        other.weights = None if part.weights is None else part.weights.detach()[other._chosen]
        other.numel = base
        other.shape = (base,)
        return other, torch.cat(blocks)

    def slots(self, redirected: Tensor | None = None) -> Tensor:
        return super().slots(redirected)[self._chosen]

    def chosen(self, by_id: Tensor) -> Tensor:
        return by_id[self._chosen]

    def positions(self, table: int) -> Tensor:
        """Positions among the ids that were kept."""
        return super().positions(table)


class Handle:
    """A staged batch: owns the pins of its rows until ``release``, the end of its ``with``, or garbage collection."""

    def __init__(self, batch: KeyedJaggedTensor, parts: list[Part], device: torch.device) -> None:
        self.batch, self.parts, self.device = batch, parts, device

    def part(self, features: tuple[str, ...]) -> Part | None:
        """The part that holds exactly these features, in their order."""
        return next((part for part in self.parts if part.layout.names == features), None)

    def release(self) -> None:
        """Give the pins back, those of gradients that wait for the step excepted; further lookups raise."""
        for part in self.parts:
            if part.open:
                part.open = False
                part.drop()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class Gathered(NamedTuple):
    """A gradient that waits for the step: the part as the update sees it, and the part whose lease it holds."""

    part: Part
    grad: Tensor
    source: Part
    version: int

    @staticmethod
    def of(part: Part, grad: Tensor, source: Part) -> Gathered:
        """With the gradient's version as it is now."""
        return Gathered(part, grad, source, _version(grad))

    def check_unchanged(self) -> None:
        """Raise where what the update will read is no longer what backward gave."""
        self.source.check_unchanged()
        if self.version != _version(self.grad):
            raise StaleLookup("the gradient given to backward() was changed in place before step()")


class Update(NamedTuple):
    """The arguments of one fused update."""

    features: Tensor
    slots: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    grads: list[Tensor]


def join(pending: Sequence[Gathered], frozen: frozenset[int], redirected: Sequence[Tensor] | None = None) -> Update:
    """Everything gathered as one update, in (call, feature, position) order, without frozen tables. ``redirected``: the
    slots of each item's staged ids where they are not those of its lease."""
    others = [None] * len(pending) if redirected is None else redirected
    slots = [item.part.slots(other) for item, other in zip(pending, others, strict=True)]
    if len(pending) == 1:
        part, grad = pending[0][:2]
        features, grad = part.update_features(grad)
        update = Update(features, slots[0], part.offsets, part.float_weights(), [grad])
    else:
        update = _concatenate(pending, slots)
    if frozen:
        kept = ~torch.isin(update.features[:, TABLE], torch.tensor(sorted(frozen)))
        update = update._replace(features=update.features[kept])
    return update


def _concatenate(pending: Sequence[Gathered], slots: list[Tensor]) -> Update:
    pairs = [(item.part, item.grad) for item in pending]
    features, grads, bags, ids = [], [], 0, 0
    if len({s.dtype for s in slots}) > 1:
        slots = [s.to(torch.int64) for s in slots]
    jagged = any(part.offsets is not None for part, _ in pairs)
    weighted = any(part.weights is not None for part, _ in pairs)
    offsets, weights = [], []
    for k, (part, grad) in enumerate(pairs):
        mine, grad = part.update_features(grad)
        mine = mine.clone()
        mine[:, FIRST] += bags
        mine[:, TENSOR] = k
        if jagged and part.offsets is None:
            mine[:, POOL] = SUM  # of one id
        features.append(mine)
        grads.append(grad)
        n = slots[k].numel()
        if jagged:
            begins = torch.arange(n) if part.offsets is None else part.offsets[:-1].to(torch.int64)
            offsets.append(begins + ids)
        if weighted:
            own = part.float_weights()
            weights.append(torch.ones(n) if own is None else own)
        bags += n if part.offsets is None else part.offsets.numel() - 1
        ids += n
    if len({g.dtype for g in grads}) > 1:
        grads = [g.to(torch.float32) for g in grads]
    return Update(
        torch.cat(features),
        torch.cat(slots),
        torch.cat([*offsets, torch.tensor([ids])]) if jagged else None,
        torch.cat(weights) if weighted else None,
        grads,
    )
