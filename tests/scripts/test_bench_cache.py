"""The cache benchmark runs: same losses with and without a cache, and every number that the targets ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_cache.py"


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--sections", "index", "dlrm", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--warm", "4", "--json", str(tmp_path / "out.json")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert all(record["keys_per_s"] > 1e6 for record in results["index"]["records"])
    dlrm = results["dlrm"]["records"]
    assert dlrm["slowdown"] > 0
    assert 0 < dlrm["split"]["hit_rate"] < 1
    assert dlrm["commit"]["dirty_rows"] > 0
    assert dlrm["reopen_s"] < 10
    assert "slowdown" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]  # its stores are gone
