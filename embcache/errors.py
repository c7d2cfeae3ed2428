"""Typed errors. Each names the table, the position, the value and the valid range, and subclasses the built-in
exception a caller would naturally catch.

>>> issubclass(IdOutOfRange, IndexError), issubclass(BadJagged, ValueError)
(True, True)
"""

from __future__ import annotations

import builtins


class EmbcacheError(Exception):
    """Base of every error this library raises on purpose."""


class IdOutOfRange(EmbcacheError, IndexError):
    """An id lies outside ``[0, num_embeddings)`` of its table; nothing was touched.

    >>> print(IdOutOfRange("user", "user", 3, 50000001, 50000000))
    table 'user', feature 'user': values[3] = 50000001, valid range [0, 50000000)
    """

    def __init__(self, table: str, feature: str, position: int, value: int, rows: int) -> None:
        self.table, self.feature, self.position, self.value, self.rows = table, feature, position, value, rows
        super().__init__(f"table {table!r}, feature {feature!r}: values[{position}] = {value}, valid range [0, {rows})")


class BadJagged(EmbcacheError, ValueError):
    """Lengths, offsets, values and keys of a jagged batch contradict each other."""


class BadJaggedType(EmbcacheError, TypeError):
    """A tensor of a jagged batch has the wrong dtype."""


class BadConfig(EmbcacheError, ValueError):
    """A table, optimizer, initialiser or tier was described with values that cannot work."""


class UnknownFeature(EmbcacheError, KeyError):
    """A batch lacks a feature that a table needs, or a name is asked for that does not exist."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class NotSupported(EmbcacheError, NotImplementedError):
    """A documented limit: this combination is refused rather than ignored."""


class NonFiniteGradient(EmbcacheError, FloatingPointError):
    """A NaN or infinity in the gradient of a pooled output; no weight was changed.

    >>> print(NonFiniteGradient("user", "clicks", 2, 5, float("nan")))
    table 'user', feature 'clicks': gradient of bag 2, column 5 is nan; the step is refused and no weight has \
changed (on_nonfinite='skip' skips such steps, as a GradScaler needs)
    """

    def __init__(self, table: str, feature: str, bag: int, column: int, value: float) -> None:
        self.table, self.feature, self.bag, self.column, self.value = table, feature, bag, column, value
        super().__init__(
            f"table {table!r}, feature {feature!r}: gradient of bag {bag}, column {column} is {value}; the step is "
            "refused and no weight has changed (on_nonfinite='skip' skips such steps, as a GradScaler needs)"
        )


class NonFiniteLoss(EmbcacheError, FloatingPointError):
    """The loss or a dense gradient is NaN or infinite; no weight was changed."""


class NonFiniteScore(EmbcacheError, ValueError):
    """A model's output is NaN: there is nothing to judge."""


class NoOptimizer(EmbcacheError, RuntimeError):
    """A backward reached an unfrozen table that no SparseOptimizer holds: its gradient would be lost."""


class StaleLookup(EmbcacheError, RuntimeError):
    """Something was asked of a lookup whose rows have been updated or released since."""


class DoubleBackward(EmbcacheError, RuntimeError):
    """A second derivative through an embedding lookup was asked for."""


class SchemaMismatch(EmbcacheError, ValueError):
    """Saved tables and declared tables differ; the message lists both."""

    def __init__(self, what: str, saved: object, declared: object) -> None:
        self.saved, self.declared = saved, declared
        super().__init__(f"{what}: saved {saved!r}, declared {declared!r}")


class UnshardedReplicas(EmbcacheError, RuntimeError):
    """step() of an unsharded store at world size > 1: the replicas would drift apart silently."""


class TableTooLarge(EmbcacheError, MemoryError):
    """Tables that were to live in memory need more than the system has; nothing was allocated."""

    def __init__(self, need: int, free: int, tables: list[str]) -> None:
        self.need, self.free = need, free
        super().__init__(f"tables {tables} need {need:,} bytes of memory, {free:,} are available")


class CacheTooSmall(EmbcacheError, RuntimeError):
    """Rows of batches that are staged ahead do not fit into the cache beside those still needed; nothing was staged.

    >>> print(CacheTooSmall("user", 300, 256))
    table 'user': batches staged ahead need 300 rows at once, the cache holds 256: a larger cache, a smaller depth, or \
depth='auto', which waits
    """

    def __init__(self, table: str, need: int, have: int) -> None:
        self.table, self.need, self.have = table, need, have
        super().__init__(
            f"table {table!r}: batches staged ahead need {need} rows at once, the cache holds {have}: a larger cache, "
            "a smaller depth, or depth='auto', which waits"
        )


