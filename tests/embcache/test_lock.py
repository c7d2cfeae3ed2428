"""One process writes in a folder; the lock of a dead one is worth nothing."""

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from embcache.checkpoint import Checkpoints
from embcache.errors import StoreLocked
from embcache.lock import FolderLock

HOLD = """
import sys
import threading
import time
from pathlib import Path
from embcache.lock import FolderLock
lock = FolderLock.take(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_by_name_and_a_dead_one_forgotten(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreLocked, match=f"by process {holder.pid} on {socket.gethostname()}: wait") as refused:
            Checkpoints(tmp_path).claim()
        assert (refused.value.pid, refused.value.host) == (holder.pid, socket.gethostname())
        assert Checkpoints(tmp_path).latest is None  # a reader is let in
        holder.send_signal(signal.SIGKILL)
    FolderLock.take(tmp_path)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_process_may_take_its_own_folder_again(tmp_path):
    first = FolderLock.take(tmp_path)
    assert FolderLock.take(tmp_path / "." / "") is first
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    second = FolderLock.take(tmp_path)  # the folder was made anew: the old lock holds nothing
    assert second is not first
    del first, second
    gc.collect()
    FolderLock.take(tmp_path)


def test_a_forked_child_that_outlives_the_writer_holds_nothing(tmp_path):
    receive, send = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.setpgid(0, 0)
        lock = FolderLock.take(tmp_path)
        os.fork()
        os.write(send, b"x")  # once by each of them
        signal.pause()
        del lock
    try:
        assert os.read(receive, 1) + os.read(receive, 1) == b"xx"
        with pytest.raises(StoreLocked, match=f"process {writer} on"):
            FolderLock.take(tmp_path)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        FolderLock.take(tmp_path)
    finally:
        os.killpg(writer, signal.SIGKILL)
        os.close(receive)
        os.close(send)


def test_who_takes_a_killed_ones_place_waits_for_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(FolderLock, "patience", 30.0)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        threading.Timer(0.3, holder.kill).start()
        begun = time.monotonic()
        FolderLock.take(tmp_path)
        assert 0.2 < time.monotonic() - begun < 20
