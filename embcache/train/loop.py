"""The training loop: both model families use it, and it knows neither.

A step is a batch, cut into micro-batches: each adds the gradient of its loss sum over the *whole* batch's number of
loss terms, then every optimizer steps once; a schedule runs the stages of that (``step.py``). After the step the
position moves on; checkpoints hold the position of the last stepped batch, so a run that was killed anywhere and
resumed ends in the bits of one that never stopped.

On many ranks each trains on its share of the batch, and every number that decides anything is that of the whole batch:
the session asks the others.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import torch

from embcache.checkpoint import Checkpoints
from embcache.errors import BadConfig, NonFiniteLoss
from embcache.schedule.base import Step, Timeline, schedule_named
from embcache.train import state
from embcache.train.config import TrainConfig
from embcache.train.distributed import Session
from embcache.train.observe import Observer, Stopwatch
from embcache.train.optimizers import OptimizerConfig, schedulers
from embcache.train.step import Work, Workshop
from embcache.train.storage import Traffic
from embcache.train.task import BatchSource, Evaluation, Progress, Task, Window

__all__ = ["NonFiniteLoss", "Trainer"]


class Trainer:
    """Trains a task.

    Args:
        task: the model and its loss.
        optimizers: dense and sparse; all step together.
        batches: training data. ``valid``: data of the periodic evaluations, or None.
        config, optimizer_config: the run's settings.
        checkpoints: where generations go; None trains without (and cannot resume).
        observers: told of every step and point.
        session: the other ranks; None: there are none.
    """

    def __init__(
        self,
        task: Task,
        optimizers: Sequence[torch.optim.Optimizer],
        batches: BatchSource,
        valid: BatchSource | None,
        config: TrainConfig,
        optimizer_config: OptimizerConfig,
        checkpoints: Checkpoints | None = None,
        observers: Sequence[Observer] = (),
        session: Session | None = None,
    ) -> None:
        if valid is None and (config.patience is not None or config.eval_every is not None):
            raise BadConfig("--patience and --eval-every need validation data: give a split that has some")
        self.task, self.optimizers, self.batches, self.valid = task, list(optimizers), batches, valid
        self.config = config
        self.checkpoints, self.observers = checkpoints, list(observers)
        self.session = session or Session()
        self.stores = state.stores_of(self.optimizers)
        self._shop = Workshop(task, self.optimizers, self.stores, self.session, config, optimizer_config.clip_norm)
        self.schedule, self.timeline = schedule_named(config.schedule), Timeline()
        self.session.check_equal(task.model)
        self.total_steps = config.epochs * len(batches)
        if config.steps is not None:
            self.total_steps = min(config.steps, self.total_steps)
        self.schedulers = schedulers(self.optimizers, optimizer_config, self.total_steps)
        self.progress = Progress()
        self.last_evaluation: Evaluation | None = None
        self._traffic = Traffic(self.stores, self.session)
        self._evaluated_at = -1
        self._saved_at = -1

    # the run ----------------------------------------------------------------------------------------------------

    def fit(self) -> Progress:
        """Train until the last step or early stopping; resumes first where the configuration says so."""
        resumes = self.config.resume or self.session.restarted
        if resumes and self.checkpoints is not None and self.checkpoints.latest is not None:
            self.restore("latest")
            self._tell(f"resumed at step {self.progress.step}")
        self.session.meet()
        for observer in self.observers:
            observer.begin(self.progress, self.total_steps)
        try:
            with closing(self._positions()) as batches:
                for batch in batches:
                    self.train_step(batch)
                    self._after_step()
                    if self.progress.stopped:
                        break
            self.schedule.drain()
            if self.progress.step != self._saved_at:
                self.save()
            self._finish_saving()
        finally:
            for observer in self.observers:
                observer.end()
        return self.progress

    def train_step(self, batch: Any) -> float:
        """One step on a batch; returns the batch's mean loss. A refused step changes nothing but the counters."""
        begun = time.perf_counter()
        self.task.model.train()
        self.session.begin_step(self.config.seed, self.progress.step)
        work = Work(self._shop, batch, self._where)
        self.timeline.seconds = self.progress.stages
        try:
            self.schedule.run(Step(self.progress.step, work.stages()), self.timeline)
        finally:
            work.release()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()
        allowed, count = work.allowed, work.count
        self.progress.skipped += not allowed
        self._count(work.total if allowed else 0.0, count if allowed else 0, work.samples, begun)
        return work.total / count if count else math.nan

    def evaluate(self) -> Evaluation | None:
        """Evaluate on the validation data, note the result, and judge it for early stopping."""
        if self.valid is None:
            return None
        with self._watch("evaluation"):
            result = self.test(self.valid)
        self._evaluated_at = self.progress.step
        self.last_evaluation = result
        self._tell_point({"step": self.progress.step, "kind": "eval", **result.metrics})
        self._judge(float(result.metrics.get(self.task.monitor, math.nan)))
        return result

    def test(self, batches: BatchSource) -> Evaluation:
        """Metrics over all batches of a source, from its beginning."""
        self.schedule.drain()
        batches.set_position(0, 0)
        self.task.model.eval()
        with torch.inference_mode():
            return self.task.evaluate(batches, self.session.merged)

    # checkpoints ------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Commit a checkpoint of the state after the last step."""
        if self.checkpoints is None:
            return
        self.schedule.drain()
        with self._watch("checkpoint"):
            is_best = self.progress.best_step == self.progress.step
            notes = {"step": self.progress.step, "best_value": self.progress.best_value}
            self.checkpoints.save(self._state(), self.stores, notes=notes, best=is_best, wait=False)
        self._saved_at = self.progress.step

    def _finish_saving(self) -> None:
        if self.checkpoints is not None:
            with self._watch("checkpoint"):
                self.checkpoints.wait()

    def close(self) -> None:
        """Close the stores on disk; the trainer cannot be used afterwards."""
        for store in self.stores:
            if store.durable is not None:
                store.close()

    def restore(self, which: str) -> None:
        """Load the "latest" or the "best" checkpoint, everything in it."""
        if self.checkpoints is None:
            raise BadConfig("this trainer has no checkpoints to restore from")
        saved = self.checkpoints.load(self.stores, which)
        state.load_dense_state(self.task.model, saved["model"])
        for optimizer, values in zip(self.optimizers, saved["optimizers"], strict=True):
            state.load_optimizer(optimizer, values)
        for scheduler, values in zip(self.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict({**values, "lr_lambdas": [None] * len(scheduler.base_lrs)})
        state.load_random_state(saved["random"])
        self.progress = Progress(**{**saved["progress"], "window": Window(**saved["progress"]["window"])})
        if self.session.is_main:  # they are sums over the ranks
            self.task.counters.update(saved["counters"])
        self._saved_at = self._evaluated_at = self.progress.step

    def _state(self) -> dict[str, Any]:
        lambdas = "lr_lambdas"  # what they compute follows from the configuration
        return {
            "model": state.dense_state(self.task.model),
            "optimizers": [state.optimizer_state(o) for o in self.optimizers],
            "schedulers": [{k: v for k, v in s.state_dict().items() if k != lambdas} for s in self.schedulers],
            "random": state.random_state(),
            "progress": dataclasses.asdict(self.progress),
            "counters": self.lookups(),
        }

    def lookups(self) -> dict[str, int]:
        """Ids looked up in training by feature, on all ranks."""
        names = sorted(self.task.counters)
        return dict(zip(names, self.session.total(*(self.task.counters[n] for n in names)), strict=True))

    # one step's parts -------------------------------------------------------------------------------------------

    @property
    def _watch(self) -> Stopwatch:
        return Stopwatch(self.progress.stages)

    def _positions(self) -> Generator[Any]:
        """Batches from the current position on; the position moves when the next one is asked for, after the step."""
        p = self.progress
        while p.step < self.total_steps and not p.stopped:
            if p.batch >= len(self.batches):
                p.epoch, p.batch = p.epoch + 1, 0
            self.batches.set_position(p.epoch, p.batch)
            source, begun = iter(self.batches), p.batch
            try:
                while p.step < self.total_steps and not p.stopped:
                    waiting = time.perf_counter()
                    with self._watch("waiting for data"):
                        batch = next(source, None)
                    if batch is None:
                        break
                    waited = time.perf_counter() - waiting
                    p.seconds, p.window.seconds = p.seconds + waited, p.window.seconds + waited
                    yield batch
            finally:
                if hasattr(source, "close"):  # its threads and pins end now, not when it is collected
                    source.close()
            if p.batch == begun < len(self.batches) and p.step < self.total_steps:
                raise RuntimeError(
                    f"the data source gave no batch {p.batch} of epoch {p.epoch}, though it has a length"
                )

    @property
    def _where(self) -> str:
        p = self.progress
        return f"step {p.step + 1} (epoch {p.epoch}, batch {p.batch})"

    def _count(self, total: float, count: int, samples: int, begun: float) -> None:
        p, w, seconds = self.progress, self.progress.window, time.perf_counter() - begun
        p.step, p.batch, p.samples, p.seconds = p.step + 1, p.batch + 1, p.samples + samples, p.seconds + seconds
        w.loss, w.terms = w.loss + total, w.terms + count
        w.samples, w.seconds = w.samples + samples, w.seconds + seconds

    def _after_step(self) -> None:
        """Points, evaluations and checkpoints that are due after this step; all depend on the step alone."""
        p, c = self.progress, self.config
        for observer in self.observers:
            observer.step(p)
        last = p.step >= self.total_steps
        logged = p.step % c.log_every == 0 or last
        if logged:
            self._log_point()
        epoch_ends = p.batch >= len(self.batches)
        evaluates = last or (epoch_ends if c.eval_every is None else p.step % c.eval_every == 0)
        if evaluates and self.valid is not None:
            self.evaluate()
        if p.stopped and not logged:  # the last point of the curves, and the loss the run ends with
            self._log_point()
        due = evaluates if c.checkpoint_every is None else p.step % c.checkpoint_every == 0
        if due or p.best_step == p.step:
            self.save()

    def _log_point(self) -> None:
        p, w = self.progress, self.progress.window
        p.loss, p.window = w.loss / w.terms if w.terms else math.nan, Window()
        speed = w.samples / max(w.seconds, 1e-9)
        lr = float(self.optimizers[0].param_groups[0]["lr"])
        point = {"step": p.step, "kind": "train", "loss": p.loss, "samples_per_second": speed, "lr": lr}
        self._tell_point({**point, **self._traffic.point()})

    def _judge(self, value: float) -> None:
        """Early stopping: ``patience`` evaluations in a row without an improvement of more than ``min_delta``."""
        p = self.progress
        sign = 1.0 if self.task.higher_is_better else -1.0
        better = p.best_value is None or sign * (value - p.best_value) > self.config.min_delta
        if math.isfinite(value) and better:
            p.best_value, p.best_step, p.without_improvement = value, p.step, 0
            return
        p.without_improvement += 1
        if self.config.patience is not None and p.without_improvement >= self.config.patience:
            p.stopped = True
            self._tell(
                f"stopped early at step {p.step}: {self.task.monitor} was best at step {p.best_step} "
                f"({p.best_value if p.best_value is not None else math.nan:.4f})"
            )

    def _tell(self, text: str) -> None:
        for observer in self.observers:
            observer.message(text)

    def _tell_point(self, point: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.point(point)
