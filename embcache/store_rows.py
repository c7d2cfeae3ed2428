"""Whole tables of a store: rows in and out by id, views where a table lies whole in memory, plain state dicts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import records, tablefile
from .cache import Front
from .config import TableConfig
from .errors import BadConfig, BadJaggedType, ForkError, IdOutOfRange, NotSupported, SchemaMismatch, StoreClosed
from .jagged_checks import INDEX_DTYPES

BLOCK = 65536
CLOSED = -1
_own_pid = os.getpid
EXTRA = "extra."
Form = tuple[tuple[int | None, ...], torch.dtype]  # of a saved tensor; None: any number


class StoreRows:
    """What ``EmbeddingStore`` offers besides batches; none of it may run beside a ``step`` of another thread."""

    tables: list[TableConfig]
    names: list[str]
    steps: list[int]
    front: Front
    version: int
    _pid: int  # of the process that opened it; CLOSED afterwards

    def index(self, table: str) -> int:
        """Position of a table by name."""
        if table not in self.names:
            raise BadConfig(f"no table {table!r}; tables are {self.names}")
        return self.names.index(table)

    def _settled(self) -> None:
        """Raise while gradients wait for the step."""
        raise NotImplementedError

    def pending_tables(self) -> set[int]:
        """Unfrozen tables with gradients waiting."""
        raise NotImplementedError

    def discard(self) -> None:
        """Forget gathered gradients."""
        raise NotImplementedError

    def require_usable(self) -> None:
        """StoreClosed after ``close()``, ForkError in a child of the process that opened a store on disk."""
        if self._pid != _own_pid():
            if self._pid == CLOSED:
                raise StoreClosed(f"the store of tables {self.names} is closed")
            durable = self.front.durable
            if durable is not None:
                raise ForkError(
                    f"the store in {durable.folder} was opened by process {self._pid}: a process forked from it opens "
                    "the folder anew, with readonly=True"
                )

    def require_writable(self, what: str) -> None:
        """``require_usable``, and NotSupported where the store was opened read-only."""
        self.require_usable()
        if self.front.durable is not None and self.front.durable.readonly:
            raise NotSupported(f"{what}: the store {self.front.durable.folder} was opened read-only")

    # views ------------------------------------------------------------------------------------------------------

    def _slab(self, t: int) -> Tensor:
        self.require_usable()
        if not self.front.direct(t):
            raise NotSupported(
                f"table {self.names[t]!r} does not lie whole in memory: use read_rows(ids), scan() or export_table()"
            )
        return self.front.arenas[t].slab

    def weight(self, table: str) -> Tensor:
        """[rows, D] view of a table's weights in its storage dtype, for tables that lie whole in memory; no gradient.
        Rows changed through it are not noted as written, so checkpoints miss them: use ``load_rows``."""
        t = self.index(table)
        return records.weights(self.tables[t], self._slab(t))

    def state(self, table: str) -> Tensor:
        """fp32 [rows, floats] view of the optimizer state of a table that lies whole in memory."""
        t = self.index(table)
        return records.states(self.tables[t], self._slab(t))

    # rows by id -------------------------------------------------------------------------------------------------

    def _checked(self, t: int, ids: Tensor) -> Tensor:
        if not isinstance(ids, Tensor) or ids.dtype not in INDEX_DTYPES:
            kind = ids.dtype if isinstance(ids, Tensor) else f"type {type(ids).__name__}"
            raise BadJaggedType(f"ids of table {self.names[t]!r} have {kind}, must be torch.int32 or torch.int64")
        ids = ids.detach().to(torch.int64).reshape(-1)
        rows = self.tables[t].num_embeddings
        if rows is not None:
            bad = ((ids < 0) | (ids >= rows)).nonzero().flatten()
            if bad.numel():
                k = int(bad[0])
                raise IdOutOfRange(self.names[t], self.names[t], k, int(ids[k]), rows)
        return ids

    def read_rows(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [n, D], state fp32 [n, floats]) of any ids as they are now, copies; the cache does not change."""
        t = self.index(table)
        self.require_usable()
        rows = self.front.read_rows(t, self._checked(t, ids))
        parts = records.split(self.tables[t], rows)
        return parts["weight"], parts["state"]

    def load_rows(self, table: str, ids: Tensor, weight: Tensor, state: Tensor | None = None) -> None:
        """Replace rows by id (each once), weights [n, D] and state fp32 [n, floats] (None: as it begins)."""
        t = self.index(table)
        ids = self._checked(t, ids)
        if ids.unique().numel() != ids.numel():
            raise BadConfig(f"load_rows into table {table!r}: an id occurs twice")
        if weight.shape[0] != ids.numel():
            raise SchemaMismatch(f"rows for table {table!r}", weight.shape[0], ids.numel())
        self.put_raw_rows(t, ids, records.join(self.tables[t], weight.detach(), state))

    def delete(self, table: str, ids: Tensor) -> None:
        """The ids read as their initial values from now on, as if they had never been trained."""
        t = self.index(table)
        self._settled()
        self.require_writable("delete")
        self.front.delete(t, self._checked(t, ids).unique())
        self.version += 1

    def written_rows(self, table: str, block: int = BLOCK) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(ids int64 [n], weights [n, D], state fp32 [n, floats]) of the rows that differ from their initial values,
        n <= ``block``, ids ascending (as unsigned numbers); copies."""
        t = self.index(table)
        _check_block(block)
        for ids, rows in self.raw_rows(t, block):
            parts = records.split(self.tables[t], rows)
            yield ids, parts["weight"], parts["state"]

    def count_written(self, table: str) -> int:
        """Rows of a table that differ from their initial values."""
        self.require_usable()
        return self.front.count_written(self.index(table))

    def scan(self, table: str, block: int = BLOCK) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(ids, weights, state) of all rows of a bounded table, ``block`` at a time, ids ascending; of an unbounded
        table, its written rows. To be read at once: some are views."""
        t = self.index(table)
        _check_block(block)
        rows = self.tables[t].num_embeddings
        if rows is None:
            yield from self.written_rows(table, block)
            return
        for start in range(0, rows, block):
            ids = torch.arange(start, min(start + block, rows))
            if self.front.direct(t):
                at = slice(start, start + ids.numel())
                yield ids, self.weight(table)[at], self.state(table)[at]
            else:
                yield ids, *self.read_rows(table, ids)

    def raw_rows(self, table: int, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, whole rows uint8 [n, row_bytes]) of the written rows of a table by index."""
        self.require_usable()
        return self.front.written(table, block)

    def put_raw_rows(self, table: int, ids: Tensor, rows: Tensor) -> None:
        """Replace whole rows of a table by index."""
        self.require_writable("load_rows")
        self.front.load_rows(table, ids, rows)
        self.version += 1

    def whole_weight(self, table: str) -> tuple[Tensor | None, Tensor]:
        """Copies: (None, weights [rows, D]) of a bounded table, (ids, weights) of an unbounded one's written rows."""
        t = self.index(table)
        if self.front.direct(t):
            return None, self.weight(table).clone(memory_format=torch.contiguous_format)
        blocks = list(self.scan(table))
        empty = torch.empty(0, self.tables[t].embedding_dim, dtype=self.tables[t].dtype)
        weight = torch.cat([empty, *(block[1] for block in blocks)])
        if not self.tables[t].unbounded:
            return None, weight
        return torch.cat([torch.empty(0, dtype=torch.int64), *(block[0] for block in blocks)]), weight

    def load_weight(self, table: str, weight: Tensor) -> None:
        """Replace all weights of a bounded table; optimizer state stays."""
        t = self.index(table)
        shape = [self.tables[t].num_embeddings, self.tables[t].embedding_dim]
        if list(weight.shape) != shape:
            raise SchemaMismatch(f"shape of table {table!r}", list(weight.shape), shape)
        for start in range(0, weight.shape[0], BLOCK):
            block = weight[start : start + BLOCK].detach()
            ids = torch.arange(start, start + block.shape[0])
            rows = self.front.read_rows(t, ids)
            records.weights(self.tables[t], rows).copy_(block)
            self.put_raw_rows(t, ids, rows)

    def load_table(self, table: str, source: Any, *, ids: Any = None) -> int:
        """Replace rows by those of a file or array, in blocks; see ``embcache.tablefile.load_table``."""
        return tablefile.load_table(self, table, source, ids=ids)

    def export_table(self, table: str, path: str | Path, *, rows: str | None = None, state: bool = False) -> int:
        """Write a table to ``.npy`` or ``.parquet``, in blocks; see ``embcache.tablefile.export_table``."""
        return tablefile.export_table(self, table, path, rows=rows, state=state)

    # optimizer state, by index ----------------------------------------------------------------------------------

    def read_state(self, table: int) -> Tensor | None:
        """Copy of a table's optimizer state, [rows, floats]; None of a table on disk, whose generations hold it."""
        if self.front.direct(table):
            return self.state(self.names[table]).clone()
        if self.front.durable is not None:
            return None
        raise NotSupported(
            f"table {self.names[table]!r} is hashed: its optimizer state is saved with its rows, by "
            "store.state_dict() or ec.checkpoint.Checkpoints"
        )

    def check_state(self, table: int, state: Tensor | None) -> None:
        """Raise where ``state`` (None: nothing was saved) does not fit a table's optimizer state."""
        floats = self.tables[table].state_floats
        if state is None:
            if floats and self.front.direct(table):
                raise SchemaMismatch(f"state of table {self.names[table]!r}", "nothing", [self._rows(table), floats])
            return
        if list(state.shape) != [self._rows(table), floats]:
            raise SchemaMismatch(
                f"state of table {self.names[table]!r}", list(state.shape), [self._rows(table), floats]
            )

    def _rows(self, table: int) -> int | None:
        return self.tables[table].num_embeddings

    def write_state(self, table: int, state: Tensor) -> None:
        """Replace a table's optimizer state."""
        self.check_state(table, state)
        for start in range(0, state.shape[0], BLOCK):
            block = state[start : start + BLOCK]
            ids = torch.arange(start, start + block.shape[0])
            rows = self.front.read_rows(table, ids)
            records.states(self.tables[table], rows).copy_(block)
            self.put_raw_rows(table, ids, rows)

    # plain state dicts ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A store in memory as plain tensors, copies. Of a table that lies whole in memory ``<table>.weight``,
        ``.state`` and ``.written`` (a bit a row); of a hashed one its written rows, ``<table>.ids``, ``.weight``,
        ``.state`` (and ``.meta``); and ``<table>.step``. A store on disk: ``path`` and ``generation``. Gradients that
        wait raise."""
        self._settled()
        durable = self.front.durable
        if durable is not None:
            return {"path": str(durable.folder), "generation": self.generation}
        out: dict[str, Any] = {}
        for t, name in enumerate(self.names):
            if self.front.direct(t):
                out[f"{name}.weight"] = self.weight(name).clone(memory_format=torch.contiguous_format)
                out[f"{name}.state"] = self.state(name).clone(memory_format=torch.contiguous_format)
                out[f"{name}.written"] = self.front.arenas[t].written.clone()
            else:
                empty = torch.empty(0, self.tables[t].row_bytes, dtype=torch.uint8)
                blocks = [(torch.empty(0, dtype=torch.int64), empty), *self.raw_rows(t, BLOCK)]
                parts = records.split(self.tables[t], torch.cat([rows for _, rows in blocks]))
                out[f"{name}.ids"] = torch.cat([ids for ids, _ in blocks])
                out.update({f"{name}.{what}": part for what, part in parts.items()})
            out[f"{name}.step"] = torch.tensor(self.steps[t])
        out.update({f"{EXTRA}{key}": value for key, value in self.front.extra_state().items()})
        return out

    @property
    def generation(self) -> int:
        """The generation last committed to disk, or restored from it; 0 before the first."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave; missing, surplus or differently shaped tensors raise before any change. A
        store on disk goes back to that generation, FileNotFoundError where its folder no longer has it."""
        if self.front.durable is not None:
            self._go_back_to(state)
            return
        mine = {f"{name}.{what}": fit for t, name in enumerate(self.names) for what, fit in self._fits(t).items()}
        saved = {key: _form(tensor) for key, tensor in state.items() if not key.startswith(EXTRA)}
        for key in sorted(mine.keys() | saved.keys()):
            if key not in mine or key not in saved or not _matches(mine[key], saved[key]):
                raise SchemaMismatch(key, saved.get(key, "nothing"), mine.get(key, "nothing"))
        for t, name in enumerate(self.names):
            if not self.front.direct(t):
                self._checked(t, state[f"{name}.ids"])
        self.discard()
        for t, name in enumerate(self.names):
            self._load_table(t, {what: state[f"{name}.{what}"] for what in self._fits(t)})
        self.front.load_extra_state({key.removeprefix(EXTRA): v for key, v in state.items() if key.startswith(EXTRA)})
        self.version += 1

    def _fits(self, t: int) -> dict[str, Form]:
        """Shape (None: any number) and dtype of each tensor of a table's state dict."""
        table, direct = self.tables[t], self.front.direct(t)
        rows = table.num_embeddings if direct else None
        fits: dict[str, Form] = {
            "weight": ((rows, table.embedding_dim), table.dtype),
            "state": ((rows, table.state_floats), torch.float32),
            "step": ((), torch.int64),
        }
        if direct:
            return {**fits, "written": ((self.front.arenas[t].written.numel(),), torch.uint8)}
        if table.meta_bytes:
            fits["meta"] = ((None, 2), torch.int32)
        return {**fits, "ids": ((None,), torch.int64)}

    def _load_table(self, t: int, saved: dict[str, Tensor]) -> None:
        self.steps[t] = int(saved.pop("step"))
        if self.front.direct(t):
            self.weight(self.names[t]).copy_(saved["weight"])
            self.state(self.names[t]).copy_(saved["state"])
            self.front.arenas[t].written.copy_(saved["written"])
        else:
            self.front.reset(t)
            self.put_raw_rows(t, saved.pop("ids"), records.join(self.tables[t], **saved))

    def _go_back_to(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


def _form(tensor: Tensor) -> Form:
    return tuple(tensor.shape), tensor.dtype


def _matches(mine: Form, saved: Form) -> bool:
    same = len(mine[0]) == len(saved[0]) and all(a in (None, b) for a, b in zip(mine[0], saved[0], strict=True))
    return same and mine[1] == saved[1]


def _check_block(block: int) -> None:
    if block < 1:
        raise BadConfig(f"block = {block}, must be at least 1")
