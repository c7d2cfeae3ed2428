"""What a generation's rows are made of, as the JSON that a manifest holds.

``generation`` and ``merged`` (the base holds at least that generation), ``lineage`` (numbers of the generations that
led here) and the segments of later generations, oldest first. A segment whose generation the base has merged since is
passed over, so a description stays good when merges go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CorruptStore, FormatVersion

__all__ = ["described", "parsed", "trimmed"]

FORMAT, VERSION = "embcache-rows", 1


def described(generation: int, merged: int, lineage: Sequence[int], segments: list[dict[str, Any]]) -> dict[str, Any]:
    """A description.

    >>> parsed(described(3, 1, [1, 3], []), Path("store"), tables=1)["generation"]
    3
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "generation": generation,
        "merged": merged,
        "lineage": list(lineage),
        "segments": segments,
    }


def trimmed(description: dict[str, Any], merged: int) -> dict[str, Any]:
    """The same rows, without the segments that the base has merged up to ``merged``."""
    kept = [s for s in description["segments"] if int(s["generation"]) > merged]
    return {**description, "merged": max(merged, int(description["merged"])), "segments": kept}


def parsed(description: dict[str, Any] | None, folder: Path, tables: int) -> dict[str, Any]:
    """A description whose shape may be trusted (None: of no rows); CorruptStore, FormatVersion."""
    if description is None:
        return described(0, 0, [], [])
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise CorruptStore(f"{folder}: the manifest does not describe rows of this library")
    if isinstance(description.get("version"), int) and description["version"] > VERSION:
        raise FormatVersion(str(folder), description["version"], VERSION)
    try:
        segments = [_segment(one, tables) for one in description["segments"]]
        generation, merged = int(description["generation"]), int(description["merged"])
        if any(s["generation"] > generation for s in segments) or not 0 <= merged <= generation:
            raise ValueError(f"generation {generation}")
        return described(generation, merged, [int(n) for n in description["lineage"]], segments)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStore(f"{folder}: the manifest describes segments that cannot be: {error}") from None


def _segment(one: dict[str, Any], tables: int) -> dict[str, Any]:
    name, check = str(one["file"]), str(one["check"])
    table, generation, records = int(one["table"]), int(one["generation"]), int(one["records"])
    plain = name == Path(name).name and 0 <= int(check, 16) < 2**64
    if not plain or not 0 <= table < tables or generation < 1 or records < 1:
        raise ValueError(name)
    return {"file": name, "table": table, "generation": generation, "records": records, "check": check}
