"""The command: summary, errors without a traceback, and memory that does not grow with the input."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from data_logs import bag_csv

from dlrm.data import ColumnCache, SyntheticConfig, SyntheticLog

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preprocess_script", ROOT / "scripts" / "preprocess.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_summary_and_errors(script, tmp_path, capsys) -> None:
    def command(*arguments: object) -> tuple[int, str, str]:
        code = script.main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    path, schema, _ = bag_csv(tmp_path, rows=300)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(schema.to_dict()))
    with path.open("a") as f:
        f.write("1,a,1|b,4,1,x\n")
    code, out, err = command(
        "--schema", tmp_path / "s.yaml", "--data", path, "--out", tmp_path / "c", "--ids", "vocab:1"
    )
    assert code == 1
    assert err.splitlines()[-1] == (f"error: {path}, line 302, column 3: expected a decimal id, found '1|b' in 'items'")
    code, out, err = command("--schema", tmp_path / "s.yaml", "--train", path, "--test", path, "--out", tmp_path / "d",
                   "--max-bad-rows", 2)  # fmt: skip
    assert code == 0, err
    assert re.search(r"^rows +600 ", out, re.M)
    assert re.search(r"^bad rows +2$", out, re.M)
    assert re.search(r"^splits +train 300, test 300$", out, re.M)
    assert re.search(r"^time .* rows/s$", out, re.M)
    assert re.search(r"^peak memory +\d\.\d\d GiB$", out, re.M)
    assert out.count("left out: ") == 2
    assert "100.0 %" in err
    assert ColumnCache.open(tmp_path / "d", verify=True).rows == 600


def test_help_names_every_choice(script) -> None:
    text = script.parser().format_help()
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
    # Peaks of an input and of one sixteen times as large, each in a process of its own; chunks of 0.5 MB. The first
    # process is a rehearsal: it may have kernels to compile.
    peaks = []
    for rows in (1_000, 5_000, 80_000):
        log = SyntheticLog(SyntheticConfig(rows=rows, tables=(5_000_000,) * 26, alpha=0.4))
        log.write(tmp_path / "log.tsv")
        code = (
            "import re; from dlrm.data import *\n"
            f"preprocess({str(tmp_path / 'log.tsv')!r}, {str(tmp_path / f'c{rows}')!r}, 'criteo', 'vocab:1',"
            " limits=Limits(chunk_bytes=1 << 19, memory_bytes=1 << 22))\n"
            "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) / 1024)
    # What the larger log has more: 13 MB of cache, 9 MB of codes, 15 MB of keys, 19 MB of text, 15 MB of vocabulary.
    assert peaks[2] - peaks[1] < 30, peaks
