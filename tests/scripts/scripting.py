"""Loading a script as a module, the flags that make its runs small, and the fixtures that run it in this process."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path

import pytest
import torch

from dlrm.data import SyntheticConfig, SyntheticLog
from embcache.train.flags import parse

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SMALL = ["--dim", "8", "--global-batch-size", "512", "--log-every", "5", "--no-tensorboard", "--threads", "1"]


def load(name):
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script():
    """``script(name, *flags) -> (lines printed, {last words: value})``."""

    def call(name, *flags):
        module, threads = load(name), torch.get_num_threads()
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            module.main(parse(module.Config, [str(f) for f in flags]))
        lines = out.getvalue().splitlines()
        last = [line.rsplit(" ", 1) for line in lines if line.startswith(("loss ", "test "))]
        torch.set_num_threads(threads)
        return lines, {words.removeprefix("test "): float(value) for words, value in last}

    return call


@pytest.fixture(scope="session")
def criteo_log(tmp_path_factory):
    """20,000 lines in Criteo's format with something to learn."""
    path = tmp_path_factory.mktemp("criteo") / "log.tsv"
    tables = (400, 300, 200, 100, 50, 30, 20, 10, 8, 6, 5, 4, 3) * 2
    SyntheticLog(SyntheticConfig(rows=20_000, tables=tables, spread=2.5, test=0.2)).write(path)
    return path
