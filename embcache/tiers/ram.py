"""Rows in main memory, described."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..config import TableConfig
from ..errors import BadConfig

POLICIES = ("lfu", "lfu_decay", "lookahead", "lru")


class Ram:
    """Rows in main memory: all of them as the last tier of a chain, some of them as a cache over another tier.

    ``Ram()`` holds everything. Alone, it keeps bounded tables at slot = id, on huge pages where the system has them,
    and hashes unbounded tables and those that do not fit. Below a cache it holds rows by key.

    Args:
        rows: cached rows of each table; a dict gives them by table name, and must name them all.
        bytes: memory of the cache in all, index included; small tables are cached whole, the others share the rest.
        policy: which rows stay: "lfu", "lru", "lfu_decay", "lookahead", or a callable, see ``embcache.cache.policy``.

    >>> Ram(rows=1000, policy="lru")
    Ram(rows=1000, policy='lru')
    >>> Ram(rows=0)
    Traceback (most recent call last):
    ...
    embcache.errors.BadConfig: tiers.Ram: rows = 0, must be an integer >= 1
    """

    def __init__(
        self,
        rows: int | Mapping[str, int] | None = None,
        bytes: int | None = None,
        policy: str | Callable[..., object] | None = None,
    ) -> None:
        if rows is not None and bytes is not None:
            raise BadConfig("tiers.Ram: give rows= or bytes=, not both")
        named = {f"rows[{name!r}]": n for name, n in rows.items()} if isinstance(rows, Mapping) else {"rows": rows}
        for what, value in (*named.items(), ("bytes", bytes)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise BadConfig(f"tiers.Ram: {what} = {value!r}, must be an integer >= 1")
        if policy is not None and rows is None and bytes is None:
            raise BadConfig("tiers.Ram: policy= is for a cache, which needs rows= or bytes=")
        if policy is not None and not callable(policy) and policy not in POLICIES:
            raise BadConfig(f"tiers.Ram: policy = {policy!r}, must be one of {list(POLICIES)} or a callable")
        self.rows = dict(rows) if isinstance(rows, Mapping) else rows
        self.bytes = bytes
        self.policy = "lfu" if policy is None else policy
        self.bounded = rows is not None or bytes is not None
        self.whole: frozenset[str] | None = None  # tables that may lie whole in memory, None: all

    def __repr__(self) -> str:
        said = [f"rows={self.rows!r}"] * (self.rows is not None) + [f"bytes={self.bytes!r}"] * (self.bytes is not None)
        return f"Ram({', '.join(said + [f'policy={self.policy!r}'] * self.bounded)})"

    def fresh(self) -> Ram:
        """Another tier of the same description."""
        other = Ram(self.rows, self.bytes, self.policy if self.bounded else None)
        other.whole = self.whole
        return other

    def split(self, tables: Sequence[TableConfig], extra: int) -> list[int]:
        """Rows to cache of each table, at least 1; ``extra`` bytes a row are needed besides the row itself."""
        if isinstance(self.rows, dict):
            names = [table.name for table in tables]
            if set(self.rows) != set(names):
                raise BadConfig(f"tiers.Ram: rows = {self.rows}, must name each of the tables {names} and no other")
            return [self.rows[name] for name in names]
        if self.rows is not None:
            return [self.rows] * len(tables)
        assert self.bytes is not None
        return _shares(self.bytes, tables, extra)


def _shares(total: int, tables: Sequence[TableConfig], extra: int) -> list[int]:
    """Equal shares of ``total`` bytes; what a small table does not need goes to the others."""
    rows = [1] * len(tables)
    wide = [table.row_bytes + extra for table in tables]
    full = [
        None if table.num_embeddings is None else table.num_embeddings * w
        for table, w in zip(tables, wide, strict=True)
    ]
    order = sorted(range(len(tables)), key=lambda t: (full[t] is None, full[t] or 0))
    left = total
    for k, t in enumerate(order):
        share = left // (len(order) - k)
        used = share if full[t] is None else min(share, full[t] or 0)
        rows[t] = max(1, used // wide[t])
        left -= used
    if sum(wide) > total:
        raise BadConfig(f"tiers.Ram: bytes = {total}, the tables need at least {sum(wide)}, one row each")
    return rows
