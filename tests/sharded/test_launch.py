"""Ranks under torchrun: restarts meet anew, whoever fails is named, nothing outlives its rank."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embcache.errors import BadConfig
from embcache.sharded import launch

SCRIPT = Path(__file__).with_name("launch_run.py")


def gone(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").replace(")", " ")
    except OSError:
        return True


def test_torchrun_restarts_after_a_kill_and_after_an_error(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank-{rank}").mkdir()
    root = str(Path(__file__).parents[2])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GLOO")}
    environment |= {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
    read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")}
    for attempt in range(3):
        for rank in range(2):
            world, total, before, pid = read[f"attempt-{attempt}-{rank}"]
            assert (world, total, before) == (2, 3, attempt > 0)
            assert gone(pid)
    assert (read["finished-0"], read["finished-1"]) == (2, 2)
    if "told-1-0" in read:  # unless torchrun was faster
        assert read["told-1-0"] == "rank 1 stopped with ValueError: row 7 is odd"
    if "told-0-0" in read:
        assert read["told-0-0"].startswith("rank 1 died or hangs")
    assert "ValueError: row 7 is odd" in done.stderr
    end = time.monotonic() + 10
    while not gone(read["child"]) and time.monotonic() < end:
        time.sleep(0.05)
    assert gone(read["child"])


def test_alone_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with launch.session() as here:
        assert (here.rank, here.world, here.attempt, here.store, here.mesh) == (0, 1, 0, None, None)
    with pytest.raises(ZeroDivisionError), launch.session():
        raise ZeroDivisionError


def test_a_timeout_that_is_none_is_refused(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("EMBCACHE_TIMEOUT", "soon")
    with pytest.raises(BadConfig, match="EMBCACHE_TIMEOUT = 'soon'"):
        launch.init()
