from __future__ import annotations

import pytest
import torch

from embcache import kernels


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
def _seeded() -> None:
    torch.manual_seed(0)
