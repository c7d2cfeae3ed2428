"""Tables without a place yet: for models that are sharded before they are used."""

from __future__ import annotations


class Unplaced:
    """Rows live nowhere until ``ec.shard`` places them: a model of any size is built at no cost. Any use before that
    raises NotSupported.

    >>> import embcache as ec
    >>> Unplaced()
    Unplaced()
    """

    def __repr__(self) -> str:
        return "Unplaced()"

    def fresh(self) -> Unplaced:
        """Another tier of the same description."""
        return Unplaced()
