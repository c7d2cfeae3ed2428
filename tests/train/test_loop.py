"""The training loop on a toy task: order, schedules, accumulation, refusals, early stopping."""

import math

import pytest
import torch
from toy import Recorder, ToyData, bits, trainer

import embcache as ec
from embcache.errors import BadConfig, NonFiniteGradient
from embcache.statefile import equal_states
from embcache.train.loop import NonFiniteLoss
from embcache.train.optimizers import OptimizerConfig


def test_every_batch_of_every_epoch_in_order():
    data = ToyData(batches=5)
    progress = trainer(data=data, epochs=3).fit()
    assert data.given == [(e, b) for e in range(3) for b in range(5)]
    assert (progress.step, progress.epoch, progress.batch, progress.samples) == (15, 2, 5, 90)


def test_steps_cut_the_run_short():
    data = ToyData(batches=5)
    assert trainer(data=data, epochs=3, steps=7).fit().step == 7
    assert data.given == [(0, b) for b in range(5)] + [(1, 0), (1, 1)]


def test_training_lowers_the_loss_and_the_loss_is_a_mean():
    t = trainer(epochs=30, opt=OptimizerConfig(lr=0.1))
    recorder = Recorder()
    t.observers.append(recorder)
    t.fit()
    losses = [p["loss"] for p in recorder.points]
    assert losses[-1] < 0.5 * losses[0]
    assert t.progress.loss == losses[-1]
    ids, target = next(iter(ToyData()))
    with torch.no_grad():
        expected = float(((t.task.model(ids) - target) ** 2).mean())
    assert t.train_step((ids, target)) == pytest.approx(expected, rel=1e-6)


def test_micro_batches_of_integers_equal_one_batch():
    """Integer-valued data adds up exactly in any order, so the split must not change one bit."""
    states = []
    for parts in (1, 2, 3):
        opt = OptimizerConfig(dense_optimizer="sgd", sparse_optimizer="sgd", lr=2.0**-6)
        t = trainer(data=ToyData(size=8, integers=True), micro_batches=parts, epochs=1, steps=1, opt=opt,
                    init=ec.init.Constant(1.0))  # fmt: skip
        with torch.no_grad():
            t.task.model.out.weight.copy_(torch.tensor([[1.0, -2.0, 3.0, 1.0]]))
            t.task.model.out.bias.fill_(1.0)
        t.fit()
        states.append((t.task.model.out.weight, t.task.model.out.bias, t.stores[0].weight("t")))
    for other in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))
    assert not torch.equal(states[0][0], torch.tensor([[1.0, -2.0, 3.0, 1.0]]))


def test_more_micro_batches_than_samples():
    assert trainer(data=ToyData(size=2), micro_batches=5, epochs=1).fit().step == 8


def test_an_empty_batch_is_a_step_without_effect():
    t = trainer(opt=OptimizerConfig(dense_optimizer="sgd", sparse_optimizer="sgd"))
    before = t.task.model.out.weight.clone()
    assert math.isnan(t.train_step((torch.empty(0, 2, dtype=torch.int64), torch.empty(0))))
    assert t.progress.step == 1
    assert torch.equal(before, t.task.model.out.weight)


def test_warm_up_and_decay_reach_dense_and_sparse_alike():
    seen = []
    opt = OptimizerConfig(lr=0.1, dense_lr=0.2, warmup_steps=4, lr_schedule="linear", min_lr=0.5, dense_optimizer="sgd")
    t = trainer(data=ToyData(batches=12), epochs=1, opt=opt)
    step = t.train_step
    t.train_step = lambda batch: (seen.append([o.param_groups[0]["lr"] for o in t.optimizers]), step(batch))[1]
    t.fit()
    factors = [0.25, 0.5, 0.75, 1.0, *(1 - 0.5 * k / 8 for k in range(8))]
    assert seen == [[pytest.approx(0.2 * f), pytest.approx(0.1 * f)] for f in factors]


def test_the_rate_of_the_step_is_the_one_applied():
    opt = OptimizerConfig(dense_optimizer="sgd", sparse_optimizer="sgd", lr=0.5, warmup_steps=2)
    t = trainer(opt=opt, epochs=1)
    batch = next(iter(ToyData()))
    before = t.task.model.out.bias.item()
    with torch.no_grad():
        slope = float((2 * (t.task.model(batch[0]) - batch[1])).mean())
    t.train_step(batch)
    assert t.task.model.out.bias.item() == pytest.approx(before - 0.25 * slope, rel=1e-5)


def test_clipping_bounds_the_dense_gradient_only():
    opt = OptimizerConfig(dense_optimizer="sgd", sparse_optimizer="sgd", lr=1.0, clip_norm=1e-3)
    t, free = trainer(opt=opt), trainer(opt=OptimizerConfig(dense_optimizer="sgd", sparse_optimizer="sgd", lr=1.0))
    batch = next(iter(ToyData()))
    before = [p.clone() for p in t.task.model.parameters()]
    t.train_step(batch)
    free.train_step(batch)
    moved = torch.cat([(p - q).flatten() for p, q in zip(t.task.model.parameters(), before, strict=True)])
    assert float(moved.detach().norm()) == pytest.approx(1e-3, rel=1e-3)
    assert torch.equal(t.stores[0].weight("t"), free.stores[0].weight("t"))


