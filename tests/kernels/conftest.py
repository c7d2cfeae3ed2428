"""The backends that one suite runs against: plain torch, and the C++ kernels on each instruction set there is here."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from embcache import kernels
from embcache.kernels import build


def _isas() -> list[str]:
    return build.instruction_sets()


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The C++ kernels; a machine without a compiler and without a prebuilt library has none."""
    if build.prebuilt() is None and build.find_compiler() is None:
        pytest.skip("no C++ compiler and no prebuilt kernels")
    return kernels.get("native")


@pytest.fixture(params=["reference", *_isas()])
def backend(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Plain torch, then the C++ kernels with each instruction set."""
    if request.param == "reference":
        yield kernels.get("reference")
        return
    module = request.getfixturevalue("native")
    if request.param not in module.isas():
        pytest.skip(f"this processor has no {request.param}")
    before = module.isa()
    module.set_isa(request.param)
    yield module
    module.set_isa(before)
