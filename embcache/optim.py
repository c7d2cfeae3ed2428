"""Update rules of embedding rows, and the optimizer that applies them.

A rule is plain data: names, defaults and formulas follow ``torch.optim`` where torch has the rule. Each is applied once
per touched row and step, to the sum ``g`` of the gradients of equal ids; untouched rows keep weights and state bit for
bit. ``SparseOptimizer`` is a ``torch.optim.Optimizer``: schedulers, ``GradScaler``, closures and accumulation work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from .errors import BadConfig, NotSupported, SchemaMismatch

HYPER = 16  # columns of the hyper matrix
(LR, WEIGHT_DECAY, EPS, BETA1, BETA2, MOMENTUM, ETA, ALPHA, BETA, L1, L2, MAX_NORM, C, STEP, MULTIPLIER) = range(15)
DECAY_MODES = {"none": 0, "l2": 1, "decoupled": 2}
ROW_STEP_FLAG, DECAY_SHIFT, ROUNDING_FLAG = 8, 1, 1


@dataclass(frozen=True)
class Rule:
    """Base of the update rules. ``lr`` is the learning rate at construction; a scheduler changes the optimizer's."""

    lr: float = 0.01
    _code: ClassVar[int] = -1
    _columns: ClassVar[dict[str, int]] = {"lr": LR}
    _wide: ClassVar[int] = 0  # states of embedding_dim floats
    _scalars: ClassVar[int] = 0  # states of one float a row
    _sums: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("bool", "str"):  # annotations are text here
                if type(value).__name__ != field.type:
                    raise BadConfig(f"optim.{type(self).__name__}: {field.name} = {value!r}, must be a {field.type}")
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise BadConfig(f"optim.{type(self).__name__}: {field.name} = {value!r}, must be a finite number >= 0")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name, 0.0)
            if not value < 1:
                raise BadConfig(f"optim.{type(self).__name__}: {name} = {value}, must be in [0, 1)")

    @property
    def code(self) -> int:
        """The kernels' number of this rule."""
        return self._code

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def row_sums(self) -> int:
        """How many sums over the columns of a row it needs first, max_norm aside; 0: each column is on its own."""
        return self._sums

    @property
    def wide_states(self) -> int:
        """Of its states, those that have a value a column; they come first."""
        return self._wide

    def state_floats(self, dim: int) -> int:
        """fp32 values of optimizer state in one row."""
        return self._wide * dim + self._scalars + self.flags // ROW_STEP_FLAG % 2

    def initial_state(self, dim: int) -> list[float]:
        """The values a row's optimizer state begins with, ``state_floats(dim)`` of them."""
        return [getattr(self, "initial_accumulator_value", 0.0)] * self.state_floats(dim)

    @property
    def flags(self) -> int:
        """The kernels' flag word without stochastic rounding."""
        return 0

    def options(self) -> dict[str, float]:
        """The numbers a scheduler may change, by the names of the param group."""
        return {name: float(getattr(self, name)) for name in self._columns}

    def fill_hyper(self, row: list[float], options: dict[str, Any]) -> None:
        """Write ``options`` into one row of the hyper matrix."""
        row[C] = row[MULTIPLIER] = 1.0
        for name, column in self._columns.items():
            row[column] = float(options[name])


@dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """``w -= lr * (g + weight_decay * w)``, on touched rows. No state.

    >>> SGD(lr=0.1).state_floats(64)
    0
    """

    weight_decay: float = 0.0
    _code: ClassVar[int] = 0
    _columns: ClassVar[dict[str, int]] = {"lr": LR, "weight_decay": WEIGHT_DECAY}


