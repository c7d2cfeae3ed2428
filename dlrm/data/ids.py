"""How keys (the int64 values of ids) become rows of tables.

``vocab:M``
    Keys seen at least ``M`` times in the training split get a row, the most frequent first, equal counts by key. Row 0
    is for all others ("out of vocabulary"), row 1 for a missing value, rows from 2 for the vocabulary.
``hash:N``
    Row 0 is for a missing value; a key gets ``1 + mix64(key + golden) mod (N - 1)``, see :mod:`dlrm.data.hashing`.
    ``N`` may differ by table.
``raw``
    The key itself, for unbounded tables; a missing value is -2^63.

A bag's absent ids are no ids: the bag is shorter, or empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field

OUT_OF_VOCABULARY, MISSING, FIRST_ROW = 0, 1, 2
RAW_MISSING = -(2**63)


@dataclass(frozen=True)
class IdSpec:
    """``kind``: vocab, hash or raw; ``min_count`` for vocab, ``size`` (and ``sizes`` by table) for hash."""

    kind: str = "vocab"
    min_count: int = 2
    size: int = 0
    sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in ("vocab", "hash", "raw"):
            raise ValueError(f"ids {self.kind!r}: expected vocab, hash or raw")
        if self.kind == "vocab" and self.min_count < 1:
            raise ValueError(f"ids vocab: min_count {self.min_count} must be >= 1")
        if self.kind == "hash":
            for table, size in {"": self.size, **self.sizes}.items():
                if not 2 <= size < 2**62 and not (table == "" and self.sizes and size == 0):
                    raise ValueError(f"ids hash: size {size} {f'of {table!r} ' if table else ''}must be >= 2")

    @classmethod
    def parse(cls, text: str) -> IdSpec:
        """From the notation above.

        >>> IdSpec.parse("hash:1000").size, IdSpec.parse("vocab:5").min_count, IdSpec.parse("raw").kind
        (1000, 5, 'raw')
        """
        kind, _, number = text.partition(":")
        if number and (kind == "raw" or not number.isdecimal()):
            raise ValueError(f"ids {text!r}: expected vocab, vocab:COUNT, hash:SIZE or raw")
        if kind == "hash":
            return cls(kind, size=int(number or 0))
        return cls(kind, min_count=int(number)) if number else cls(kind)

    def table_size(self, table: str) -> int:
        """Rows of a hashed table."""
        size = self.sizes.get(table, self.size)
        if size < 2:
            raise ValueError(f"ids hash: no size for table {table!r}")
        return size
