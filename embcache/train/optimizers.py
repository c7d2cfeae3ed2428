"""One optimizer specification for dense parameters and embedding rows: same words, same defaults, same formulas.

Libraries whose fused and dense optimizers disagree about a default (eps, say) train two different models without a
word; here both sides are built from one configuration, and a test holds their updates together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

import embcache as ec
from embcache.optim import Rule
from embcache.train.flags import flag

__all__ = ["OptimizerConfig", "WarmupDecay", "dense_optimizer", "schedulers", "sparse_rule"]

SparseRule = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "lamb", "lars", "ftrl"]


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizers: the rules of dense parameters and embedding rows, and the schedule of their learning rates."""

    dense_optimizer: Literal["sgd", "adagrad", "adam", "adamw"] = flag("adagrad", "rule of the dense parameters")
    sparse_optimizer: SparseRule = flag("rowwise_adagrad", "rule of the embedding rows")
    lr: float = flag(0.01, "learning rate of both, unless one of the next two is given")
    dense_lr: float | None = flag(None, "learning rate of the dense parameters")
    sparse_lr: float | None = flag(None, "learning rate of the embedding rows")
    eps: float = flag(1e-8, "eps of both")
    beta1: float = flag(0.9, "first beta of adam, adamw, rowwise_adam, lamb")
    beta2: float = flag(0.999, "second beta of those")
    momentum: float | None = flag(None, "momentum: 0 in dense sgd and 0.9 in lars unless given")
    dense_weight_decay: float = flag(0.0, "weight decay of the dense parameters: decoupled in adamw, L2 in the others")
    sparse_weight_decay: float = flag(0.0, "weight decay of touched embedding rows, where the rule has it")
    lr_schedule: Literal["constant", "linear", "cosine"] = flag("constant", "how the rates fall after the warm-up")
    warmup_steps: int = flag(0, "steps over which the rates rise from nothing")
    min_lr: float = flag(0.0, "share of the rate that is left at the last step")
    clip_norm: float | None = flag(None, "largest norm of the dense gradient")

    def __post_init__(self) -> None:
        for name in ("lr", "dense_lr", "sparse_lr", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"--{name.replace('_', '-')} must be a positive number, got {value}")
        if self.warmup_steps < 0 or not 0 <= self.min_lr <= 1:
            raise ValueError("--warmup-steps must not be negative and --min-lr must be in [0, 1]")
        if self.min_lr and self.lr_schedule == "constant":
            raise ValueError("--min-lr: a constant learning rate does not fall")
        self._unused("momentum", {"sgd"}, {"lars"})
        for name in ("beta1", "beta2"):
            self._unused(name, {"adam", "adamw"}, {"adam", "rowwise_adam", "lamb"})
        self._unused(
            "eps", {"adagrad", "adam", "adamw"}, {"adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "lamb"}
        )
        sparse_rule(self)

    def _unused(self, name: str, dense: set[str], sparse: set[str]) -> None:
        """Refuse a changed setting that neither rule has."""
        if getattr(self, name) != getattr(type(self), name) and (
            self.dense_optimizer not in dense and self.sparse_optimizer not in sparse
        ):
            rules = f"dense {self.dense_optimizer} nor sparse {self.sparse_optimizer}"
            raise ValueError(f"--{name}: neither {rules} has it")


def dense_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of the dense parameters, in torch's fused form where it has one for the device."""
    lr = config.dense_lr if config.dense_lr is not None else config.lr
    decay = config.dense_weight_decay
    betas = (config.beta1, config.beta2)
    given = list(parameters)
    if config.dense_optimizer == "sgd":
        return torch.optim.SGD(given, lr=lr, momentum=config.momentum or 0.0, weight_decay=decay, fused=True)
    if config.dense_optimizer == "adagrad":
        return torch.optim.Adagrad(given, lr=lr, eps=config.eps, weight_decay=decay, fused=_on_cpu(given))
    kind = torch.optim.Adam if config.dense_optimizer == "adam" else torch.optim.AdamW
    return kind(given, lr=lr, betas=betas, eps=config.eps, weight_decay=decay, fused=True)


def sparse_rule(config: OptimizerConfig) -> Rule:
    """The rule of the embedding rows; a weight decay that the rule does not have is a ValueError."""
    lr = config.sparse_lr if config.sparse_lr is not None else config.lr
    decay: dict[str, Any] = {"weight_decay": config.sparse_weight_decay}
    adam: dict[str, Any] = {"lr": lr, "eps": config.eps, "beta1": config.beta1, "beta2": config.beta2, **decay}
    name = config.sparse_optimizer
    if name in ("adagrad", "ftrl") and config.sparse_weight_decay:
        raise ValueError(f"--sparse-weight-decay: {name} of embedding rows has none")
    if name == "sgd":
        return ec.optim.SGD(lr=lr, **decay)
    if name == "adagrad":
        return ec.optim.Adagrad(lr=lr, eps=config.eps)
    if name == "rowwise_adagrad":
        return ec.optim.RowWiseAdagrad(lr=lr, eps=config.eps, **decay)
    if name == "lars":
        return ec.optim.LARS(lr=lr, momentum=0.9 if config.momentum is None else config.momentum, **decay)
    if name == "ftrl":
        return ec.optim.FTRL(lr=lr)
    return {"adam": ec.optim.Adam, "rowwise_adam": ec.optim.RowWiseAdam, "lamb": ec.optim.LAMB}[name](**adam)


@dataclass(frozen=True)
class WarmupDecay:
    """The factor of a learning rate at a step (from 0): a linear rise, then constant, linear or cosine to ``floor``.

    >>> factor = WarmupDecay(warmup=2, total=6, kind="linear", floor=0.0)
    >>> [factor(step) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    warmup: int
    total: int
    kind: str
    floor: float

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        done = min((step - self.warmup) / max(self.total - self.warmup, 1), 1.0)
        fall = 1.0 - done if self.kind == "linear" else (1.0 + math.cos(math.pi * done)) / 2
        return self.floor + (1.0 - self.floor) * fall


def schedulers(
    optimizers: Iterable[torch.optim.Optimizer], config: OptimizerConfig, total_steps: int
) -> list[torch.optim.lr_scheduler.LambdaLR]:
    """One torch scheduler over each optimizer, dense and sparse alike."""
    factor = WarmupDecay(config.warmup_steps, total_steps, config.lr_schedule, config.min_lr)
    return [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]


def _on_cpu(parameters: list[nn.Parameter]) -> bool:
    return all(p.device.type == "cpu" for p in parameters)
