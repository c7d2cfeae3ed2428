"""Dataclasses as flags: types, defaults, groups, messages, and the way through config.yaml."""

import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from embcache.train.flags import flag, flatten, load_yaml, parse, run, save_yaml


@dataclass(frozen=True)
class Inner:
    """Optimizer."""

    lr: float = flag(0.1, "learning rate, 100% of the time")
    rule: Literal["sgd", "adam"] = flag("adam", "which rule")

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"--lr must be positive, got {self.lr}")


@dataclass(frozen=True)
class Run:
    """A run."""

    data: Path = flag(help="where the data is")
    steps: int | None = flag(None, "stop here")
    sizes: tuple[int, ...] = flag((64, 32), "widths")
    compile: bool = flag(False, "compile the model")
    quiet: bool = flag(True, "print less")
    inner: Inner = field(default_factory=Inner)


def test_defaults_and_values():
    run = parse(Run, ["--data", "x"])
    assert run == Run(Path("x"))
    argv = "--data x --steps 1e3 --sizes 8,4e0 --compile --no-quiet --lr 1e-3 --rule sgd"
    run = parse(Run, argv.split())
    assert run == Run(Path("x"), 1000, (8, 4), True, False, Inner(1e-3, "sgd"))
    assert parse(Run, ["--data", "x", "--steps", "8_000_000_000"]).steps == 8_000_000_000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: --data"),
        (["--data", "x", "--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--data", "x", "--lr", "-1"], "--lr must be positive, got -1.0"),
        (["--data", "x", "--steps", "1.5"], "argument --steps: invalid int value: '1.5'"),
        (["--data", "x", "--sizes", "8,b"], "argument --sizes: invalid comma-separated int value: '8,b'"),
        (["--data", "x", "--rule", "lion"], "argument --rule: invalid choice: 'lion'"),
        (["--data", "x", "--step", "3"], "unrecognized arguments: --step 3"),
        (["--data", "x", "--config", "absent.yaml"], "absent.yaml"),
    ],
)
def test_bad_flags_say_what_is_wrong(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(Run, argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_help_shows_groups_words_and_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(Run, ["--help"], "What it does.")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    words = ("What it does.", "Optimizer", "learning rate, 100% of the time (0.1)", "{sgd,adam}", "--no-quiet")
    for word in (*words, "(64,32)"):
        assert word in text


def test_yaml_round_trip_and_overrides(tmp_path):
    run = Run(Path("x"), None, (8,), True, False, Inner(1e-8, "sgd"))
    save_yaml(run, tmp_path / "config.yaml")
    assert load_yaml(Run, tmp_path / "config.yaml") == run
    assert parse(Run, ["--config", str(tmp_path / "config.yaml")]) == run
    again = parse(Run, ["--config", str(tmp_path / "config.yaml"), "--lr", "2", "--quiet"])
    assert again == Run(Path("x"), None, (8,), True, True, Inner(2.0, "sgd"))
    assert flatten(run)["data"] == "x"
    assert "compile: true" in (tmp_path / "config.yaml").read_text()


def test_yaml_written_by_hand(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("data: d\nlr: 1e-8\n")
    assert load_yaml(Run, path).inner.lr == 1e-8
    for text, message in (
        ("data: d\nspeed: 3\n", "unknown speed"),
        ("data: d\nsteps: many\n", "steps = 'many', expected int"),
        ("data: d\ncompile: 1\n", "compile = 1, expected bool"),
        ("data: d\nrule: lion\n", "rule = 'lion'"),
        ("- data\n", "expected a mapping"),
        ("lr: 1.0\n", "missing data"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_yaml(Run, path)


def test_yaml_cannot_run_code(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("data: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(Exception, match="python/object"):
        load_yaml(Run, path)


def test_a_warning_is_a_line_of_words(capsys, monkeypatch):
    """Of a script; what other libraries warn programmers of says where, and formats come back."""
    monkeypatch.setattr(sys, "argv", ["run", "--data", "x"])
    before = warnings.formatwarning

    def main(config):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            shown = warnings.formatwarning
            monkeypatch.setattr(warnings, "showwarning", lambda *args: sys.stderr.write(shown(*args[:4])))
            warnings.warn("the cache holds 9 rows", stacklevel=1)
            warnings.warn("use other", DeprecationWarning, stacklevel=1)

    run(main, Run)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "warning: the cache holds 9 rows"
    assert second.endswith(": DeprecationWarning: use other")
    assert "test_flags.py:" in second
    assert warnings.formatwarning is before
