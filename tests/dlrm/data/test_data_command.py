"""The command: summary, errors without a traceback, and memory that does not grow with the input."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from data_logs import bag_csv

from dlrm.data import ColumnCache, SyntheticConfig, SyntheticLog

ROOT = Path(__file__).resolve().parents[3]


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "scripts" / "preprocess.py", *map(str, arguments)],
                          capture_output=True, text=True, timeout=300)  # fmt: skip


def test_summary_and_errors(tmp_path) -> None:
    path, schema, _ = bag_csv(tmp_path, rows=300)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(schema.to_dict()))
    with path.open("a") as f:
        f.write("1,a,1|b,4,1,x\n")
    done = command("--schema", tmp_path / "s.yaml", "--data", path, "--out", tmp_path / "c", "--ids", "vocab:1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: {path}, line 302, column 3: expected a decimal id, found '1|b' in 'items'"
    )
    done = command("--schema", tmp_path / "s.yaml", "--train", path, "--test", path, "--out", tmp_path / "d",
                   "--max-bad-rows", 2)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^rows +600 ", done.stdout, re.M)
    assert re.search(r"^bad rows +2$", done.stdout, re.M)
    assert re.search(r"^splits +train 300, test 300$", done.stdout, re.M)
    assert re.search(r"^time .* rows/s$", done.stdout, re.M)
    assert re.search(r"^peak memory +\d\.\d\d GiB$", done.stdout, re.M)
    assert done.stdout.count("left out: ") == 2
    assert "100.0 %" in done.stderr
    assert ColumnCache.open(tmp_path / "d", verify=True).rows == 600


def test_help_names_every_choice() -> None:
    text = command("--help").stdout
    for word in (
        "--schema",
        "vocab:MIN_COUNT",
        "hash:SIZE",
        "raw",
        "last:V,T",
        "random:V,T,SEED",
        "time:V,T",
        "--max-bad-rows",
    ):
        assert word in text


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of /proc/self/status")
def test_memory_does_not_grow_with_the_input(tmp_path) -> None:
    # Peaks of an input and of one eight times as large, each in a process of its own; chunks of 1 MB.
    peaks = []
    for rows in (10_000, 80_000):
        log = SyntheticLog(SyntheticConfig(rows=rows, tables=(5_000_000,) * 26, alpha=0.4))
        log.write(tmp_path / "log.tsv")
        code = (
            "import re; from dlrm.data import *\n"
            f"preprocess({str(tmp_path / 'log.tsv')!r}, {str(tmp_path / f'c{rows}')!r}, 'criteo', 'vocab:1',"
            " limits=Limits(chunk_bytes=1 << 20, memory_bytes=8 << 20))\n"
            "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) / 1024)
    # What the larger log has more: 12 MB of cache, 8 MB of codes, 16 MB of keys, 16 MB of text.
    assert peaks[1] - peaks[0] < 24, peaks
