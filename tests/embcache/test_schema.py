"""A table's saved description: what comes back, what is refused, and what must agree when a store is reopened."""

import json
import math
from dataclasses import dataclass, fields

import pytest
import torch

import embcache as ec
from embcache import init, optim
from embcache.errors import CorruptStore, NotSupported, SchemaMismatch
from embcache.schema import agree, describe, restore

RULES = [
    optim.SGD(lr=0.1, weight_decay=1e-4),
    optim.Adagrad(lr=1 / 3, eps=1e-10, initial_accumulator_value=0.1),
    optim.RowWiseAdagrad(lr=0.02, weight_decay=0.1, weight_decay_mode="decoupled", max_norm=2.0, c=3.0),
    optim.Adam(lr=1, beta1=0.8, per_row_step=True),
    optim.RowWiseAdam(),
    optim.LAMB(weight_decay=0.01),
    optim.LARS(eta=0.01),
    optim.FTRL(l1=0.5, initial_accumulator_value=0.1),
]
INITS = [
    init.Zeros(),
    init.Constant(-0.5),
    init.Uniform(),
    init.Uniform(0.1, center=1e-3),
    init.Normal(0.02, 1.0),
    init.TruncatedNormal(0.5),
    init.XavierUniform(2.0),
]


def through_json(table):
    return json.loads(json.dumps(describe(table), allow_nan=False))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_comes_back(rule):
    table = ec.TableConfig("t", 100, 7, optimizer=rule)
    again = restore(through_json(table))
    assert again == table
    assert type(again.optimizer) is type(rule)


def test_every_rule_and_initialiser_is_tried_above():
    assert {type(rule) for rule in RULES} == {k for k in vars(optim).values() if _is(k, optim.Rule)}
    assert {type(start) for start in INITS} == {k for k in vars(init).values() if _is(k, init.Initializer)}


def _is(kind, base):
    return isinstance(kind, type) and issubclass(kind, base) and kind is not base


@pytest.mark.parametrize("start", INITS, ids=repr)
def test_every_initialiser_comes_back(start):
    table = ec.TableConfig("t", 100, 7, init=start, seed=2**70)
    assert restore(through_json(table)) == table


def test_every_other_argument_comes_back():
    table = ec.TableConfig(
        "naïve / 名",
        1 << 40,
        3,
        features=["a", "b"],
        pooling="mean",
        dtype=torch.bfloat16,
        out_of_range="map",
        reserved_row=5,
        padding_idx=-1,
        max_norm=1.5,
        norm_type=math.inf,
        scale_grad_by_freq=True,
        seed=-3,
        admission=ec.Admission(3, cells=1 << 33),
        expiry=ec.Expiry(idle=0, every=7),
    )
    again = restore(through_json(table))
    assert again == table
    assert again.features == ("a", "b")
    assert (again.norm_type, again.padding_idx) == (math.inf, (1 << 40) - 1)
    unbounded = ec.TableConfig("u", None, 3, dtype=torch.float16)
    assert restore(through_json(unbounded)) == unbounded


