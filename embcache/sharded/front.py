"""The front of a sharded store: ids go to the ranks that own them, rows come back, gradients follow.

Of a staged batch every rank holds two halves. As requester: the distinct ids it asked for and the slots of their rows
in memory that the lookup kernels read. As owner: a handle of its local store on what all ranks asked of it.

A rank with an error takes part in what the others do with a flag set; then all ranks raise, and nothing has changed on
any (``meeting.py``).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import NotSupported, StaleLookup
from ..jagged import KeyedJaggedTensor
from ..layout import BAGS, FIRST, OFFSET, TABLE
from ..staged import Handle, Part
from ..store import EmbeddingStore
from ..tiers.base import Arena, DurableTier
from .by_id import RemoteRows
from .columns import Shortening, rows_received
from .exchange import WireOrder, begins_of, moved_slots, pack_ids, route, starts_of, union, unpack_ids
from .meeting import HEAD, meet
from .moving import Mover
from .plan import ALL, HASH, Piece, ShardingPlan
from .pooling import Pooled, Reduced, local_layout, reduced, split_bags

RELEASED = "this lease was released: stage the batch again"


class Remote:
    """A staged part: what was asked of whom, and what others asked of this rank.

    Attributes:
        number: the same on every rank.
        sent, received: int64 [W, P], ids by rank and piece in wire order.
        ids: int64, those sent, in wire order.
        out: slots of the ids of the part.
        rows, begin: int64 [W, P], rows that come back, and where those of a rank and piece begin in their dimension.
        spans: positions of the ids of each table in the part.
        handle: of the local store, on what was received; None with the ``error`` that kept it from being staged.
        pooled: the features whose bags their owners pool; ``reduced``: the part as it then reads.
        slabs: by piece and pooled feature, the rows as they were at ``version`` of the store.
    """

    __slots__ = (
        "begin", "error", "handle", "ids", "number", "open", "out", "pooled", "received", "received_ids", "reduced",
        "rows", "sent", "slabs", "spans", "training", "version",
    )  # fmt: skip

    def __init__(self, number: int, training: bool) -> None:
        self.number, self.training, self.open = number, training, True
        self.sent = self.received = self.rows = self.begin = np.zeros((0, 0), dtype=np.int64)
        self.ids = self.received_ids = np.empty(0, dtype=np.int64)
        self.out: Tensor = torch.empty(0, dtype=torch.int32)
        self.handle: Handle | None = None
        self.error: Exception | None = None
        self.pooled: Pooled | None = None
        self.reduced: Reduced | None = None
        self.slabs: list[Tensor] = []
        self.spans: dict[int, list[tuple[int, int]]] = {}
        self.version = -1

    @property
    def part(self) -> Part:
        """The local store's side."""
        assert self.handle is not None
        return self.handle.parts[0]


class Joined(NamedTuple):
    """What an update is about: the distinct ids of all leases whose gradients wait."""

    sent: np.ndarray
    received: np.ndarray
    rows: np.ndarray
    begin: np.ndarray
    slots: dict[int, Tensor] | None  # by lease number; None: those of the only lease
    handle: Handle
    own: bool  # whether the handle was staged for this update
    pooled: list[Pooled]  # of the leases


class View(NamedTuple):
    """Arguments of a lookup."""

    features: Tensor
    slots: Tensor
    offsets: Tensor | None
    weights: Tensor | None


