"""The training loop that every model family uses, its metrics, its settings and its report."""

from embcache.train.config import TrainConfig
from embcache.train.loop import NonFiniteLoss, Trainer
from embcache.train.optimizers import OptimizerConfig, dense_optimizer, sparse_rule
from embcache.train.task import BatchSource, Evaluation, Task

__all__ = [
    "BatchSource",
    "Evaluation",
    "NonFiniteLoss",
    "OptimizerConfig",
    "Task",
    "TrainConfig",
    "Trainer",
    "dense_optimizer",
    "sparse_rule",
]