@pytest.mark.parametrize("where", ["loss", "dense gradient"])
def test_nonfinite_raises_and_changes_nothing(where):
    t = trainer()
    ids, target = next(iter(ToyData()))
    if where == "loss":
        target[2] = math.nan
    else:
        t.task.model.out.weight.register_hook(lambda g: g * math.inf)
    before = bits(t)
    with pytest.raises((NonFiniteLoss, NonFiniteGradient)) as error:
        t.train_step((ids, target))
    if where != "loss":
        assert "step 1 (epoch 0, batch 0): the gradient of out.weight is not finite" in str(error.value)
    after = bits(t)
    assert equal_states(before["model"], after["model"])
    assert equal_states(before["stores"], after["stores"])
    assert all(p.grad is None for p in t.task.model.parameters())


def test_nonfinite_may_be_skipped_and_is_counted():
    t = trainer(on_nonfinite="skip")
    ids, target = next(iter(ToyData()))
    before = bits(t)
    t.train_step((ids, target * math.nan))
    after = bits(t)
    assert equal_states(before["model"], after["model"])
    assert equal_states(before["stores"], after["stores"])
    assert (t.progress.step, t.progress.skipped) == (1, 1)
    t.train_step((ids, target))
    assert not equal_states(after["model"], bits(t)["model"])


def test_nonfinite_may_be_allowed():
    t = trainer(on_nonfinite="allow", opt=OptimizerConfig(clip_norm=1.0))
    ids, target = next(iter(ToyData()))
    t.train_step((ids, target * math.nan))
    assert bool(torch.isnan(t.task.model.out.weight).any())


def test_early_stopping_keeps_the_best(tmp_path):
    values = [5.0, 3.0, 4.0, 3.0, 2.9999, 9.0]
    recorder = Recorder()
    t = trainer(tmp_path, valid=ToyData(2), values=values, epochs=20, patience=3, min_delta=0.01, observers=[recorder])
    progress = t.fit()
    assert t.task.evaluations == 5
    assert (progress.stopped, progress.best_value, progress.best_step, progress.step) == (True, 3.0, 16, 40)
    assert any("stopped early at step 40" in m and "best at step 16" in m for m in recorder.messages)
    assert t.checkpoints.best.notes["step"] == 16
    assert t.checkpoints.latest.notes["step"] == 40


def test_a_run_that_stops_early_ends_with_the_loss_since_the_last_point():
    recorder = Recorder()
    t = trainer(valid=ToyData(2), values=[1.0, 2.0], epochs=9, patience=1, log_every=1000, observers=[recorder])
    losses = []
    step = t.train_step
    t.train_step = lambda batch: losses.append((step(batch), len(batch[0])))
    assert t.fit().stopped
    mean = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
    assert t.progress.loss == pytest.approx(mean, rel=1e-6)
    assert [p["step"] for p in recorder.points if p["kind"] == "train"] == [16]


def test_a_nan_metric_is_no_improvement(tmp_path):
    t = trainer(tmp_path, valid=ToyData(2), values=[math.nan, 2.0, math.nan, math.nan], epochs=9, patience=2)
    assert t.fit().best_value == 2.0
    assert t.progress.step == 32


def test_evaluations_are_due_by_step():
    recorder = Recorder()
    trainer(valid=ToyData(2), eval_every=5, epochs=2, observers=[recorder]).fit()
    assert [p["step"] for p in recorder.points if p["kind"] == "eval"] == [5, 10, 15, 16]
    assert [p["step"] for p in recorder.points if p["kind"] == "train"] == [4, 8, 12, 16]
    assert (recorder.steps, recorder.total, recorder.ended) == (16, 16, True)


def test_evaluation_changes_nothing():
    t = trainer(valid=ToyData(3, rows=50), dropout=0.5)
    before = bits(t)
    t.evaluate()
    after = bits(t)
    for part in ("model", "optimizers", "random", "stores"):
        assert equal_states(before[part], after[part]), part


def test_early_stopping_without_validation_data_is_refused():
    for settings in ({"patience": 2}, {"eval_every": 5}):
        with pytest.raises(BadConfig, match="need validation data"):
            trainer(**settings)


def test_a_source_that_ends_early_is_reported():
    class Short(ToyData):
        def __iter__(self):
            return iter(())

    with pytest.raises(RuntimeError, match="gave no batch 0 of epoch 0"):
        trainer(data=Short()).fit()


def test_observers_end_when_training_fails():
    recorder = Recorder()
    t = trainer(observers=[recorder])
    t.task.loss = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        t.fit()
    assert recorder.ended
