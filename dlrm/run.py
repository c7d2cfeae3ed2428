"""From settings and data to a trainer of a click model: what the scripts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

import embcache as ec
from dlrm.data.loader import Loader
from dlrm.models import MODELS, build, options, published_init
from dlrm.task import ClickTask
from embcache.checkpoint import Checkpoints
from embcache.errors import BadConfig
from embcache.optim import Rule
from embcache.train.config import TrainConfig
from embcache.train.distributed import Session, ShardingConfig
from embcache.train.flags import flag
from embcache.train.loop import Trainer
from embcache.train.observe import Observer
from embcache.train.optimizers import OptimizerConfig, dense_optimizer, sparse_rule
from embcache.train.run import observers
from embcache.train.state import seed_all
from embcache.train.storage import StorageConfig

__all__ = ["ClickConfig", "ModelConfig", "build_tables", "build_trainer", "model_name", "test_loader"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModelConfig:
    """Model: which one, and its sizes; a size that is not given is the model's own default."""

    model: Literal["dlrm", "dcnv2", "deepfm", "finalmlp"] = flag("dlrm", "which model")
    loss: Literal["bce"] = flag("bce", "binary cross-entropy of the logits")
    dim: int = flag(16, "columns of every embedding table")
    table_dtype: Literal["fp32", "bf16", "fp16"] = flag("fp32", "stored embedding weights")
    dense_dtype: Literal["fp32", "bf16"] = flag("fp32", "precision of the dense part (bf16: autocast)")
    bottom_mlp: tuple[int, ...] | None = flag(None, "dlrm: layers over the dense features")
    top_mlp: tuple[int, ...] | None = flag(None, "dlrm: layers over the interactions")
    deep_mlp: tuple[int, ...] | None = flag(None, "dcnv2, deepfm: layers of the deep part")
    dense_mlp: tuple[int, ...] | None = flag(None, "dcnv2: layers over the dense features")
    cross_layers: int | None = flag(None, "dcnv2: cross layers")
    low_rank: int | None = flag(None, "dcnv2: rank of the cross matrices (none: full)")
    structure: Literal["parallel", "stacked"] | None = flag(None, "dcnv2: cross and deep part beside or on each other")
    mlp1: tuple[int, ...] | None = flag(None, "finalmlp: layers of the first stream")
    mlp2: tuple[int, ...] | None = flag(None, "finalmlp: layers of the second stream")
    heads: int | None = flag(None, "finalmlp: heads of the fusion")
    dropout: float | None = flag(None, "dropout of the dense layers")

    def __post_init__(self) -> None:
        for name in self.sizes():
            if name not in options(self.model):
                raise ValueError(f"--{name.replace('_', '-')} is no option of {self.model}")
        if self.dim < 1:
            raise ValueError(f"--dim must be at least 1, got {self.dim}")

    def sizes(self) -> dict[str, Any]:
        """The options that were given."""
        common = ("model", "loss", "dim", "table_dtype", "dense_dtype")
        return {k: v for k, v in vars(self).items() if k not in common and v is not None}


