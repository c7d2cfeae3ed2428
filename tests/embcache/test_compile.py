"""torch.compile: dense parts in full graphs, the lookup one counted graph break."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jagged_twins import jagged

import embcache as ec

ROOT = Path(__file__).resolve().parents[2]
TABLES = [ec.TableConfig("a", 30, 4, features=["a1", "a2"]), ec.TableConfig("b", 20, 8, features=["b"])]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = ec.EmbeddingBagCollection(TABLES)
        self.top = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, dense: torch.Tensor, kjt: Any) -> torch.Tensor:
        return self.top(torch.cat([dense, self.tables(kjt).values()], 1)).squeeze(1)


def test_one_graph_break_and_equal_results() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Model()
    optimizer = ec.optim.SparseOptimizer(model)
    compiled = torch.compile(model, backend="aot_eager")
    dense = torch.randn(6, 4)
    for seed in range(3):
        kjt = jagged(["a1", "a2", "b"], [30, 30, 20], 6, seed=seed)
        out = compiled(dense, kjt)
        assert torch.allclose(out, model(dense, kjt))
        out.sum().backward()
        optimizer.step()
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert sum(breaks.values()) == 1, breaks


def test_importing_does_not_import_the_compiler() -> None:
    code = "import sys, embcache; print('torch._dynamo' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert shown == "False\n"


def test_dense_parts_compile_whole() -> None:
    torch._dynamo.reset()
    model = Model()
    top = torch.compile(model.top, backend="aot_eager", fullgraph=True)
    x = torch.cat([torch.randn(6, 4), model.tables(jagged(["a1", "a2", "b"], [30, 30, 20], 6)).values()], 1)
    assert torch.allclose(top(x), model.top(x))


@pytest.mark.parametrize("module", [ec.EmbeddingBag(9, 4, mode="sum"), ec.Embedding(9, 4)])
def test_drop_ins_under_compile(module: torch.nn.Module) -> None:
    torch._dynamo.reset()
    ids = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(torch.compile(module, backend="eager")(ids), module(ids))
