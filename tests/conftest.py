"""Fixtures every test may use."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
collect_ignore = ["sharded/entry.py", "sharded/launch_run.py"]  # scripts that tests start


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder with the real data sets; the test skips where it is absent."""
    folder = Path(os.environ.get("EMBCACHE_REAL_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "README.md").exists():
        pytest.skip("real data absent: set EMBCACHE_REAL_DATA to the folder that holds it")
    return folder