@dataclass(frozen=True, kw_only=True)
class Adagrad(Rule):
    """``h += g²; w -= lr * g / (sqrt(h) + eps)`` (Duchi et al., 2011). State: h, embedding_dim floats a row."""

    eps: float = 1e-8
    initial_accumulator_value: float = 0.0
    _code: ClassVar[int] = 1
    _columns: ClassVar[dict[str, int]] = {"lr": LR, "eps": EPS}
    _wide: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(Rule):
    """Adagrad with one accumulator a row: ``h += mean(g'²); mul = lr / (sqrt(h / c) + eps); w = k*w - mul*g``.

    ``weight_decay_mode``: "none" (g' = g, k = 1), "l2" (g' = g + wd*w, k = 1 - mul*wd) or "decoupled" (g' = g,
    k = 1 - lr*wd); None picks "l2" where ``weight_decay`` is not 0. With ``max_norm`` > 0 a row is afterwards scaled
    back to that norm. ``c`` is the moment scale of 2D replica groups (1 otherwise). State: one float a row.

    >>> RowWiseAdagrad(lr=0.02).state_floats(64)
    1
    """

    eps: float = 1e-8
    weight_decay: float = 0.0
    weight_decay_mode: str = ""
    max_norm: float = 0.0
    c: float = 1.0
    initial_accumulator_value: float = 0.0
    _code: ClassVar[int] = 2
    _columns: ClassVar[dict[str, int]] = {
        "lr": LR, "eps": EPS, "weight_decay": WEIGHT_DECAY, "max_norm": MAX_NORM, "c": C,
    }  # fmt: skip
    _scalars: ClassVar[int] = 1
    _sums: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        mode = self.weight_decay_mode or ("l2" if self.weight_decay else "none")
        if mode not in DECAY_MODES:
            raise BadConfig(f"optim.RowWiseAdagrad: weight_decay_mode = {mode!r}, must be one of {sorted(DECAY_MODES)}")
        if mode == "none" and self.weight_decay:
            raise BadConfig("optim.RowWiseAdagrad: weight_decay is set but weight_decay_mode is 'none'")
        if self.c <= 0:
            raise BadConfig(f"optim.RowWiseAdagrad: c = {self.c}, must be > 0")
        object.__setattr__(self, "weight_decay_mode", mode)

    @property
    def flags(self) -> int:
        return DECAY_MODES[self.weight_decay_mode] << DECAY_SHIFT


@dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """Lazy Adam with decoupled decay: ``m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g²;
    w -= lr * ((m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps) + weight_decay*w)`` (Kingma & Ba, 2015; Loshchilov & Hutter,
    2019). ``t`` counts the optimizer's steps while the table is not frozen, or each row's own
    updates with ``per_row_step``. State: m and v."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    per_row_step: bool = False
    _code: ClassVar[int] = 3
    _columns: ClassVar[dict[str, int]] = {
        "lr": LR, "beta1": BETA1, "beta2": BETA2, "eps": EPS, "weight_decay": WEIGHT_DECAY,
    }  # fmt: skip
    _wide: ClassVar[int] = 2

    @property
    def flags(self) -> int:
        return ROW_STEP_FLAG if self.per_row_step else 0


@dataclass(frozen=True, kw_only=True)
class RowWiseAdam(Adam):
    """Adam whose second moment is one float a row: ``v = b2*v + (1-b2) * mean(g²)``. State: m, and v of one float."""

    _code: ClassVar[int] = 4
    _wide: ClassVar[int] = 1
    _scalars: ClassVar[int] = 1
    _sums: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class LAMB(Adam):
    """``r = mhat / (sqrt(vhat) + eps) + weight_decay*w; w -= lr * (|w|/|r|) * r`` (You et al., 2020), norms over one
    row; the ratio is 1 where a norm is 0. State: m and v."""

    _code: ClassVar[int] = 5
    _sums: ClassVar[int] = 2


@dataclass(frozen=True, kw_only=True)
class LARS(Rule):
    """``a = lr*eta*|w| / (|g| + weight_decay*|w|)`` (lr where |w| = 0); ``m = momentum*m + a*(g + weight_decay*w);
    w -= m`` (You et al., 2017), norms over one row. State: m."""

    eta: float = 0.001
    momentum: float = 0.9
    weight_decay: float = 0.0
    _code: ClassVar[int] = 6
    _columns: ClassVar[dict[str, int]] = {"lr": LR, "eta": ETA, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    _wide: ClassVar[int] = 1
    _sums: ClassVar[int] = 2


@dataclass(frozen=True, kw_only=True)
class FTRL(Rule):
    """FTRL-proximal (McMahan et al., 2013): ``z += g - (sqrt(n+g²) - sqrt(n))/lr*w; n += g²; w = 0 if |z| <= l1 else
    -(z - sign(z)*l1) / ((beta + sqrt(n))/lr + l2)``. The rule's alpha is ``lr``, so that schedulers reach it.
    State: z and n."""

    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.0
    _code: ClassVar[int] = 7
    _columns: ClassVar[dict[str, int]] = {"lr": LR, "beta": BETA, "l1": L1, "l2": L2}
    _wide: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr <= 0:
            raise BadConfig(f"optim.FTRL: lr = {self.lr}, must be > 0 (it divides)")

    def initial_state(self, dim: int) -> list[float]:
        return [0.0] * dim + [self.initial_accumulator_value] * dim

    def fill_hyper(self, row: list[float], options: dict[str, Any]) -> None:
        super().fill_hyper(row, options)
        row[ALPHA] = row[LR]


class Updatable(Protocol):
    """What the optimizer needs of a store (``embcache.EmbeddingStore`` is one)."""

    names: list[str]
    rules: list[Rule]
    markers: list[Tensor]
    steps: list[int]
    problem: Exception | None
    check_finite: bool

    def claim(self, owner: object) -> None: ...
    def multipliers(self) -> Any: ...
    def agree_finite(self, found: bool = False) -> bool: ...
    def pending_tables(self) -> set[int]: ...
    def discard(self) -> None: ...
    def apply(self, hyper: Tensor) -> int: ...
    def read_state(self, table: int) -> Tensor | None: ...
    def check_state(self, table: int, state: Tensor | None) -> None: ...
    def write_state(self, table: int, state: Tensor) -> None: ...


def _stores(source: object) -> Iterator[Updatable]:
    """Every store reachable from a module, a store, or an iterable of them, each once, in module order."""
    seen: set[int] = set()
    for item in source if isinstance(source, Iterable) and not isinstance(source, torch.nn.Module) else [source]:
        owners = item.modules() if isinstance(item, torch.nn.Module) else [item]
        for owner in owners:
            store = getattr(owner, "store", owner)
            if hasattr(store, "pending_tables") and id(store) not in seen:
                seen.add(id(store))
                yield cast(Updatable, store)


class SparseOptimizer(torch.optim.Optimizer):
    """Applies the rules of all embedding tables below ``source``: a module, a store, or an iterable of them.

    ``param_groups`` has one group a table: ``name``, ``rule`` and that rule's numbers, ``lr`` first, so schedulers of
    torch work unchanged. ``step()`` consumes what backwards have gathered since the last step, summed in (call,
    feature, position) order; ``zero_grad()`` drops it. A step is skipped whole where a ``GradScaler`` found an
    infinity.

    Args:
        source: model whose tables are trained. A table may belong to one optimizer only.
        on_nonfinite: "raise" refuses a NaN or infinite gradient in the backward, naming table and feature, before any
            optimizer steps; "skip" skips the step and counts it in ``skipped_steps``; "allow" does not look.

    >>> import embcache as ec
    >>> bag = ec.EmbeddingBag(10, 4, mode="sum", init=ec.init.Constant(1.0), optimizer=ec.optim.SGD(lr=0.5))
    >>> optimizer = SparseOptimizer(bag)
    >>> bag(torch.tensor([[3, 3]])).sum().backward()
    >>> optimizer.step()
    >>> bag.weight[3]
    tensor([0., 0., 0., 0.])
    """

    _step_supports_amp_scaling = True

    def __init__(self, source: object, *, on_nonfinite: str = "raise") -> None:
        if on_nonfinite not in ("raise", "skip", "allow"):
            raise BadConfig(f"SparseOptimizer: on_nonfinite = {on_nonfinite!r}, must be 'raise', 'skip' or 'allow'")
        self.stores = list(_stores(source))
        self.on_nonfinite = on_nonfinite
        self.skipped_steps = 0
        groups: list[dict[str, Any]] = [
            {"params": [store.markers[t]], "name": name, "rule": store.rules[t].name, **store.rules[t].options()}
            for store in self.stores
            for t, name in enumerate(store.names)
        ]
        if not groups:
            raise BadConfig("SparseOptimizer: the model holds no embedding table of this library")
        for store in self.stores:
            store.claim(self)
            store.check_finite = on_nonfinite != "allow"
        self._hyper = [torch.zeros(len(store.names), HYPER, dtype=torch.float64) for store in self.stores]
        self._filled: list[list[list[float]]] = [[[]] * len(store.names) for store in self.stores]
        super().__init__(groups, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "rule" not in param_group:
            raise BadConfig("SparseOptimizer holds embedding tables; give dense parameters to another optimizer")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients gathered since the last step (``set_to_none`` makes no difference: none are stored)."""
        for store in self.stores:
            store.discard()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every touched row once; returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._refused():
            self.zero_grad()
            self.skipped_steps += 1
            return loss
        scale = getattr(self, "grad_scale", None)
        factor = 1.0 if scale is None else 1.0 / float(scale)
        groups = iter(self.param_groups)
        for store, hyper, filled in zip(self.stores, self._hyper, self._filled, strict=True):
            self._fill(store, hyper, filled, groups, factor)
        for store, hyper in zip(self.stores, self._hyper, strict=True):
            store.apply(hyper)
        return loss

    def _refused(self) -> bool:
        found_inf = getattr(self, "found_inf", None)
        found = found_inf is not None and float(found_inf) > 0
        asked = [store.agree_finite(found) for store in self.stores]  # each, since ranks wait for one another
        if any(asked):
            return True
        problem = next((store.problem for store in self.stores if store.problem is not None), None)
        if problem is not None and self.on_nonfinite == "raise":
            raise problem
        return problem is not None

    @staticmethod
    def _fill(
        store: Updatable,
        hyper: Tensor,
        filled: list[list[float]],
        groups: Iterator[dict[str, Any]],
        factor: float,
    ) -> None:
        """Write the hyper matrix; ``filled`` remembers which options each row was last made from."""
        matrix = hyper.numpy()
        for t, (rule, group) in enumerate(zip(store.rules, groups, strict=False)):
            options = [float(group[name]) for name in rule._columns]
            if filled[t] != options:
                row = [0.0] * HYPER
                rule.fill_hyper(row, group)
                matrix[t], filled[t] = row, options
        matrix[:, STEP] = store.steps
        matrix[:, STEP] += 1
        matrix[:, MULTIPLIER] = store.multipliers()
        matrix[:, MULTIPLIER] *= factor

    def state_dict(self) -> dict[str, Any]:
        """``param_groups`` as torch has them, and under ``state`` each table's step count and, for rules that have
        any, the rows' state as fp32 [rows, floats] copies (of a store on disk its generation holds them)."""
        state: dict[int, dict[str, Any]] = {}
        for store in self.stores:
            for t, rule in enumerate(store.rules):
                entry: dict[str, Any] = {"step": store.steps[t]}
                rows = store.read_state(t) if rule.state_floats(1) else None
                if rows is not None:
                    entry["rows"] = rows
                state[len(state)] = entry
        return {**super().state_dict(), "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave; other tables, rules or shapes: ``SchemaMismatch`` before any change."""
        saved = [(group["name"], group["rule"]) for group in state_dict["param_groups"]]
        declared = [(group["name"], group["rule"]) for group in self.param_groups]
        if saved != declared:
            raise SchemaMismatch("tables and rules of the optimizer", saved, declared)
        places = [(store, t) for store in self.stores for t in range(len(store.names))]
        entries = [state_dict["state"][index] for index in range(len(places))]
        for (store, t), entry in zip(places, entries, strict=True):
            store.check_state(t, entry.get("rows"))
        super().load_state_dict({**state_dict, "state": {}})
        for (store, t), entry in zip(places, entries, strict=True):
            store.steps[t] = int(entry["step"])
            if "rows" in entry:
                store.write_state(t, entry["rows"])

    def __getstate__(self) -> dict[str, Any]:
        raise NotSupported(
            "copying or pickling a SparseOptimizer: copy the model, make an optimizer of the copy, and give it "
            "state_dict() of this one"
        )
