"""Click-through models: one KeyedJaggedTensor and one dense tensor in, fp32 logits [B] out.

Each model is cut into SparseArch, DenseArch, InteractionArch and OverArch, and is plain torch: it knows nothing of
ranks, devices, optimizers or training loops. :func:`build` makes one by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import embcache as ec
from dlrm.models.base import ClickModel, SparseArch
from dlrm.models.dcn import DCNv2
from dlrm.models.deepfm import DeepFM
from dlrm.models.dlrm import DLRM
from dlrm.models.finalmlp import FinalMLP

MODELS: dict[str, type[ClickModel]] = {"dlrm": DLRM, "dcnv2": DCNv2, "deepfm": DeepFM, "finalmlp": FinalMLP}


def build(name: str, tables: Sequence[ec.TableConfig], n_dense: int, **sizes: Any) -> ClickModel:
    """The model `name` ("dlrm", "dcnv2", "deepfm", "finalmlp") over `tables`; `sizes` go to its constructor.

    >>> tables = [ec.TableConfig(f"t{i}", 100, 8, features=[f"f{i}"]) for i in range(2)]
    >>> type(build("dlrm", tables, 13, bottom_mlp=(16, 8), top_mlp=(16, 1))).__name__
    'DLRM'
    >>> build("dlrm", tables, 13, depth=3)
    Traceback (most recent call last):
    TypeError: DLRM has no option 'depth'; it takes bottom_mlp, top_mlp, dropout, dense_dtype, tiers, backend
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}, known are {sorted(MODELS)}")
    model = MODELS[name]
    known = options(name)
    for option in sizes:
        if option not in known:
            raise TypeError(f"{model.__name__} has no option {option!r}; it takes {', '.join(known)}")
    return model(tables, n_dense, **sizes)


def options(name: str) -> list[str]:
    """Names of the options that :func:`build` accepts for a model.

    >>> options("deepfm")
    ['deep_mlp', 'dropout', 'dense_dtype', 'tiers', 'backend']
    """
    names = [n for n in inspect.signature(MODELS[name]).parameters if n not in ("tables", "n_dense", "options")]
    return names + [n for n in ("dropout", "dense_dtype", "tiers", "backend") if n not in names]


def published_init(name: str) -> ec.init.Initializer:
    """The initialiser of embeddings that goes with the published model.

    DLRM: uniform on +-sqrt(1 / rows); DCN-V2 and DeepFM: N(0, 0.01^2); FinalMLP: N(0, 1e-4^2).

    >>> published_init("deepfm").std
    0.01
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}, known are {sorted(MODELS)}")
    return ec.init.Uniform() if name == "dlrm" else ec.init.Normal(1e-4 if name == "finalmlp" else 0.01)


__all__ = [
    "DLRM",
    "MODELS",
    "ClickModel",
    "DCNv2",
    "DeepFM",
    "FinalMLP",
    "SparseArch",
    "build",
    "options",
    "published_init",
]
