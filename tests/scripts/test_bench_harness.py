"""The benchmarks' harness: workers, turns, ratios; and a tiny run of bench_train."""

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
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_harness", SCRIPTS / "_bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(
        f"import sys, os; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from _bench import serve\n"
        "def noisy(x):\n    print('a library prints'); os.write(1, b'and from C'); return [x, x]\n"
        "def die():\n    os._exit(3)\n"
        "serve({'noisy': noisy, 'divide': lambda a, b: a / b, 'die': die})\n"
    )
    return path


def test_calls_and_prints_do_not_mix(bench: ModuleType, script: Path) -> None:
    with bench.Worker(script, quiet=True) as worker:
        assert worker.call("noisy", x=5) == [5, 5]
        assert worker.call("divide", a=1, b=4) == 0.25
        process = worker.process
    assert process.poll() == 0


def test_a_handlers_error_is_the_callers(bench: ModuleType, script: Path) -> None:
    with bench.Worker(script, quiet=True) as worker:
        with pytest.raises(bench.WorkerError, match="ZeroDivisionError"):
            worker.call("divide", a=1, b=0)
        assert worker.call("divide", a=1, b=2) == 0.5  # still there


def test_a_dead_worker_is_named(bench: ModuleType, script: Path) -> None:
    with bench.Worker(script, quiet=True) as worker:
        with pytest.raises(bench.WorkerError, match="worker ended with status 3 in 'die'"):
            worker.call("die")
        with pytest.raises(bench.WorkerError, match="worker ended"):
            worker.call("divide", a=1, b=2)


def test_turns_rotate(bench: ModuleType) -> None:
    calls = []
    contestants = {name: lambda r, name=name: calls.append(name) or [1.0] for name in "abc"}
    bench.measure(contestants, rounds=3)
    assert "".join(calls) == "abcbcacab"


def test_ratio_is_by_round(bench: ModuleType) -> None:
    middle, low, high = bench.ratio([1.0, 10.0, 1.0], [2.0, 20.0, 3.0])
    assert middle == 2.0
    assert low <= middle <= high


def test_power_law_ids(bench: ModuleType) -> None:
    rng = np.random.default_rng(0)
    ids = bench.zipf_ids(rng, 200_000, 10_000, 1.05)
    assert ids.dtype == np.int64
    assert ids.min() >= 0
    assert ids.max() < 10_000
    counts = np.sort(np.bincount(ids, minlength=10_000))[::-1]
    gamma = -0.05  # the hottest 1 % of rows take this share, by the law's own integral
    share = (100.0**gamma - 1) / (10_000.0**gamma - 1)
    assert abs(counts[:100].sum() / 200_000 - share) < 0.03


def test_missing_module_is_seen(bench: ModuleType) -> None:
    assert bench.have_module(None, "json")
    assert not bench.have_module(None, "no_such_module_anywhere")


def test_bench_train_runs(tmp_path: Path) -> None:
    target = tmp_path / "train.json"
    command = [sys.executable, str(SCRIPTS / "bench_train.py"), "--quick", "--peers", "plain", "--threads", "1"]
    result = subprocess.run([*command, "--json", str(target)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "ours fp32" in result.stdout
    records = json.loads(target.read_text())["results"]
    assert [r["name"] for r in records] == ["ours fp32", "ours bf16", "plain fp32", "plain bf16"]
    assert all(r["ms"] > 0 and len(r["rounds_ms"]) == 2 for r in records)