class RemoteFront(RemoteRows):
    """What a store's modules, handles and optimizer ask of a front, with rows that live elsewhere.

    ``stage`` meets the other ranks on lane ``ids`` (on a look-ahead's thread on a road of its own), lookups on lane
    ``rows``, updates on lane ``grads``.
    """

    takes_weights = True

    def __init__(
        self, plan: ShardingPlan, pieces: Sequence[Piece], local: EmbeddingStore, lanes: Any, bags: int = 0
    ) -> None:
        self._bags = bags
        self.plan, self.pieces, self.local, self.lanes = plan, list(pieces), local, lanes
        self.world, self.rank = lanes.world, lanes.rank
        limits = {piece.table: table.num_embeddings for piece, table in zip(pieces, local.tables, strict=True)}
        self.wire = WireOrder(pieces, [limits[t] for t in range(len(limits))], self.world, self.rank)
        self.mover = Mover(plan.wire, self.rank, self.world)
        self._map = plan.map
        self._keys = [local.tables[p].feature_names[rank] for rank in range(self.world) for p in self.wire.order]
        self._names = tuple(self._keys)
        self._split = len(pieces) > len(limits)
        self._shorten = Shortening(pieces, local.tables)
        self._roads = [lanes.ids]  # that batches are staged on, and how many were
        self._numbers = [0]
        self._road = threading.local()
        self.version = 0
        self.kernels = local.kernels
        self.arenas = [Arena(torch.empty(0, 4 * piece.dim, dtype=torch.uint8)) for piece in pieces]
        rows = [(piece.dim, 0, 4 * piece.dim, 0, 0, 0, 0, piece.dim) for piece in pieces]
        self.described = torch.tensor(rows, dtype=torch.int64).view(-1, 8)  # fp32 rows without state, under SGD
        self.none = [torch.empty(0, 4 * piece.dim, dtype=torch.uint8) for piece in pieces]

    # stage ------------------------------------------------------------------------------------------------------

    def ahead(self, stage: Callable[..., Any], training: bool) -> Callable[..., Any]:
        """``stage`` as look-ahead's thread calls it: on a lane of its own, so that the main thread may stage besides.
        Collective."""
        road = 1 if training else 2
        while len(self._roads) <= road:
            self._roads.append(self.lanes.more("ids"))
            self._numbers.append(0)

        def staged(*arguments: Any, **options: Any) -> Any:
            self._road.number = road
            try:
                return stage(*arguments, **options)
            finally:
                self._road.number = 0

        return staged

    def _next(self) -> tuple[Any, int]:
        """The lane to stage on, and the number of the next batch: the same on every rank."""
        road = getattr(self._road, "number", 0)
        self._numbers[road] += 1
        return self._roads[road], self._numbers[road] << 2 | road

    def stage(
        self,
        features: Tensor,
        values: Tensor,
        offsets: Tensor | None,
        training: bool,
        *,
        overflow: bool = True,
        weights: Tensor | None = None,
    ) -> Remote:
        """Collective. Tell the owners which rows are needed; they make them resident and pin them."""
        pooled = self._split_bags(features, values, offsets, weights)
        lane, number = self._next()
        lease = Remote(number, training)
        lease.pooled = pooled
        ids = values.to(torch.int64).contiguous().numpy()
        lease.spans = _spans(features, offsets, set() if pooled is None else set(pooled.tables.tolist()))
        ranges = np.array([span for spans in lease.spans.values() for span in spans], dtype=np.int64).reshape(-1, 2)
        ends = np.cumsum([0] + [len(spans) for spans in lease.spans.values()])
        routed = route(self.wire, self._map, list(lease.spans), ids, ranges, ends, training)
        lease.sent, lease.ids, lease.rows, lease.begin = routed.sent, routed.ids, routed.rows, routed.begin
        lease.out = torch.from_numpy(routed.slots)
        signature = zlib.crc32(features[:, :2].contiguous().numpy().tobytes(), number << 2 | training << 1)
        signature = zlib.crc32(bytes([pooled is not None and weights is not None]), signature)
        heads, answer = meet(
            lane,
            signature,
            None,
            lambda heads: self._exchange_ids(lease, heads[:, HEAD:], weights),
            self._heads(not overflow, lease.sent, pooled),
        )
        self._own(lease, heads, answer.numpy(), training, weights is not None)
        return lease

    def _heads(self, strict: bool = False, sent: np.ndarray | None = None, pooled: Pooled | None = None) -> np.ndarray:
        """What a stage says to each rank; as wide whatever is staged."""
        n = len(self.wire)
        heads = np.zeros((self.world, 1 + n + 2 * self._bags), dtype=np.int64)
        heads[:, 0] = strict
        if sent is not None:
            heads[:, 1 : 1 + n] = sent
        if pooled is not None:
            at, count = 1 + n, len(pooled.numbers)
            heads[:, at : at + count], heads[:, at + self._bags : at + self._bags + count] = pooled.bags, pooled.items
        return heads

    def _heard(self, heads: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, bags, items of bags) that the ranks ask for, of a stage with ``count`` pooled features."""
        at = 1 + len(self.wire)
        found = heads[:, 1:at], heads[:, at : at + count], heads[:, at + self._bags : at + self._bags + count]
        return tuple(np.ascontiguousarray(part) for part in found)  # type: ignore[return-value]

    def _split_bags(
        self, features: Tensor, values: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> Pooled | None:
        at = features.numpy()
        numbers = np.array([k for k, t in enumerate(at[:, TABLE].tolist()) if self.pieces[t].pooled], dtype=np.int64)
        if not len(numbers):
            return None
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise NotSupported(
                f"per_sample_weights that need a gradient, table {self.local.names[int(at[numbers[0], TABLE])]!r}: its "
                "bags are pooled where its rows live (traffic='pooled'), give it traffic='rows'"
            )
        assert offsets is not None
        mine = at[numbers][:, TABLE]
        fixed = np.array([-1 if self.pieces[t].route == HASH else self.pieces[t].rank for t in mine], dtype=np.int64)
        dims = [self.pieces[t].dim for t in mine]
        ids, bounds = values.to(torch.int64).contiguous().numpy(), offsets.to(torch.int64).numpy()
        return split_bags(at, numbers, mine, fixed, dims, self._map, ids, bounds, self.world)

    def _exchange_ids(
        self, lease: Remote, heads: np.ndarray, weights: Tensor | None
    ) -> tuple[Any, np.ndarray, np.ndarray]:
        """For each rank: ids whose rows are wanted, then ids, lengths and weights of bags to be pooled."""
        packed, pooled = pack_ids(lease.ids, lease.sent, self.wire.widths), lease.pooled
        received, bags, items = self._heard(heads, 0 if pooled is None else len(pooled.numbers))
        splits, sizes = lease.sent @ self.wire.widths, received @ self.wire.widths
        if pooled is None:
            return torch.from_numpy(packed), splits, sizes
        widths = self._id_widths(pooled)
        pieces = [
            (packed, splits),
            (pack_ids(pooled.ids, pooled.items, widths), pooled.items @ widths),
            (pooled.lengths.view(np.uint8), 4 * pooled.bags.sum(1)),
        ]
        sizes = sizes + items @ widths + 4 * bags.sum(1)
        if weights is not None:
            mine = weights.detach().to(torch.float32).numpy()[pooled.source]
            pieces.append((mine.view(np.uint8), 4 * pooled.items.sum(1)))
            sizes = sizes + 4 * items.sum(1)
        cuts = [np.split(data, np.cumsum(size)[:-1]) for data, size in pieces]
        every = [cut[rank] for rank in range(self.world) for cut in cuts]
        return torch.from_numpy(np.concatenate(every)), sum(size for _, size in pieces), sizes

    def _id_widths(self, pooled: Pooled) -> np.ndarray:
        return self.wire.widths[[self.wire.order.index(int(p)) for p in pooled.pieces]]

    def _own(self, lease: Remote, heads: np.ndarray, answer: np.ndarray, training: bool, weighted: bool) -> None:
        """This rank's side of what all ranks asked for; an error waits for the lookup, where all ranks raise it."""
        pooled, overflow = lease.pooled, not heads[:, 0].any()
        lease.received, bags, items = self._heard(heads, 0 if pooled is None else len(pooled.numbers))
        if pooled is None:
            lease.received_ids = unpack_ids(answer, lease.received, self.wire.widths)
        else:
            widths = self._id_widths(pooled)
            pooled.received_bags, pooled.received_items = bags, items
            sizes = [
                lease.received @ self.wire.widths,
                pooled.received_items @ widths,
                4 * pooled.received_bags.sum(1),
                4 * pooled.received_items.sum(1) * weighted,
            ]
            parts = np.split(answer, np.cumsum(np.column_stack(sizes).ravel())[:-1])
            rows, ids, lengths, weights = (np.concatenate(parts[k::4]) for k in range(4))
            lease.received_ids = unpack_ids(rows, lease.received, self.wire.widths)
            asked = unpack_ids(ids, items, widths), lengths.view(np.int32)
        try:
            lease.handle = self._local(lease.received_ids, lease.received, training, overflow)
            if pooled is not None:
                pooled.handle = self._local_bags(
                    pooled, *asked, weights.view(np.float32) if weighted else None, training, overflow
                )
        except Exception as error:
            lease.error = error

    def _local_bags(
        self,
        pooled: Pooled,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None,
        training: bool,
        overflow: bool,
    ) -> Handle:
        layout = local_layout(pooled.pieces, pooled.dims, pooled.received_bags)
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(torch.from_numpy(lengths), 0, out=offsets[1:])
        given = None if weights is None else torch.from_numpy(weights)
        strides = tuple(pooled.received_bags.ravel().tolist())
        batch = KeyedJaggedTensor.trusted(list(layout.names), torch.from_numpy(ids), given, offsets, strides)
        part = Part(layout, batch, batch, self.local.front, training, overflow)
        return Handle(batch, [part], torch.device("cpu"))

    def refuse(self, error: Exception) -> None:
        """Collective: take part in the other ranks' ``stage`` with an error; raises it."""
        lane, _ = self._next()
        meet(lane, 0, error, None, self._heads())

    def _local(self, ids: np.ndarray, counts: np.ndarray, training: bool, overflow: bool = True) -> Handle:
        """Rows that ranks ask of this one, in wire order, resident here."""
        offsets = torch.zeros(counts.size + 1, dtype=torch.int64)
        torch.cumsum(torch.from_numpy(counts.ravel()), 0, out=offsets[1:])
        batch = KeyedJaggedTensor.trusted(self._keys, torch.from_numpy(ids), None, offsets, (1,) * counts.size)
        return self.local.stage(batch, self._names, training=training, overflow=overflow)

    # rows -------------------------------------------------------------------------------------------------------

    def slots(self, lease: Remote) -> Tensor:
        """The slot of each id in the slabs of the lease."""
        if not lease.open:
            raise StaleLookup(RELEASED)
        return lease.out

    def read(self, lease: Remote) -> list[Tensor]:
        """Collective, unless the lease's rows were read since the last step: fp32 rows by piece, for ``slots``."""
        if not lease.open:
            raise StaleLookup(RELEASED)
        if lease.version != self.version:
            lease.slabs = self._read(lease)
            lease.version = self.version
        return lease.slabs

    def _read(self, lease: Remote) -> list[Tensor]:
        error, rows = lease.error, torch.empty(0)
        asked, pooled = self.wire.rows_out(lease.received), lease.pooled
        going, coming, classes = asked, lease.rows, list(self.wire.classes)
        if pooled is not None:
            going, coming = np.hstack([asked, pooled.received_bags]), np.hstack([lease.rows, pooled.bags])
            classes = self._classes([pooled])
        if error is None:
            try:
                rows = self.local.read_part(self._readable(lease, asked), 0)
                if pooled is not None:
                    assert pooled.handle is not None
                    sums = self.local.read_part(pooled.handle.parts[0], 0)
                    rows = _interleaved(
                        rows, asked @ self.wire.dims, sums, pooled.received_bags @ np.array(pooled.dims)
                    )
            except Exception as problem:
                error = problem
        buffers = [torch.empty(int(coming[:, c].sum()), dim) for dim, c in classes] if len(classes) > 1 else []
        signature = zlib.crc32(b"rows", lease.number)
        rows = self.mover.moved(self.lanes.rows, signature, error, rows, going, coming, classes, buffers)
        slabs = self._by_piece(buffers or [rows.view(-1, classes[0][0])], lease.begin)
        if self._shorten:
            self._shorten(slabs, rows_received(self.wire.order, lease.rows))
        return slabs

    def _classes(self, pooled: Sequence[Pooled]) -> list[tuple[int, slice]]:
        """Blocks of a message: rows of each dimension, then the sums of each pooled feature."""
        dims = [dim for each in pooled for dim in each.dims]
        at = len(self.wire)
        return [*self.wire.classes, *((dim, slice(at + k, at + k + 1)) for k, dim in enumerate(dims))]

    def descriptions(self, pooled: Sequence[Pooled]) -> Tensor:
        """The kernels' description of the pieces, and of the sums of pooled features as further ones."""
        rows = [(dim, 0, 4 * dim, 0, 0, 0, 0, dim) for each in pooled for dim in each.dims]
        return torch.cat([self.described, torch.tensor(rows, dtype=torch.int64)]) if rows else self.described

    def _readable(self, lease: Remote, asked: np.ndarray) -> Part:
        """The local part without what other ranks have copies of."""
        part = lease.part
        if not self.wire.everywhere.any():
            return part
        view = part._clone()
        keep = torch.from_numpy(asked.ravel() == lease.received.ravel())
        sizes = asked * self.wire.dims
        view.features = part.features[keep].clone()
        view.features[:, OFFSET] = torch.from_numpy(starts_of(sizes).ravel())[keep]
        view.numel = int(sizes.sum())
        view.shape = (view.numel,)
        return view

    def _by_piece(self, buffers: list[Tensor], begin: np.ndarray) -> list[Tensor]:
        """Slabs uint8 [n, 4 D]: of pieces routed by bucket all rows of their dimension, else from the piece's on; then
        those of sums."""
        slabs = list(self.none)
        for buffer, (_, columns) in zip(buffers, self.wire.classes, strict=False):
            whole = buffer.view(torch.uint8)
            for j in range(columns.start, columns.stop):
                piece = self.wire.pieces[j]
                first = 0 if piece.route == HASH else int(begin[self.rank if piece.route == ALL else piece.rank, j])
                slabs[self.wire.order[j]] = whole[first:]
        return slabs + [buffer.view(torch.uint8) for buffer in buffers[len(self.wire.classes) :]]

    def features(self, features: Tensor) -> Tensor:
        """Those of tables as those of their pieces."""
        if not self._split:
            return features
        of_table: dict[int, list[int]] = {}
        for p, piece in enumerate(self.pieces):
            of_table.setdefault(piece.table, []).append(p)
        rows: list[list[int]] = []
        for row in features.tolist():
            if row[TABLE] >= len(self.pieces):  # sums
                rows.append(row)
            for p in of_table.get(row[TABLE], ()):
                mine = list(row)
                mine[TABLE], mine[OFFSET] = p, row[OFFSET] + self.pieces[p].columns[0]
                rows.append(mine)
        return torch.tensor(rows, dtype=torch.int64).view(-1, 7)

    def view(self, part: Part) -> View:
        """What the kernels read of a part: its features by piece, slots, offsets, weights."""
        lease: Remote = part.lease
        if lease.pooled is None:
            return View(self.features(part.features), self.slots(lease), part.offsets, part.float_weights())
        if lease.reduced is None:
            assert part.offsets is not None
            lease.reduced = reduced(lease.pooled, part.features, part.offsets, part.weights, len(self.pieces))
        seen = lease.reduced
        return View(self.features(seen.features), seen.slots(self.slots(lease)), seen.offsets, seen.weights)

    # gradients --------------------------------------------------------------------------------------------------

    def join(self, leases: Sequence[Remote], frozen: Collection[int]) -> Joined:
        """The distinct ids of leases, in call order, without frozen tables; their rows pinned at their owner. No
        exchange: every rank knows what was asked in each."""
        active = np.array([piece.table not in frozen for piece in self.wire.pieces], dtype=np.bool_)
        for lease in leases:
            if lease.error is not None:
                raise lease.error
        pooled = [lease.pooled for lease in leases if lease.pooled is not None]
        for each in pooled:
            assert each.handle is not None
            each.handle.parts[0].slots()
        if len(leases) == 1 and (active | (leases[0].sent.sum(0) + leases[0].received.sum(0) == 0)).all():
            only = leases[0]
            only.part.slots()
            assert only.handle is not None
            return Joined(only.sent, only.received, only.rows, only.begin, None, only.handle, False, pooled)
        ids, received, _ = union([(lease.received_ids, lease.received) for lease in leases], active)
        _, rows, places = union([self._asked(lease) for lease in leases], active)
        begin, slots, at = begins_of(self.wire, rows), {}, 0
        for lease in leases:
            n = int(lease.rows.sum())
            slots[lease.number] = torch.from_numpy(
                moved_slots(
                    self.wire, lease.rows, lease.begin, begin, places[at : at + n], lease.spans, lease.out.numpy()
                )
            )
            at += n
        sent = rows.copy()
        sent[:, self.wire.everywhere] = rows[self.rank, self.wire.everywhere]
        handle = self._local(ids, received, True)
        try:
            handle.parts[0].slots()
        except BaseException:
            handle.release()
            raise
        return Joined(sent, received, rows, begin, slots, handle, True, pooled)

    def _asked(self, lease: Remote) -> tuple[np.ndarray, np.ndarray]:
        """(ids whose rows come back, int64 [W, P] of them)."""
        if not self.wire.everywhere.any():
            return lease.ids, lease.rows
        return lease.ids[np.repeat((lease.rows == lease.sent).ravel(), lease.sent.ravel())], lease.rows

    def zeros(self, joined: Joined) -> tuple[list[Tensor], list[Tensor]]:
        """(by class, by piece and pooled feature): rows of zeros that an update's gradients are summed into."""
        coming = np.hstack([joined.rows, *(pooled.bags for pooled in joined.pooled)])
        buffers = [torch.zeros(int(coming[:, columns].sum()), dim) for dim, columns in self._classes(joined.pooled)]
        return buffers, self._by_piece(buffers, joined.begin)

    def send_gradients(self, joined: Joined, sums: list[Tensor]) -> list[tuple[Part, Tensor]]:
        """Exchange the sums of an update to the owners; what this rank applies: local parts with their gradients."""
        classes = self._classes(joined.pooled)
        going = np.hstack([joined.sent, *(pooled.bags for pooled in joined.pooled)])
        coming = np.hstack([joined.received, *(pooled.received_bags for pooled in joined.pooled)])
        if len(sums) == 1 and not self.wire.everywhere.any():
            rows = sums[0].view(-1)
        else:
            rows = torch.cat([torch.empty(0), *self._outgoing(joined, sums)])
        came = self.mover.moved(self.lanes.grads, None, None, rows, going, coming, classes)
        parts = [joined.handle.parts[0]]
        parts += [pooled.handle.parts[0] for pooled in joined.pooled if pooled.handle is not None]
        if len(parts) == 1:
            return [(parts[0], came)]
        widths = [joined.received @ self.wire.dims]
        widths += [pooled.received_bags @ np.array(pooled.dims) for pooled in joined.pooled]
        cuts = came.split(np.column_stack(widths).ravel().tolist())
        return [(part, torch.cat(cuts[k :: len(parts)])) for k, part in enumerate(parts)]

    def _outgoing(self, joined: Joined, sums: list[Tensor]) -> Iterator[Tensor]:
        copies, classes = self.wire.everywhere, self.wire.classes
        bags = np.hstack([np.zeros((self.world, 0), np.int64), *(pooled.bags for pooled in joined.pooled)])
        begin = np.cumsum(bags, axis=0) - bags
        for rank in range(self.world):
            for buffer, (_, columns) in zip(sums, classes, strict=False):
                for holder, mine in ((rank, ~copies[columns]), (self.rank, copies[columns])):
                    if mine.any():
                        first = int(joined.begin[holder, columns][mine][0])
                        block = buffer[first : first + int(joined.rows[holder, columns][mine].sum())]
                        # replicas must get the same bits, so the own copy is rounded as it is for the others
                        same = rank != self.rank or not copies[columns][mine].any() or self.mover.exact
                        yield (block if same else self.mover.rounded(block)).reshape(-1)
            for k, buffer in enumerate(sums[len(classes) :]):
                yield buffer[begin[rank, k] : begin[rank, k] + bags[rank, k]].reshape(-1)

    # the rest of a front ------------------------------------------------------------------------------------------

    def relax(self, lease: Remote) -> None:
        """Rows here are copies: nothing to let go of. The owner relaxes its own after each reading."""

    def release(self, lease: Remote) -> None:
        """The lease ends, and with it the owner's pins of what all ranks asked for; no exchange."""
        lease.open = False
        lease.slabs = []
        handles = [lease.handle, None if lease.pooled is None else lease.pooled.handle]
        lease.handle = None
        for handle in handles:
            if handle is not None:
                handle.release()

    def direct(self, t: int) -> bool:
        """No table lies whole here."""
        return False

    @property
    def durable(self) -> DurableTier | None:
        """That of the local store."""
        return self.local.front.durable

    @property
    def below(self) -> list[Any]:
        """The tiers of the local store."""
        return self.local.front.below

    def pins(self) -> int:
        """Rows of the local store that are pinned."""
        return self.local.front.pins()

    def announce(self, features: Tensor, values: Tensor, offsets: Tensor | None, ahead: int) -> None:
        """Nothing: owners are not told of batches before they are staged."""

    def settle(self) -> None:
        """Wait for this rank's store to be saved, where it is being saved."""
        self.local.front.settle()

    def flush(self) -> None:
        """Write this rank's dirty rows to the tier below."""
        self.local.front.flush()

    def stats(self) -> dict[str, Any]:
        """Those of the local store's cache."""
        return self.local.front.stats()

    def extra_state(self) -> dict[str, Tensor]:
        """Of this rank's admission and expiry."""
        return self.local.front.extra_state()

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore this rank's."""
        self.local.front.load_extra_state(state)

    def close(self) -> None:
        """Close the local store."""
        self.local.close()


def _interleaved(rows: Tensor, of_rows: np.ndarray, sums: Tensor, of_sums: np.ndarray) -> Tensor:
    """Of two buffers that are each rank after rank, both of a rank, rank after rank."""
    pairs = zip(rows.split(of_rows.tolist()), sums.split(of_sums.tolist()), strict=True)
    return torch.cat([part for pair in pairs for part in pair])


def _spans(features: Tensor, offsets: Tensor | None, without: set[int]) -> dict[int, list[tuple[int, int]]]:
    """Positions of the ids of each table that is not among ``without``."""
    at = None if offsets is None else offsets.numpy()
    spans: dict[int, list[tuple[int, int]]] = {}
    for row in features.tolist():
        first, last = row[FIRST], row[FIRST] + row[BAGS]
        if row[TABLE] not in without:
            spans.setdefault(row[TABLE], []).append((first, last) if at is None else (int(at[first]), int(at[last])))
    return spans
