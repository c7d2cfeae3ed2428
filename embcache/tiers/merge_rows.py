"""Merging frozen segments into the base, as a program of its own: run by path, with numpy and lmdb alone.

Writing through py-lmdb holds the interpreter, so a large merge runs in a child process; a small one calls ``merge`` on
a thread. The newest version of each key goes to the base in key order, in transactions of bounded size. Every
transaction first checks that the store still belongs to the process that asked (a number that each writer raises when
it opens); the first one seals the base with the generation that is being merged, the last one notes that it is merged.
Merging again what was merged in part is harmless, so a crash needs no repair.

The program reads a job as JSON from its standard input and answers with JSON; it ends with its parent.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

FIRST, HEAD = 64, 16  # bytes of a segment before its records, of a record before its row
ROWS, BYTES = 50_000, 128 << 20  # limits of a transaction
_NEAR = 16 << 20  # bytes free below which a disk counts as full
META, SEAL, MERGED, OWNER = b"meta", b"seal", b"merged", b"owner"

Job = dict[str, Any]


class Fenced(Exception):
    """Another process owns the store now, or the asking one is gone."""


def number(value: bytes | None) -> int:
    """A number of the meta database; absent: 0."""
    return int(value) if value else 0


def open_tables(env: lmdb.Environment, count: int) -> tuple[Any, list[Any]]:
    """(meta database, the database of each table), made where they are missing."""
    meta = env.open_db(META)
    return meta, [env.open_db(b"rows-%d" % t, integerkey=True) for t in range(count)]


def records_of(folder: Path, segment: dict[str, Any], row_bytes: int) -> np.ndarray:
    """uint8 [records, stride], mapped."""
    stride = HEAD + -(-row_bytes // 8) * 8
    shape = (int(segment["records"]), stride)
    return np.memmap(folder / "segments" / segment["file"], np.uint8, "r", FIRST, shape)


def keys_of(records: np.ndarray) -> np.ndarray:
    """uint64 [records]."""
    return np.ascontiguousarray(records[:, :8]).view(np.uint64).reshape(-1)


def distinct(keys: np.ndarray) -> np.ndarray:
    """Each key once, in order (np.unique hashes, which is slower)."""
    ordered = np.sort(keys)
    first = np.ones(len(keys), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def newest(keys: np.ndarray) -> np.ndarray:
    """Positions of the last occurrence of each key, in key order."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    last = np.ones(len(keys), bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last]