class ForkError(EmbcacheError, RuntimeError):
    """A disk store was used in a process forked from its owner: open it by its path, read-only, in one started anew."""


class StoreClosed(EmbcacheError, RuntimeError):
    """A store was used after ``close()``."""


class WrongParent(EmbcacheError, ValueError):
    """A delta export does not continue what it is applied to."""

    def __init__(self, path: str, parent: object, found: object) -> None:
        self.path, self.parent, self.found = path, parent, found
        super().__init__(f"{path} continues {parent}, but what is here is {found}: import the exports in order")


class CorruptStore(EmbcacheError, ValueError):
    """A file is foreign, torn or altered; nothing was read into the model and nothing was written."""


class FormatVersion(EmbcacheError, ValueError):
    """A file was written by a newer version.

    >>> print(FormatVersion("runs/a/manifest.json", 7, 1))
    runs/a/manifest.json has format version 7, this version reads up to 1
    """

    def __init__(self, path: str, found: int, known: int) -> None:
        self.path, self.found, self.known = path, found, known
        super().__init__(f"{path} has format version {found}, this version reads up to {known}")


class StorageFull(EmbcacheError, OSError):
    """The disk has no room; what was committed before is intact and the same call may be tried again.

    ``need`` is None where no single write was at fault.

    >>> print(StorageFull(4096, 100, "runs/a"))
    no room for 4096 bytes at runs/a: 100 free
    """

    def __init__(self, need: int | None, free: int, path: str) -> None:
        self.need, self.free, self.path = need, free, path
        super().__init__(f"no room for {'more' if need is None else f'{need} bytes'} at {path}: {free} free")


class StoreLocked(EmbcacheError, RuntimeError):
    """Another process writes into the folder; readers are not disturbed.

    >>> print(StoreLocked("runs/a", 4711, "node3"))
    runs/a is being written by process 4711 on node3: wait for it, or choose another folder
    """

    def __init__(self, path: str, pid: object, host: object) -> None:
        self.path, self.pid, self.host = path, pid, host
        who = "another process" if pid is None else f"process {pid} on {host}"
        super().__init__(f"{path} is being written by {who}: wait for it, or choose another folder")


class RemoteFault(EmbcacheError):
    """Another rank refused what all ranks were doing; nothing has changed on any of them.

    ``rank``, ``kind`` (the name of its error's class) and ``message`` say what happened there; ``of`` makes one that
    can also be caught as the built-in exception of the original.

    >>> fault = RemoteFault.of(2, "IdOutOfRange", "table 'user', feature 'user': values[3] = 9, valid range [0, 8)")
    >>> print(fault, isinstance(fault, IndexError), isinstance(RemoteFault.of(1, "NoSuchName", ""), RuntimeError))
    rank 2: IdOutOfRange: table 'user', feature 'user': values[3] = 9, valid range [0, 8) True True
    """

    def __init__(self, rank: int, kind: str, message: str) -> None:
        self.rank, self.kind, self.message = rank, kind, message
        super().__init__(f"rank {rank}: {kind}: {message}")

    __str__ = Exception.__str__  # a KeyError would print the repr

    @staticmethod
    def of(rank: int, kind: str, message: str) -> RemoteFault:
        """The fault as an instance of the built-in that an error named ``kind`` is."""
        original = globals().get(kind) or getattr(builtins, kind, None)
        bases = getattr(original, "__mro__", ())
        builtin = next((b for b in bases if b.__module__ == "builtins" and b not in (Exception, BaseException)), None)
        if builtin is None or not issubclass(builtin, Exception):
            builtin = RuntimeError
        return _remote(builtin)(rank, kind, message)


_REMOTE: dict[type[Exception], type[RemoteFault]] = {}


def _remote(builtin: type[Exception]) -> type[RemoteFault]:
    if builtin not in _REMOTE:
        _REMOTE[builtin] = type("RemoteFault", (RemoteFault, builtin), {"__doc__": RemoteFault.__doc__})
    return _REMOTE[builtin]


class RankFailed(EmbcacheError, ConnectionError):
    """A rank of the group died, hangs or stopped with an error: the group cannot go on.

    ``rank`` is None where it cannot be told.

    >>> print(RankFailed(3, "died or hangs"))
    rank 3 died or hangs
    """

    def __init__(self, rank: int | None, what: str) -> None:
        self.rank, self.what = rank, what
        super().__init__(f"{'a rank' if rank is None else f'rank {rank}'} {what}")

    __str__ = Exception.__str__
