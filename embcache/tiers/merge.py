"""Running a merge beside training: a large one in a child process, a small one on the calling thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from ..errors import StorageFull
from . import merge_rows
from .basefile import READERS, BaseFile

__all__ = ["MergeFailed", "run_merge"]

SMALL = 20_000  # records; starting a process costs as much as merging so many
_NICE = 5  # training goes first


class MergeFailed(RuntimeError):
    """The merging process ended without an answer; nothing is lost, and the merge can be tried again."""


def run_merge(base: BaseFile, job: dict[str, Any], child: bool | None = None) -> dict[str, int]:
    """Merge the segments of a job; what ``merge_rows.merge`` counts. ``child``: None decides by the size.

    Raises: StorageFull, MergeFailed; what is merged in part is valid, and merging again finishes it.
    """
    if child is None:
        child = sum(int(s["records"]) for s in job["segments"]) > SMALL
    if not child:
        try:
            return merge_rows.merge(base.env, job)
        except merge_rows.Fenced:
            raise MergeFailed("another process owns the store") from None
        except (merge_rows.lmdb.Error, OSError) as error:
            raise _typed(base, str(error), merge_rows.is_full(error)) from error
    job = {**job, "parent": os.getpid(), "map_size": base.map_size, "max_readers": READERS, "nice": _NICE}
    # a file of its own, so that the child imports neither the library nor torch (-P: nor anything beside that file)
    command = [sys.executable, "-P", str(merge_rows.__file__)]
    # the system kills the child when the *thread* that started it ends: this call waits for it, so the thread lives
    done = subprocess.run(command, input=json.dumps(job) + "\n", capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MergeFailed(f"the merging process ended with status {done.returncode}: {last}") from None
    if answer.get("fenced"):
        raise MergeFailed("another process owns the store")
    if "error" in answer:
        raise _typed(base, answer["error"], answer["full"])
    return dict(answer)


def _typed(base: BaseFile, message: str, full: bool) -> Exception:
    if not full:
        return MergeFailed(message)
    status = os.statvfs(base.path.parent)
    return StorageFull(None, status.f_bavail * status.f_frsize, str(base.path))