def blocks(parts: list[np.ndarray], row_bytes: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(keys uint64, rows uint8, dead bool) in key order, the newest of each key, a transaction's worth at a time."""
    keys = np.concatenate([keys_of(p) for p in parts])
    starts = np.cumsum([0] + [len(p) for p in parts])
    chosen = newest(keys)
    step = max(1, min(ROWS, BYTES // row_bytes))
    for i in range(0, len(chosen), step):
        at = chosen[i : i + step]
        rows = np.empty((len(at), row_bytes), np.uint8)
        dead = np.empty(len(at), bool)
        which = np.searchsorted(starts, at, side="right") - 1
        for k in np.flatnonzero(np.bincount(which)):
            mine = np.flatnonzero(which == k)
            records = parts[k][at[mine] - starts[k]]
            rows[mine] = records[:, HEAD : HEAD + row_bytes]
            dead[mine] = records[:, 8] & 1
        yield keys[at], rows, dead


def put(txn: Any, db: Any, keys: np.ndarray, rows: np.ndarray, dead: np.ndarray) -> None:
    """Write one block."""
    with txn.cursor(db) as cursor:
        if dead.any():
            raw = keys[dead].tobytes()
            for i in range(0, len(raw), 8):
                if cursor.set_key(raw[i : i + 8]):
                    cursor.delete()
            keys, rows = keys[~dead], rows[~dead]
        if not len(keys):
            return
        # behind the last key pages are filled whole; LMDB skips without a word what is not greater: counted below
        behind = not cursor.last() or int.from_bytes(cursor.key(), sys.byteorder) < int(keys[0])
        values = np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").reshape(-1).tolist()
        _, added = cursor.putmulti(list(zip(keys.view("V8").tolist(), values, strict=True)), append=behind)
        if behind and added != len(keys):
            raise lmdb.Error(f"{len(keys) - added} rows were not appended")


def write_changes(folder: Path, job: Job, parts: dict[int, list[tuple[int, np.ndarray]]]) -> None:
    """For each generation merged, the keys that it changed, so that a later export knows them without its segments."""
    generations = sorted({g for of_table in parts.values() for g, _ in of_table})
    before = int(job["merged"])
    for generation in generations:
        lists = []
        for table, of_table in sorted(parts.items()):
            mine = [keys_of(p) for g, p in of_table if g == generation]
            if mine:
                lists.append((table, distinct(np.concatenate(mine))))
        body = b"".join(keys.tobytes() for _, keys in lists)
        head = {"before": before, "generation": generation, "tables": [[t, len(keys)] for t, keys in lists]}
        line = json.dumps({**head, "check": zlib.crc32(body)}).encode() + b"\n"
        path = folder / "changes" / f"{before:010d}-{generation:010d}.keys"
        partial = path.with_suffix(".tmp")
        with partial.open("wb") as file:
            file.write(line)
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        before = generation


def merge(env: lmdb.Environment, job: Job) -> dict[str, int]:
    """Do the job; {"rows", "deleted", "bytes", "transactions"}. lmdb.Error or OSError: what was done stays valid."""
    folder, sizes = Path(job["folder"]), job["row_bytes"]
    meta, tables = open_tables(env, len(sizes))
    parts: dict[int, list[tuple[int, np.ndarray]]] = {}
    for segment in job["segments"]:
        t = int(segment["table"])
        parts.setdefault(t, []).append((int(segment["generation"]), records_of(folder, segment, sizes[t])))
    done = {"rows": 0, "deleted": 0, "bytes": 0, "transactions": 0}
    write_changes(folder, job, parts)

    def begin() -> Any:
        if job.get("parent") and os.getppid() != job["parent"]:
            raise Fenced
        txn = env.begin(write=True)
        if number(txn.get(OWNER, db=meta)) != job["owner"]:
            txn.abort()
            raise Fenced
        txn.put(SEAL, b"%d" % job["target"], db=meta)
        return txn

    for t, of_table in sorted(parts.items()):
        for keys, rows, dead in blocks([p for _, p in of_table], sizes[t]):
            with begin() as txn:
                put(txn, tables[t], keys, rows, dead)
            done["rows"] += len(keys)
            done["deleted"] += int(dead.sum())
            done["bytes"] += rows.nbytes
            done["transactions"] += 1
    with begin() as txn:
        txn.put(MERGED, b"%d" % job["target"], db=meta)
    env.sync(True)
    return done


def die_with_parent(parent: int) -> None:
    """On Linux the system ends this process with its parent; elsewhere it is seen between transactions."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:
        raise SystemExit(1)


def main() -> None:
    job = json.loads(sys.stdin.readline())
    die_with_parent(job["parent"])
    os.nice(job.get("nice", 0))
    env = lmdb.open(
        job["folder"],
        map_size=job["map_size"],
        max_dbs=len(job["row_bytes"]) + 8,
        max_readers=job["max_readers"],
        lib_version=0,
        metasync=False,
        readahead=False,
        create=False,
    )
    try:
        answer: dict[str, Any] = merge(env, job)
        answer["written"] = _written()
    except Fenced:
        answer = {"fenced": True}
    except (lmdb.Error, OSError) as error:
        answer = {"error": f"{type(error).__name__}: {error}", "full": is_full(error, Path(job["folder"]) / "data.mdb")}
    env.close()
    sys.stdout.write(json.dumps(answer) + "\n")


def is_full(error: BaseException, path: Path) -> bool:
    """Whether writing ``path`` failed because the disk (or the map, or a limit on files) has no room."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, lmdb.MapFullError):
        return True
    if getattr(error, "errno", None) in full or any(os.strerror(n) in str(error) for n in full):
        return True
    # LMDB calls a write that was cut short, which is how a disk fills up, an input/output error
    if os.strerror(errno.EIO) not in str(error):
        return False
    import resource

    limit, status = resource.getrlimit(resource.RLIMIT_FSIZE)[0], os.statvfs(path.parent)
    near = path.stat().st_size + _NEAR > limit if limit != resource.RLIM_INFINITY else False
    return near or status.f_bavail * status.f_frsize < _NEAR


def _written() -> int:
    """Bytes this process has sent to the disk's cache, where the system counts them."""
    try:
        with open("/proc/self/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))
    except (OSError, StopIteration):
        return 0


if __name__ == "__main__":
    main()