def test_a_description_names_every_argument_and_the_layout():
    described = describe(ec.TableConfig("t", 10, 4, optimizer=optim.Adagrad()))
    arguments = {field.name for field in fields(ec.TableConfig)}
    assert set(described) == arguments - {"columns"} | {"layout"}
    assert set(describe(ec.TableConfig("t", 10, 4).part(1, 3))) == arguments | {"layout"}
    assert described["layout"] == {
        "state_offset": 16,
        "state_floats": 4,
        "meta_offset": 32,
        "meta_bytes": 0,
        "row_bytes": 32,
    }
    assert described["optimizer"] == {"kind": "Adagrad", "lr": 0.01, "eps": 1e-8, "initial_accumulator_value": 0.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"color": "red"}, r"the saved tables: table 't': unknown \['color'\]"),
        ({"seed": ...}, r"\['seed'\] missing"),
        ({"embedding_dim": 0}, "embedding_dim = 0"),
        ({"embedding_dim": 4.0}, r"embedding_dim = 4\.0"),
        ({"dtype": "float64"}, "dtype = 'float64'"),
        ({"dtype": ["float32"]}, "dtype = "),
        ({"features": "t"}, "features = 't', must be a list"),
        ({"features": []}, r"features = \[\], this version would write \['t'\]"),
        ({"init": {"kind": "Rule"}}, "init = .* must be one of"),
        ({"init": {"kind": "Initializer"}}, "Initializer"),
        ({"init": 3}, "init = 3"),
        ({"init": None}, "init = None"),
        ({"init": {"kind": "Uniform", "scale": 0.1}}, r"init: \['center'\] missing"),
        ({"init": {"kind": "Uniform", "scale": 0.1, "center": 0.0, "x": 1}}, r"init: unknown \['x'\]"),
        ({"init": {"kind": "Uniform", "scale": "big", "center": 0.0}}, "scale = 'big'"),
        ({"optimizer": {"kind": "SGD", "lr": -1.0, "weight_decay": 0.0}}, r"lr = -1\.0"),
        ({"optimizer": {"kind": "Rule", "lr": 0.1}}, "optimizer"),
        ({"optimizer": {"kind": "__import__"}}, "must be one of"),
        ({"optimizer": {"kind": ["SGD"]}}, "must be one of"),
        ({"scale_grad_by_freq": 0}, "scale_grad_by_freq = 0, must be true or false"),
        ({"max_norm": "1"}, "the saved tables: table 't'"),
        ({"norm_type": {"float": "x"}}, "the saved tables: table 't'"),
        ({"layout": {"state_offset": 16, "state_floats": 0, "row_bytes": 64}}, "layout = "),
        ({"admission": {"kind": "Admission", "min_count": 0, "cells": 8}}, "min_count = 0"),
        ({"expiry": {"kind": "Admission", "min_count": 1, "cells": 8}}, r"must be one of \['Expiry'\]"),
        ({"layout": None}, "layout = None"),
    ],
)
def test_what_describe_would_not_write_is_refused(change, message):
    described = through_json(ec.TableConfig("t", 10, 4))
    described.update(change)
    with pytest.raises(CorruptStore, match=message):
        restore({key: value for key, value in described.items() if value is not ...})


def test_something_else_than_an_object_is_refused():
    with pytest.raises(CorruptStore, match=r"runs/a: a table is described by list"):
        restore([], where="runs/a")


def test_a_class_of_the_callers_own_cannot_be_saved():
    @dataclass(frozen=True)
    class Ours(init.Constant):
        pass

    with pytest.raises(NotSupported, match=r"table 't': init = .*Ours.* cannot be saved"):
        describe(ec.TableConfig("t", 10, 4, init=Ours()))


def test_what_does_not_shape_rows_may_differ():
    saved = ec.TableConfig("t", 10, 4, optimizer=optim.Adagrad(lr=0.1, eps=1e-8))
    declared = ec.TableConfig(
        "t", 10, 4, ["x", "y"], "mean", optimizer=optim.Adagrad(lr=0.5, eps=1e-6), out_of_range="drop", max_norm=1.0
    )
    agree([saved], [declared])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"num_embeddings": 11}, "num_embeddings"),
        ({"num_embeddings": None}, "num_embeddings"),
        ({"embedding_dim": 8}, "embedding_dim"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"optimizer": optim.SGD()}, "optimizer"),
        ({"optimizer": optim.Adagrad(initial_accumulator_value=0.1)}, "initial_accumulator_value"),
        ({"init": init.Uniform(0.1)}, "init"),
        ({"seed": 1}, "seed"),
        ({"padding_idx": 0}, "padding_idx"),
        ({"expiry": ec.Expiry(idle=3)}, "layout"),
        ({"admission": ec.Admission(2)}, "admission"),
    ],
)
def test_what_shapes_rows_must_agree(other, what):
    saved = {"name": "t", "num_embeddings": 10, "embedding_dim": 4, "optimizer": optim.Adagrad()}
    fine = ec.TableConfig("other", 5, 2)
    with pytest.raises(SchemaMismatch) as caught:
        agree([fine, ec.TableConfig(**saved)], [fine, ec.TableConfig(**{**saved, **other})], "store")
    assert what in caught.value.saved[0]
    assert what in caught.value.declared[0]
    assert "other" not in str(caught.value)
    assert str(caught.value).startswith("store: saved [{'name': 't'")


def test_other_tables_or_another_order_do_not_agree():
    a, b = ec.TableConfig("a", 10, 4), ec.TableConfig("b", 10, 4)
    with pytest.raises(SchemaMismatch, match=r"saved \['a', 'b'\], declared \['b', 'a'\]"):
        agree([a, b], [b, a])
    with pytest.raises(SchemaMismatch, match=r"saved \['a'\], declared \[\]"):
        agree([a], [])
