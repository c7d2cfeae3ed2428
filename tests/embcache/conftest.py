from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from embcache import kernels

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def _has_native() -> bool:
    try:
        return kernels.get("native").__name__.endswith("native")
    except (ImportError, OSError, RuntimeError):
        return False


@pytest.fixture(params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and not _has_native():
        pytest.skip("the compiled kernels do not load here")
    return str(request.param)


@pytest.fixture(autouse=True)
def _seeded_on_one_thread() -> Iterator[None]:
    """Small shapes: threads would mostly wait for each other. Tests of threads choose their number themselves."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
