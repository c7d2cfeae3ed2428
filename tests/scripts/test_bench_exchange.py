"""bench_exchange: its formulas by hand, and a tiny run whose bytes are those of the formulas."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def work() -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("_exchange_work", SCRIPTS / "_exchange_work.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


def test_our_bytes_by_hand(work: ModuleType) -> None:
    """Two tables, three bags of two ids; even ids are rank 0's, which asks for 1, 3 of one and 5 of the other."""
    ids = np.array([[1, 1, 2, 3, 4, 6], [5, 2, 5, 5, 4, 4]])
    sizes = {"rows": 1000, "dim": 8, "bag": 2}

    def owners(t: int, values: np.ndarray) -> np.ndarray:
        return values % 2

    got = work.our_bytes(ids, owners, 0, sizes, "rows", "fp32")
    assert got == {"ids": 4 * 3, "rows": 32 * 3, "grads": 32 * 3}
    assert work.our_bytes(ids, owners, 0, {**sizes, "rows": 2**33}, "rows", "int8")["ids"] == 8 * 3
    assert work.our_bytes(ids, owners, 0, sizes, "rows", "int8")["rows"] == 16 * 3
    # ids 1, 1, 3 and 5, 5, 5; bags 0 and 1 of each table
    assert work.our_bytes(ids, owners, 0, sizes, "pooled", "bf16") == {"ids": 4 * 6 + 4 * 4, "rows": 64, "grads": 64}


def test_torchrec_bytes_by_hand(work: ModuleType) -> None:
    ids = np.array([[0, 9, 5], [1, 2, 3], [9, 9, 9]])
    sizes = {"rows": 10, "dim": 4, "bag": 1, "batch": 3}
    # rank 0 has tables 0 and 2
    assert work.torchrec_bytes("table_wise", ids, 0, 2, sizes) == {"ids": 3 * 12, "rows": 3 * 2 * 16, "grads": 3 * 16}
    # rank 0 has rows 0 to 4: of others are 9, 5 and 9, 9, 9
    assert work.torchrec_bytes("row_wise", ids, 0, 2, sizes) == {"ids": 8 * 5 + 36, "rows": 9 * 16, "grads": 9 * 16}


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "bench_exchange.py"), "--quick", "--no-peer", "--bag", "2"]
    command += ["--worlds", "2", "--wires", "fp32", "int8", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "out.json").read_text())
    records = result["results"]
    assert [(r["traffic"], r["wire"], r["gigabits"]) for r in records] == [
        (traffic, wire, link) for traffic in ("rows", "pooled") for wire in ("fp32", "int8") for link in (0, 10)
    ]
    for r in records:
        assert r["equal"]
        assert r["bytes"] == r["formula"]
        assert min(r["bytes"].values()) > 0
        assert r["ms"] > 0
        assert {"ids", "rows", "forward", "backward", "embedding update"} <= r["stages_ms"].keys()
    exact, small = records[0]["bytes"], records[2]["bytes"]
    assert small["rows"] / exact["rows"] == (16 + 8) / (4 * 16)
    assert small["ids"] == exact["ids"]
    assert [c["placement"] for c in result["torchrec_by_count"]] == ["table_wise", "row_wise"]
    assert "10 Gb/s emulated" in done.stdout
