"""Interrupted and uninterrupted runs end in equal bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from toy import ToyData, bits, trainer

from embcache.errors import SchemaMismatch
from embcache.statefile import equal_states
from embcache.train.optimizers import OptimizerConfig
from embcache.train.state import seed_all

HERE = Path(__file__).parent
ADAM = OptimizerConfig(dense_optimizer="adam", sparse_optimizer="adam", lr=0.01, warmup_steps=5, lr_schedule="cosine")


class Stop(Exception):
    pass


def interrupted(folder, after, **settings):
    """Train until ``after`` steps, die there without warning, and go on in a new trainer."""
    t = trainer(folder, **settings)
    step, done = t.train_step, [0]

    def dying(batch):
        if done[0] == after:
            raise Stop
        done[0] += 1
        return step(batch)

    t.train_step = dying
    with pytest.raises(Stop):
        t.fit()
    seed_all(999)  # a new process has other random numbers
    again = trainer(folder, **{**settings, "resume": True})
    again.fit()
    return again


@pytest.mark.parametrize(
    ("after", "opt"), [(0, ADAM), (5, OptimizerConfig(lr=0.05)), (8, ADAM), (16, ADAM), (23, OptimizerConfig(lr=0.05))]
)
def test_interrupted_anywhere_equals_uninterrupted(tmp_path, after, opt):
    settings = {"opt": opt, "dropout": 0.3, "checkpoint_every": 5, "eval_every": 8}
    whole = trainer(tmp_path / "a", valid=ToyData(2), **settings)
    whole.fit()
    again = interrupted(tmp_path / "b", after, valid=ToyData(2), **settings)
    a, b = bits(whole), bits(again)
    for part in a:
        assert equal_states(a[part], b[part]), part
    assert whole.progress.step == again.progress.step == 24


def test_resume_inside_micro_batches_and_early_stopping(tmp_path):
    values = [5.0, 3.0, 4.0, 4.0, 4.0]
    settings = {"valid": ToyData(2), "epochs": 9, "patience": 3, "micro_batches": 2, "checkpoint_every": 5}
    whole = trainer(tmp_path / "a", values=values, **settings)
    whole.fit()
    assert whole.progress.step == 40
    again = interrupted(tmp_path / "b", 7, values=values, **settings)
    assert equal_states(bits(whole), bits(again))


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path):
    trainer(tmp_path / "a", epochs=2).fit()
    longer = trainer(tmp_path / "a", epochs=3, resume=True)
    longer.fit()
    whole = trainer(tmp_path / "b", epochs=3)
    whole.fit()
    assert equal_states(bits(longer)["stores"], bits(whole)["stores"])
    assert equal_states(bits(longer)["model"], bits(whole)["model"])


def test_resume_of_a_finished_run_trains_nothing(tmp_path):
    first = trainer(tmp_path, epochs=2)
    first.fit()
    data = ToyData()
    again = trainer(tmp_path, epochs=2, resume=True, data=data)
    again.fit()
    assert data.given == []
    assert equal_states(bits(first)["model"], bits(again)["model"])


def test_the_best_weights_come_back(tmp_path):
    t = trainer(tmp_path, valid=ToyData(2), values=[2.0, 1.0, 3.0, 4.0], epochs=4)
    kept = {}

    def remember(original=t.save):
        if t.progress.step == 16:
            kept.update(model=bits(t)["model"], stores=bits(t)["stores"])
        original()

    t.save = remember
    t.fit()
    assert not equal_states(kept["stores"], bits(t)["stores"])
    t.restore("best")
    assert equal_states(kept["model"], bits(t)["model"])
    assert equal_states(kept["stores"], bits(t)["stores"])


def test_another_model_is_refused(tmp_path):
    trainer(tmp_path, epochs=1).fit()
    with pytest.raises(SchemaMismatch, match="Adam"):
        trainer(tmp_path, epochs=1, resume=True, opt=ADAM).fit()


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {here!r})
from toy import ToyData, trainer, bits
from embcache.train.optimizers import OptimizerConfig
from embcache.statefile import pack, write_json, write_tensors
from pathlib import Path

folder, die_at = Path(sys.argv[1]), int(sys.argv[2])
opt = OptimizerConfig(dense_optimizer="adamw", sparse_optimizer="rowwise_adagrad", lr=0.02, warmup_steps=3)
t = trainer(folder / "checkpoints", opt=opt, dropout=0.2, resume=True, checkpoint_every=4, valid=ToyData(2))
step, done = t.train_step, [0]

def counted(batch):
    if done[0] == die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    done[0] += 1
    return step(batch)

t.train_step = counted
t.fit()
plain, tensors = pack(bits(t))
write_json(folder, "end.json", plain)
write_tensors(folder, "end.safetensors", tensors)
"""


def run_program(folder, die_at):
    folder.mkdir(exist_ok=True)
    code = PROGRAM.format(here=str(HERE))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", code, str(folder), str(die_at)], env=env, check=False, timeout=100)


def test_killed_processes_end_in_the_bits_of_one_that_lived(tmp_path):
    assert run_program(tmp_path / "whole", -1).returncode == 0
    for die_at in (5, 9):
        assert run_program(tmp_path / "killed", die_at).returncode == -signal.SIGKILL
    assert run_program(tmp_path / "killed", -1).returncode == 0
    for name in ("end.json", "end.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