@dataclass(frozen=True)
class ClickConfig:
    """Settings that every click-through script has."""

    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    monitor: Literal["auc", "ne", "logloss"] = flag("auc", "metric that early stopping and the best weights follow")
    eval_batch_size: int = flag(8192, "samples in a batch of an evaluation")
    workers: int = flag(1, "threads that gather batches ahead")

    def __post_init__(self) -> None:
        for name in ("eval_batch_size", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")


class ClickData(Protocol):
    """What a ``ColumnCache`` and a ``SyntheticLog`` have in common."""

    @property
    def num_embeddings(self) -> dict[str, int | None]: ...
    @property
    def tables(self) -> dict[str, str]: ...
    @property
    def n_dense(self) -> int: ...
    @property
    def splits(self) -> Any: ...


def build_tables(data: ClickData, model: ModelConfig, rule: Rule, seed: int) -> list[ec.TableConfig]:
    """A table for each table name of the data, with the features that share it."""
    features: dict[str, list[str]] = {}
    for feature, table in data.tables.items():
        features.setdefault(table, []).append(feature)
    return [
        ec.TableConfig(
            name,
            data.num_embeddings[members[0]],
            model.dim,
            features=members,
            optimizer=rule,
            init=published_init(model.model),
            seed=seed,
            dtype=DTYPES[model.table_dtype],
        )
        for name, members in features.items()
    ]


def build_trainer(config: ClickConfig, data: Any, checkpoints: Checkpoints, session: Session | None = None) -> Trainer:
    """Tables, model, loaders and optimizers of a configuration; the seed decides all initial values. Of the ranks of a
    ``session`` each loads its share of every batch.

    Raises BadConfig where sizes or rates contradict each other or the data, or nothing is left to train on.
    """
    train, session = config.train, session or Session()
    if not len(data.splits.get("train", ())):
        splits = ", ".join(f"{name} {len(rows):,}" for name, rows in data.splits.items() if len(rows))
        raise BadConfig(f"no rows to train on: the data has {splits or 'none'}; give other data or another --split")
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    seed_all(train.seed)
    tables = build_tables(data, config.model, sparse_rule(config.optimizer), train.seed)
    chain = partial(config.storage.chain, train.out)
    sizes = {**config.model.sizes(), "dense_dtype": config.model.dense_dtype, "tiers": session.first_tiers(chain)}
    try:
        task = ClickTask(build(config.model.model, tables, data.n_dense, **sizes), train.device, config.monitor)
        dense = dense_optimizer(task.model.parameters(), config.optimizer)
    except ValueError as error:  # of the model or of torch, about a size or a rate
        raise BadConfig(str(error)) from error
    checkpoints = session.place(task.model, chain, checkpoints, config.sharding)
    store, watching = task.model.store, observers(train, session)
    if config.storage.caches:
        _show_plan(config, data, store, watching, session.world)
    batches = Loader(data, "train", train.global_batch_size, shuffle=True, seed=train.seed, rank=session.rank,
                     world_size=session.world, workers=config.workers)  # fmt: skip
    return Trainer(
        task,
        [
            dense,
            ec.optim.SparseOptimizer(task.model, on_nonfinite=train.on_nonfinite),
        ],
        config.storage.staged(batches, store, task, train.micro_batches),
        _loader(config, data, "valid", session),
        train,
        config.optimizer,
        checkpoints,
        watching,
        session,
    )


def _show_plan(
    config: ClickConfig, data: Any, store: ec.EmbeddingStore, watching: Sequence[Observer], ranks: int
) -> None:
    """Tell what the tables will take of a rank; no more rows are ever used than the training data has ids."""
    samples, bags = len(data.splits["train"]), getattr(data, "bags", {})
    most = max([samples, *(len(values) for values, _ in bags.values())])
    used = {t.name: min(t.num_embeddings or most, most * len(t.feature_names)) for t in store.tables}
    expected = {name: -(-rows // ranks) for name, rows in used.items()}
    size, depth = -(-config.train.global_batch_size // ranks), config.storage.depth
    batches = 1 if depth == "auto" else int(depth)
    plan = ec.plan(store.tables, store.tiers, batch_size=size, depth=batches, expected=expected)
    for observer in watching:
        observer.message(str(plan))


def model_name(config: ClickConfig) -> str:
    """The model's name as people write it.

    >>> model_name(ClickConfig(model=ModelConfig(model="dcnv2")))
    'DCNv2'
    """
    return MODELS[config.model.model].__name__


def test_loader(config: ClickConfig, data: Any, session: Session | None = None) -> Loader | None:  # noqa: PT028
    """The test split, where there is one; of the ranks of a ``session`` each takes its share."""
    return _loader(config, data, "test", session or Session())


def _loader(config: ClickConfig, data: Any, split: str, session: Session) -> Loader | None:
    if not len(data.splits.get(split, ())):
        return None
    return Loader(data, split, config.eval_batch_size, rank=session.rank, world_size=session.world)


test_loader.__test__ = False  # type: ignore[attr-defined]
