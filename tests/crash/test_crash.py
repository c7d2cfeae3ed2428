"""Twenty trials of the crash harness; ``make crash`` does more."""

import subprocess
import sys
from pathlib import Path


def test_killed_at_any_instant_nothing_committed_is_lost(tmp_path: Path) -> None:
    harness = Path(__file__).parent / "crash_harness.py"
    result = subprocess.run(
        [sys.executable, str(harness), "--trials", "20", "--folder", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "20 kills" in result.stdout
