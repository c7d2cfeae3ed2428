"""What is shown and written while a run goes."""

import io
import json
import math

import pytest

from embcache.train.observe import Console, History, Stopwatch, TensorBoard, read_history
from embcache.train.task import Progress

TRAIN = {"step": 4, "kind": "train", "loss": 0.5, "samples_per_second": 1234.0, "lr": 0.1}
EVAL = {"step": 4, "kind": "eval", "auc": 0.75, "ne": 0.9, "logloss": 0.4}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(stream):
    console = Console(stream)
    console.begin(Progress(step=2), 8)
    for _ in range(2):
        console.step(Progress())
    console.point(TRAIN)
    console.point(EVAL)
    console.message("a message")
    console.end()
    return stream.getvalue()


def test_without_a_terminal_lines_are_printed():
    assert show(io.StringIO()).splitlines() == [
        "step 4/8  samples/s 1,234  loss 0.5000",
        "step 4/8  samples/s 1,234  loss 0.5000  auc 0.7500  ne 0.9000  (evaluated)",
        "a message",
    ]


def test_on_a_terminal_there_is_a_bar():
    text = show(Terminal())
    assert "4/8" in text
    assert "loss=0.5000" in text
    assert "auc=0.7500" in text
    assert "a message\n" in text


def test_history_is_cut_back_to_the_step_of_a_resume(tmp_path):
    path = tmp_path / "history.jsonl"
    first = History(path)
    first.begin(Progress(), 8)
    for step in (1, 2, 3):
        first.point({"step": step, "kind": "train", "loss": math.nan if step == 2 else 0.5})
    first.end()
    path.write_text(path.read_text() + '{"step": 4, "ki')  # torn by a crash
    again = History(path)
    again.begin(Progress(step=2), 8)
    again.point({"step": 3, "kind": "train", "loss": 0.25})
    again.end()
    points = read_history(path)
    assert [(p["step"], p["loss"]) for p in points if p["step"] != 2] == [(1, 0.5), (3, 0.25)]
    assert math.isnan(points[1]["loss"])
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_lines_that_are_no_points_are_left_out(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text('[3]\n{"other": 1}\nnull\n' + json.dumps(TRAIN) + '\n{"step": 5, "ki')
    assert read_history(path) == [TRAIN]


def test_tensorboard_scalars_can_be_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.begin(Progress(), 8)
    board.point(TRAIN)
    board.point(EVAL)
    board.end()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {"train/loss", "train/lr", "eval/auc"} <= set(events.Tags()["scalars"])
    assert events.Scalars("eval/auc")[0].value == pytest.approx(0.75)
    assert events.Scalars("eval/auc")[0].step == 4


def test_stopwatch_adds_up_by_stage():
    seconds = {"a": 1.0}
    watch = Stopwatch(seconds)
    with watch("a"):
        pass
    with pytest.raises(ZeroDivisionError), watch("b"):
        _ = 1 / 0
    assert seconds["a"] > 1.0
    assert seconds["b"] >= 0.0
