"""One specification, two optimizers: dense and sparse must move alike, and the schedule must reach both."""

import pytest
import torch

import embcache as ec
from embcache.train.optimizers import OptimizerConfig, WarmupDecay, dense_optimizer, schedulers, sparse_rule


@pytest.mark.parametrize(
    ("dense", "sparse", "tolerance"),
    [("sgd", "sgd", 1e-6), ("adagrad", "adagrad", 1e-6), ("adam", "adam", 1e-5), ("adamw", "adam", 1e-5)],
)
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_dense_and_sparse_rules_are_the_same_rule(dense, sparse, tolerance, eps):
    """A table of which every row is touched in every step moves as a dense parameter does."""
    has = {"eps": dense != "sgd", "beta1": "adam" in dense, "beta2": "adam" in dense}
    given = {name: value for name, value in {"eps": eps, "beta1": 0.8, "beta2": 0.95}.items() if has[name]}
    config = OptimizerConfig(dense_optimizer=dense, sparse_optimizer=sparse, lr=0.1, **given)
    bag = ec.EmbeddingBag(6, 3, mode="sum", optimizer=sparse_rule(config), init=ec.init.Uniform(0.5))
    weight = torch.nn.Parameter(bag.weight.clone())
    optimizers = [dense_optimizer([weight], config), ec.optim.SparseOptimizer(bag)]
    plans = schedulers(optimizers, OptimizerConfig(warmup_steps=2, lr_schedule="cosine"), total_steps=6)
    generator = torch.Generator().manual_seed(0)
    start = bag.weight.clone()
    for _ in range(6):
        grad = torch.randn(6, 3, generator=generator)
        (bag(torch.arange(6).view(6, 1)) * grad).sum().backward()
        weight.grad = grad.clone()
        for step in (*optimizers, *plans):
            step.step()
    assert float((start - bag.weight).abs().max()) > 1e-2
    assert torch.allclose(bag.weight, weight.detach(), rtol=0, atol=tolerance)


def test_eps_is_one_word_with_one_default():
    config = OptimizerConfig(dense_optimizer="adagrad", sparse_optimizer="adagrad")
    dense = dense_optimizer([torch.nn.Parameter(torch.zeros(1))], config)
    assert dense.param_groups[0]["eps"] == sparse_rule(config).eps == config.eps == 1e-8


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "lamb", "lars", "ftrl"])
def test_every_sparse_rule_can_be_named(name):
    rule = sparse_rule(OptimizerConfig(sparse_optimizer=name, lr=0.5, sparse_lr=0.25))
    assert rule.lr == 0.25
    assert type(rule).__name__.lower() == name.replace("_", "")


def test_weight_decay_reaches_the_rules_that_have_it():
    assert sparse_rule(OptimizerConfig(sparse_optimizer="adam", sparse_weight_decay=0.1)).weight_decay == 0.1
    rule = sparse_rule(OptimizerConfig(sparse_optimizer="rowwise_adagrad", sparse_weight_decay=0.1))
    assert (rule.weight_decay, rule.weight_decay_mode) == (0.1, "l2")
    with pytest.raises(ValueError, match="--sparse-weight-decay: adagrad of embedding rows has none"):
        OptimizerConfig(sparse_optimizer="adagrad", sparse_weight_decay=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "--lr must be a positive number"),
        ({"momentum": 0.9}, "--momentum: neither dense adagrad nor sparse rowwise_adagrad has it"),
        ({"beta1": 0.5, "dense_optimizer": "sgd"}, "--beta1: neither dense sgd nor sparse rowwise_adagrad has it"),
        ({"eps": 0.1, "dense_optimizer": "sgd", "sparse_optimizer": "ftrl"}, "--eps: neither dense sgd nor"),
        ({"min_lr": 0.1}, "--min-lr: a constant learning rate does not fall"),
        ({"dense_lr": float("nan")}, "--dense-lr must be a positive number"),
        ({"clip_norm": -1.0}, "--clip-norm must be a positive number"),
        ({"min_lr": 2.0}, "--min-lr must be in"),
        ({"warmup_steps": -1}, "--warmup-steps must not be negative"),
        ({"beta1": 1.0, "sparse_optimizer": "adam"}, "beta1"),
    ],
)
def test_wrong_numbers_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)


def test_schedule_values():
    cosine = WarmupDecay(warmup=0, total=4, kind="cosine", floor=0.1)
    assert [cosine(s) for s in (0, 2, 4, 9)] == [pytest.approx(v) for v in (1.0, 0.55, 0.1, 0.1)]
    constant = WarmupDecay(warmup=4, total=100, kind="constant", floor=0.0)
    assert [constant(s) for s in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert WarmupDecay(warmup=5, total=3, kind="linear", floor=0.0)(4) == 1.0
