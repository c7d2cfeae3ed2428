"""Click-through prediction as a task: its sums, its micro-batches, its metrics."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import embcache as ec
from dlrm.data import ClickBatch
from dlrm.models import build
from dlrm.task import ClickTask, split_batch
from embcache.train.metrics import auc, log_loss, normalized_entropy


def make_batch(samples, seed=0, weighted=False):
    """Feature a: one id a sample; feature b: bags of 0 to 3 ids."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.cat([torch.ones(samples, dtype=torch.int64), torch.randint(0, 4, (samples,), generator=g)])
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=g)
    weights = torch.rand(len(values), generator=g) if weighted else None
    sparse = ec.KeyedJaggedTensor(["a", "b"], values, weights, lengths=lengths)
    return ClickBatch(torch.randn(samples, 3, generator=g), sparse, (torch.rand(samples, generator=g) < 0.4).float())


def make_task(dense_dtype="fp32", **settings):
    torch.manual_seed(0)
    tables = [ec.TableConfig(n, 20, 4, features=[n], optimizer=ec.optim.SGD(lr=0.1)) for n in "ab"]
    model = build("dlrm", tables, 3, bottom_mlp=(8, 4), top_mlp=(8,), dense_dtype=dense_dtype)
    return ClickTask(model, **settings)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("samples", "parts"), [(10, 3), (3, 5), (1, 1), (0, 2)])
def test_micro_batches_hold_every_sample_once(samples, parts, weighted):
    batch = make_batch(samples, weighted=weighted)
    pieces = split_batch(batch, parts)
    assert len(pieces) == parts
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    assert torch.equal(torch.cat([p.dense for p in pieces]), batch.dense)
    assert torch.equal(torch.cat([p.labels for p in pieces]), batch.labels)
    for key in ("a", "b"):
        whole, parted = batch.sparse[key], [p.sparse[key] for p in pieces]
        assert torch.equal(torch.cat([p.values() for p in parted]), whole.values())
        assert torch.equal(torch.cat([p.lengths() for p in parted]), whole.lengths())
        if weighted:
            assert torch.equal(torch.cat([p.weights() for p in parted]), whole.weights())


def test_loss_is_a_sum_that_parts_add_up_to():
    task, batch = make_task(), make_batch(12)
    logits = task.model(batch.dense, batch.sparse)
    whole = task.loss(batch)
    assert torch.equal(whole, binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum"))
    parts = sum(float(task.loss(p).detach()) for p in split_batch(batch, 4))
    assert parts == pytest.approx(float(whole.detach()), rel=1e-6)
    assert task.count(batch) == task.samples(batch) == 12


def test_lookups_are_counted_by_feature():
    task, batch = make_task(), make_batch(12)
    for part in split_batch(batch, 5):
        task.loss(part)
    assert task.counters == {"a": 12, "b": int(batch.sparse["b"].lengths().sum())}
    task.loss(make_batch(0))
    assert task.counters["a"] == 12


def test_evaluation_equals_the_metrics_of_all_logits_and_writes_nothing():
    task, batches = make_task(), [make_batch(40, seed) for seed in range(3)]
    task.model.eval()
    stores = [m.store for m in task.model.modules() if hasattr(m, "store")]
    before = [s.state_dict() for s in stores]
    with torch.inference_mode():
        result = task.evaluate(batches)
        logits = torch.cat([task.model(b.dense, b.sparse) for b in batches])
    labels = torch.cat([b.labels for b in batches])
    assert result.metrics["auc"] == pytest.approx(auc(labels, logits), abs=1e-12)
    assert result.metrics["ne"] == pytest.approx(normalized_entropy(labels, logits), abs=1e-12)
    assert result.metrics["logloss"] == pytest.approx(log_loss(labels, logits), abs=1e-12)
    assert sum(weight for weight, _, _ in result.calibration) == 120
    for store, saved in zip(stores, before, strict=True):
        assert all(torch.equal(saved[k], v) for k, v in store.state_dict().items())
    assert task.counters == {}


def test_bf16_stays_near_fp32():
    batch = make_batch(64)
    losses = [float(make_task(dtype).loss(batch).detach()) for dtype in ("fp32", "bf16")]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_unknown_metric_is_refused():
    with pytest.raises(ValueError, match="monitor must be auc, ne or logloss"):
        make_task(monitor="accuracy")
    assert make_task(monitor="ne").higher_is_better is False
