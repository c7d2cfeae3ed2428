"""A run killed at any moment goes on and ends in the bytes of the run that was not."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from data_logs import bag_csv, finished, small_log

from dlrm.data import Limits, ResumeMismatch, preprocess
from dlrm.data import ingest as ingest_module
from embcache.errors import StorageFull, StoreLocked

ROOT = Path(__file__).resolve().parents[3]
LIMITS = Limits(chunk_bytes=4000, memory_bytes=1 << 16)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("ids", ["vocab:2", "hash:60"])
def test_dying_at_every_sync_and_rename_in_turn(tmp_path, monkeypatch, ids) -> None:
    # The n-th fsync or rename never happens: every place where progress can be half written.
    path, schema, _ = bag_csv(tmp_path, rows=600)
    preprocess(path, tmp_path / "whole", schema, ids, "random:0,0.3,1", limits=LIMITS)
    want = finished(tmp_path / "whole")
    fsync, replace = os.fsync, os.replace
    for step in range(0, 400, 5):
        left = [step]

        def count(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        monkeypatch.setattr(os, "fsync", lambda fd, count=count: (count(), fsync(fd)))
        monkeypatch.setattr(os, "replace", lambda a, b, count=count: (count(), replace(a, b)))
        out = tmp_path / f"out_{step}"
        died = False
        try:
            preprocess(path, out, schema, ids, "random:0,0.3,1", limits=LIMITS)
        except Killed:
            died = True
        monkeypatch.undo()
        if died and not (out / "manifest.json").exists():  # what was appended but not committed may be garbage
            for file in out.rglob("*.bin"):
                if file.name.startswith(("dense", "labels", "ids", "codes", "keys", "bag_")):
                    with file.open("ab") as f:
                        f.write(b"garbage" * random.Random(step).randrange(5))
        preprocess(path, out, schema, ids, "random:0,0.3,1", limits=LIMITS)
        assert finished(out) == want
        if not died:
            break
    assert not died
    assert step > 40


def test_sigkill_while_reading_and_while_writing(tmp_path) -> None:
    path, schema = small_log(tmp_path)
    schema_file = tmp_path / "s.json"
    schema_file.write_text(json.dumps(schema.to_dict()))
    preprocess(path, tmp_path / "whole", schema, "vocab:2", limits=Limits(chunk_bytes=15_000))
    code = (
        "from dlrm.data import *\n"
        f"preprocess({str(path)!r}, {str(tmp_path / 'out')!r}, {str(schema_file)!r}, 'vocab:2',"
        " limits=Limits(chunk_bytes=15_000), progress=lambda stage, *_: print(stage, flush=True))"
    )
    for stage, times in (("read", 2), ("write", 3)):
        child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        seen = 0
        while seen < times:
            line = child.stdout.readline()
            assert line
            seen += line.strip() == stage
        child.send_signal(signal.SIGKILL)
        child.stdout.close()
        child.wait()
        assert not (tmp_path / "out" / "manifest.json").exists()
    preprocess(path, tmp_path / "out", schema, "vocab:2", limits=Limits(chunk_bytes=15_000))
    whole, resumed = finished(tmp_path / "whole"), finished(tmp_path / "out")
    assert whole == resumed


def test_what_is_committed_is_not_read_again(tmp_path, monkeypatch) -> None:
    path, schema = small_log(tmp_path)
    commit, left = ingest_module.Ingest._commit, [5]

    def dying(self, *args) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        commit(self, *args)

    monkeypatch.setattr(ingest_module.Ingest, "_commit", dying)
    with pytest.raises(Killed):
        preprocess(path, tmp_path / "c", schema, "hash:9", limits=Limits(chunk_bytes=15_000))
    monkeypatch.undo()
    rows: list[int] = []
    preprocess(path, tmp_path / "c", schema, "hash:9", limits=Limits(chunk_bytes=15_000),
               progress=lambda stage, n, share: rows.append(n))  # fmt: skip
    assert rows[0] > 5 * 150
    assert rows[-1] == 4000


def test_an_unfinished_folder_is_not_opened_nor_taken_for_another_job(tmp_path, monkeypatch) -> None:
    path, schema = small_log(tmp_path)
    monkeypatch.setattr("dlrm.data.pipeline.Finish", lambda *_: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        preprocess(path, tmp_path / "c", schema, "hash:9")
    monkeypatch.undo()
    with pytest.raises(ResumeMismatch, match="begun with other ids, split"):
        preprocess(path, tmp_path / "c", schema, "vocab:3", "last:0.2")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ResumeMismatch, match="begun with other inputs"):
        preprocess(path, tmp_path / "c", schema, "hash:9")


def test_a_full_disk_is_named_and_the_same_call_goes_on(tmp_path, monkeypatch) -> None:
    path, schema, _ = bag_csv(tmp_path, rows=300)
    preprocess(path, tmp_path / "whole", schema, limits=LIMITS)
    fsync, left = os.fsync, [20]

    def full(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match=f"no room for more at {tmp_path / 'c'}: [0-9]+ free"):
        preprocess(path, tmp_path / "c", schema, limits=LIMITS)
    monkeypatch.undo()
    preprocess(path, tmp_path / "c", schema, limits=LIMITS)
    assert finished(tmp_path / "c") == finished(tmp_path / "whole")


def test_two_processes_do_not_write_one_folder(tmp_path) -> None:
    path, schema, _ = bag_csv(tmp_path, rows=300)
    code = f"""
import os, sys
from pathlib import Path
from dlrm.data import Limits, Schema, preprocess
def wait(stage, rows, fraction):
    print(os.getpid(), flush=True)
    sys.stdin.read()
preprocess({str(path)!r}, {str(tmp_path / "c")!r}, Schema.from_dict({schema.to_dict()!r}), progress=wait)
"""
    first = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    with first:
        assert int(first.stdout.readline()) == first.pid
        with pytest.raises(StoreLocked, match=f"is being written by process {first.pid} on "):
            preprocess(path, tmp_path / "c", schema)
        first.kill()
    assert preprocess(path, tmp_path / "c", schema).rows == 300
