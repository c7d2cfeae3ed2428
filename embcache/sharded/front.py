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

from ..errors import StaleLookup
from ..jagged import KeyedJaggedTensor
from ..layout import BAGS, FIRST, OFFSET, TABLE
from ..staged import Handle, Part
from ..store import EmbeddingStore
from ..tiers.base import Arena, DurableTier
from .by_id import RemoteRows
from .exchange import WireOrder, begins_of, moved_slots, pack_ids, route, starts_of, union, unpack_ids
from .meeting import HEAD, meet
from .plan import ALL, HASH, Piece, ShardingPlan
from .wire import Wire

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
        slabs: by piece, the rows as they were at ``version`` of the store.
    """

    __slots__ = (
        "begin", "error", "handle", "ids", "number", "open", "out", "received", "received_ids", "rows", "sent", "slabs",
        "spans", "training", "version",
    )  # fmt: skip

    def __init__(self, number: int, training: bool) -> None:
        self.number, self.training, self.open = number, training, True
        self.sent = self.received = self.rows = self.begin = np.zeros((0, 0), dtype=np.int64)
        self.ids = self.received_ids = np.empty(0, dtype=np.int64)
        self.out: Tensor = torch.empty(0, dtype=torch.int32)
        self.handle: Handle | None = None
        self.error: Exception | None = None
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


class RemoteFront(RemoteRows):
    """What a store's modules, handles and optimizer ask of a front, with rows that live elsewhere.

    ``stage`` meets the other ranks on lane ``ids`` (on a look-ahead's thread on a road of its own), lookups on lane
    ``rows``, updates on lane ``grads``.
    """

    def __init__(self, plan: ShardingPlan, pieces: Sequence[Piece], local: EmbeddingStore, lanes: Any) -> None:
        self.plan, self.pieces, self.local, self.lanes = plan, list(pieces), local, lanes
        self.world, self.rank = lanes.world, lanes.rank
        limits = {piece.table: table.num_embeddings for piece, table in zip(pieces, local.tables, strict=True)}
        self.wire = WireOrder(pieces, [limits[t] for t in range(len(limits))], self.world, self.rank)
        self.codec = Wire(plan.wire)
        self._row_bytes = np.array([self.codec.row_bytes(int(dim)) for dim in self.wire.dims], dtype=np.int64)
        self._map = plan.map
        self._keys = [local.tables[p].feature_names[rank] for rank in range(self.world) for p in self.wire.order]
        self._names = tuple(self._keys)
        self._split = len(pieces) > len(limits)
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
        self, features: Tensor, values: Tensor, offsets: Tensor | None, training: bool, *, overflow: bool = True
    ) -> Remote:
        """Collective. Tell the owners which rows are needed; they make them resident and pin them."""
        lane, number = self._next()
        lease = Remote(number, training)
        ids = values.to(torch.int64).contiguous().numpy()
        lease.spans = _spans(features, offsets)
        ranges = np.array([span for spans in lease.spans.values() for span in spans], dtype=np.int64).reshape(-1, 2)
        ends = np.cumsum([0] + [len(spans) for spans in lease.spans.values()])
        routed = route(self.wire, self._map, list(lease.spans), ids, ranges, ends, training)
        lease.sent, lease.ids, lease.rows, lease.begin = routed.sent, routed.ids, routed.rows, routed.begin
        lease.out = torch.from_numpy(routed.slots)
        packed = pack_ids(lease.ids, lease.sent, self.wire.widths)
        signature = zlib.crc32(features[:, :2].contiguous().numpy().tobytes(), lease.number << 1 | training)
        heads, answer = meet(
            lane, signature, None, lambda heads: self._exchange_ids(packed, lease, heads),
            np.column_stack([np.full(self.world, not overflow, dtype=np.int64), lease.sent]),
        )  # fmt: skip
        lease.received = np.ascontiguousarray(heads[:, 1:])
        lease.received_ids = unpack_ids(answer.numpy(), lease.received, self.wire.widths)
        try:
            lease.handle = self._local(lease.received_ids, lease.received, training, not heads[:, 0].any())
        except Exception as error:
            lease.error = error
        return lease

    def _exchange_ids(self, packed: np.ndarray, lease: Remote, heads: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        received = heads[:, HEAD + 1 :]
        return torch.from_numpy(packed), lease.sent @ self.wire.widths, received @ self.wire.widths

    def refuse(self, error: Exception) -> None:
        """Collective: take part in the other ranks' ``stage`` with an error; raises it."""
        lane, _ = self._next()
        meet(lane, 0, error, None, np.zeros((self.world, 1 + len(self.wire)), dtype=np.int64))

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
        asked = self.wire.rows_out(lease.received)
        if error is None:
            try:
                rows = self.local.read_part(self._readable(lease, asked), 0)
            except Exception as problem:
                error = problem
        classes = self.wire.classes
        buffers = [torch.empty(int(lease.rows[:, c].sum()), dim) for dim, c in classes] if len(classes) > 1 else []
        signature = zlib.crc32(b"rows", lease.number)
        rows = self._moved(self.lanes.rows, signature, error, rows, asked, lease.rows, buffers)
        return self._by_piece(buffers or [rows.view(-1, classes[0][0])], lease.begin)

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

    def _moved(
        self,
        lane: Any,
        signature: int | None,
        error: Exception | None,
        rows: Tensor,
        going: np.ndarray,
        coming: np.ndarray,
        buffers: Sequence[Tensor] = (),
    ) -> Tensor:
        """Exchange fp32 rows in wire order: ``rows`` has ``going`` [W, P] of them, the result ``coming``, unless these
        go into ``buffers``, one for each dimension. ``signature`` None: the ranks have met already."""
        sent, back = going.copy(), coming.copy()
        if not self.codec.exact:  # the own part does not pass the codec
            sent[self.rank] = back[self.rank] = 0
        splits, sizes, packed = sent @ self._row_bytes, back @ self._row_bytes, torch.empty(0, dtype=torch.uint8)
        if error is None and self.codec.exact:
            packed = rows.view(torch.uint8)
        elif error is None:
            packed = torch.empty(int(splits.sum()), dtype=torch.uint8)
            others = [(block, None) for rank, block in self._blocks(rows, going) if rank != self.rank]
            self.codec.encode_many(others, packed)
        if signature is None:
            answer = lane.submit(lane.all_to_all, (packed, splits), sizes).result()
        else:
            _, answer = meet(lane, signature, error, lambda heads: (packed, splits, sizes))
        return self._unpacked(answer, rows, going, coming, buffers)

    def _unpacked(
        self, answer: Tensor, rows: Tensor, going: np.ndarray, coming: np.ndarray, buffers: Sequence[Tensor]
    ) -> Tensor:
        if self.codec.exact and not buffers:
            return answer.view(torch.float32)
        out = torch.empty(0 if buffers else int((coming @ self.wire.dims).sum()))
        targets = list(self._targets(coming, buffers) if buffers else self._blocks(out, coming))
        if self.codec.exact:
            for (_, target), (_, block) in zip(targets, self._blocks(answer.view(torch.float32), coming), strict=True):
                target.copy_(block)
            return out
        self.codec.decode_many(answer, [(target, None) for rank, target in targets if rank != self.rank])
        own = [block for rank, block in self._blocks(rows, going) if rank == self.rank]
        for target, block in zip([target for rank, target in targets if rank == self.rank], own, strict=True):
            target.copy_(block)
        return out

    def _targets(self, coming: np.ndarray, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """(rank, rows) as ``_blocks``, in a buffer for each dimension."""
        done = [0] * len(buffers)
        for rank in range(self.world):
            for k, (_, columns) in enumerate(self.wire.classes):
                n = int(coming[rank, columns].sum())
                yield rank, buffers[k][done[k] : done[k] + n]
                done[k] += n

    def _blocks(self, rows: Tensor, counts: np.ndarray) -> Iterator[tuple[int, Tensor]]:
        """(rank, rows [n, D]) of fp32 rows in wire order: what goes to, or came from, a rank in one dimension."""
        at = 0
        for rank in range(self.world):
            for dim, columns in self.wire.classes:
                n = int(counts[rank, columns].sum())
                yield rank, rows[at : at + n * dim].view(n, dim)
                at += n * dim

    def _by_piece(self, buffers: list[Tensor], begin: np.ndarray) -> list[Tensor]:
        """Slabs uint8 [n, 4 D]: of pieces routed by bucket all rows of their dimension, else from the piece's on."""
        slabs = list(self.none)
        for buffer, (_, columns) in zip(buffers, self.wire.classes, strict=True):
            whole = buffer.view(torch.uint8)
            for j in range(columns.start, columns.stop):
                piece = self.wire.pieces[j]
                first = 0 if piece.route == HASH else int(begin[self.rank if piece.route == ALL else piece.rank, j])
                slabs[self.wire.order[j]] = whole[first:]
        return slabs

    def features(self, features: Tensor) -> Tensor:
        """Those of tables as those of their pieces."""
        if not self._split:
            return features
        of_table: dict[int, list[int]] = {}
        for p, piece in enumerate(self.pieces):
            of_table.setdefault(piece.table, []).append(p)
        rows = []
        for row in features.tolist():
            for p in of_table[row[TABLE]]:
                mine = list(row)
                mine[TABLE], mine[OFFSET] = p, row[OFFSET] + self.pieces[p].columns[0]
                rows.append(mine)
        return torch.tensor(rows, dtype=torch.int64).view(-1, 7)

    # gradients --------------------------------------------------------------------------------------------------

    def join(self, leases: Sequence[Remote], frozen: Collection[int]) -> Joined:
        """The distinct ids of leases, in call order, without frozen tables; their rows pinned at their owner. No
        exchange: every rank knows what was asked in each."""
        active = np.array([piece.table not in frozen for piece in self.wire.pieces], dtype=np.bool_)
        for lease in leases:
            if lease.error is not None:
                raise lease.error
        if len(leases) == 1 and (active | (leases[0].sent.sum(0) + leases[0].received.sum(0) == 0)).all():
            only = leases[0]
            only.part.slots()
            assert only.handle is not None
            return Joined(only.sent, only.received, only.rows, only.begin, None, only.handle, False)
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
        return Joined(sent, received, rows, begin, slots, handle, True)

    def _asked(self, lease: Remote) -> tuple[np.ndarray, np.ndarray]:
        """(ids whose rows come back, int64 [W, P] of them)."""
        if not self.wire.everywhere.any():
            return lease.ids, lease.rows
        return lease.ids[np.repeat((lease.rows == lease.sent).ravel(), lease.sent.ravel())], lease.rows

    def zeros(self, joined: Joined) -> tuple[list[Tensor], list[Tensor]]:
        """(by dimension, by piece): rows of zeros that an update's gradients are summed into."""
        buffers = [torch.zeros(int(joined.rows[:, columns].sum()), dim) for dim, columns in self.wire.classes]
        return buffers, self._by_piece(buffers, joined.begin)

    def send_gradients(self, joined: Joined, sums: list[Tensor]) -> Tensor:
        """Exchange the sums of an update to the owners; the owner's: fp32 rows in wire order."""
        if len(sums) == 1 and not self.wire.everywhere.any():
            rows = sums[0].view(-1)
        else:
            rows = torch.cat([torch.empty(0), *self._outgoing(joined, sums)])
        return self._moved(self.lanes.grads, None, None, rows, joined.sent, joined.received)

    def _outgoing(self, joined: Joined, sums: list[Tensor]) -> Iterator[Tensor]:
        copies = self.wire.everywhere
        for rank in range(self.world):
            for buffer, (_, columns) in zip(sums, self.wire.classes, strict=True):
                for holder, mine in ((rank, ~copies[columns]), (self.rank, copies[columns])):
                    if mine.any():
                        first = int(joined.begin[holder, columns][mine][0])
                        yield buffer[first : first + int(joined.rows[holder, columns][mine].sum())].reshape(-1)

    # the rest of a front ------------------------------------------------------------------------------------------

    def relax(self, lease: Remote) -> None:
        """Rows here are copies: nothing to let go of. The owner relaxes its own after each reading."""

    def release(self, lease: Remote) -> None:
        """The lease ends, and with it the owner's pins of what all ranks asked for; no exchange."""
        lease.open = False
        lease.slabs = []
        handle, lease.handle = lease.handle, None
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


def _spans(features: Tensor, offsets: Tensor | None) -> dict[int, list[tuple[int, int]]]:
    """Positions of the ids of each table."""
    at = None if offsets is None else offsets.numpy()
    spans: dict[int, list[tuple[int, int]]] = {}
    for row in features.tolist():
        first, last = row[FIRST], row[FIRST] + row[BAGS]
        spans.setdefault(row[TABLE], []).append((first, last) if at is None else (int(at[first]), int(at[last])))
    return spans
