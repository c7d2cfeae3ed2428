"""The settings of a training run that no model family owns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from embcache.train.flags import flag

__all__ = ["TrainConfig"]

MOST_THREADS = 1024  # torch dies without a word where the system gives it no more


@dataclass(frozen=True)
class TrainConfig:
    """Training: where the run lives, how long it is, when it evaluates, saves and stops."""

    out: Path = flag(Path("runs/latest"), "folder of the run")
    resume: bool = flag(False, "go on from the newest checkpoint in --out (from the start if there is none)")
    seed: int = flag(0, "seed of initial weights, shuffling and dropout")
    epochs: int = flag(1, "passes over the training data")
    steps: int | None = flag(None, "stop after this many steps")
    global_batch_size: int = flag(2048, "samples in a step")
    micro_batches: int = flag(1, "parts of a batch whose gradients are added before the step")
    schedule: Literal["sync"] = flag("sync", "order in which exchange and compute of a step run")
    on_nonfinite: Literal["raise", "skip", "allow"] = flag("raise", "a NaN or infinity in the loss or a gradient")
    eval_every: int | None = flag(None, "steps between evaluations (none: at the end of each epoch)")
    checkpoint_every: int | None = flag(None, "steps between checkpoints (none: at each evaluation)")
    keep: int = flag(2, "newest checkpoints kept, besides the best")
    patience: int | None = flag(None, "stop after this many evaluations without improvement")
    min_delta: float = flag(0.0, "smallest improvement that counts")
    test_weights: Literal["best", "last"] = flag("best", "weights that are tested at the end")
    log_every: int = flag(50, "steps between two points of the curves")
    tensorboard: bool = flag(True, "write TensorBoard scalars into --out")
    device: str = flag("cpu", "device of the dense part")
    threads: int | None = flag(None, "threads of torch (none: torch decides)")

    def __post_init__(self) -> None:
        for name in ("epochs", "global_batch_size", "micro_batches", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("steps", "eval_every", "checkpoint_every", "patience", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ValueError(f"--threads {self.threads}: at most {MOST_THREADS}")
        try:
            kind = torch.device(self.device).type
        except RuntimeError as error:
            raise ValueError(f"--device {self.device}: {str(error).splitlines()[0]}") from None
        if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
            raise ValueError(f"--device {self.device}: there is no such device here")
        if not self.min_delta >= 0:
            raise ValueError(f"--min-delta must not be negative, got {self.min_delta}")
