"""Every training script runs end to end, learns, and ends with the promised lines."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import scripting
import torch
import yaml
from scripting import SCRIPTS, SMALL, load

import embcache as ec
from embcache.errors import BadConfig, CorruptStore, SchemaMismatch
from embcache.train.flags import parse, run

script, criteo_log = scripting.script, scripting.criteo_log  # fixtures

DLRM = ["--bottom-mlp", "16,8", "--top-mlp", "32"]


def check_run(out, last):
    """What every run leaves behind."""
    assert list(last) == ["loss", "auc", "ne", "logloss", "calibration"]
    assert json.loads((out / "result.json").read_text())["test"]["auc"] == pytest.approx(last["auc"], abs=1e-4)
    assert (out / "report.html").stat().st_size > 10_000
    assert (out / "history.jsonl").exists()
    assert yaml.safe_load((out / "config.yaml").read_text())["out"] == str(out)


def test_criteo_end_to_end(script, criteo_log, tmp_path):
    flags = ["--data", criteo_log, "--split", "last:0.1,0.2", "--lr", 0.05, "--eval-every", 10, "--epochs", 2]
    lines, last = script("train_criteo", *flags, *SMALL, *DLRM, "--out", tmp_path / "run")
    check_run(tmp_path / "run", last)
    assert last["auc"] > 0.72
    assert last["ne"] < 0.95
    assert lines[-5].startswith("loss ")
    assert lines[-4].startswith("test auc 0.")
    text = (tmp_path / "run" / "report.html").read_text()
    for words in ("rows touched", "C26", "Calibration", "embedding update", "waiting for data"):
        assert words in text


@pytest.mark.parametrize("model", ["dcnv2", "deepfm", "finalmlp"])
def test_every_model_learns(script, criteo_log, tmp_path, model):
    sizes = {"dcnv2": ["--deep-mlp", "32", "--cross-layers", 1], "deepfm": ["--deep-mlp", "32"]}
    sizes["finalmlp"] = ["--mlp1", "32", "--mlp2", "32"]
    flags = ["--data", criteo_log, "--model", model, "--lr", 0.05, "--split", "last:0,0.2", *sizes[model]]
    _, last = script("train_criteo", *flags, *SMALL, "--out", tmp_path / "run")
    assert last["auc"] > 0.65


@pytest.mark.parametrize(
    "flags",
    [
        "--dense-optimizer adam --dense-lr 0.003 --sparse-optimizer adam --sparse-lr 0.003 --clip-norm 1",
        "--micro-batches 4 --lr 0.05 --warmup-steps 5 --lr-schedule cosine --table-dtype bf16 --dense-dtype bf16",
        "--dense-optimizer adamw --dense-lr 0.003 --sparse-optimizer ftrl --sparse-lr 0.1 --dropout 0.1 --monitor ne",
    ],
)
def test_settings_reach_the_training(script, criteo_log, tmp_path, flags):
    _, last = script(
        "train_criteo",
        "--data",
        criteo_log,
        "--split",
        "last:0.1,0.2",
        *flags.split(),
        *SMALL,
        *DLRM,
        "--out",
        tmp_path,
    )
    check_run(tmp_path, last)
    assert last["auc"] > 0.6


def test_preprocessed_columns_are_used_again(script, criteo_log, tmp_path):
    common = [*SMALL, *DLRM, "--steps", 5]
    first = ["--data", criteo_log, "--columns", tmp_path / "columns"]
    _, a = script("train_criteo", *first, *common, "--out", tmp_path / "a")
    _, b = script("train_criteo", "--data", tmp_path / "columns", *common, "--out", tmp_path / "b")
    assert a == b


def test_a_preprocessed_folder_is_taken_as_it_is_or_refused(script, criteo_log, tmp_path):
    flags = [*SMALL, *DLRM, "--steps", 1]
    script("train_criteo", "--data", criteo_log, "--ids", "hash:50", *flags, "--out", tmp_path / "a")
    again = ["--data", tmp_path / "a" / "columns", *flags]
    script("train_criteo", *again, "--ids", "hash:50", "--split", "last:0.1,0.1", "--out", tmp_path / "b")
    wrong = [["--ids", "hash:51"], ["--split", "last:0,0.1"], ["--columns", "c"], ["--max-bad-rows", 1]]
    for given in wrong:
        with pytest.raises(BadConfig, match=f"{given[0]}"):
            script("train_criteo", *again, *given, "--out", tmp_path / "c")
    with pytest.raises(BadConfig, match="another schema than avazu"):
        script("train_avazu", *again, "--out", tmp_path / "c")
    with pytest.raises(BadConfig, match="stands alone"):
        script("train_criteo", *flags, "--data", f"{criteo_log},{tmp_path / 'a' / 'columns'}", "--out", tmp_path / "c")


def test_hashed_ids(script, criteo_log, tmp_path):
    _, last = script("train_criteo", "--data", criteo_log, "--ids", "hash:500", "--lr", 0.05, *SMALL, *DLRM,
                     "--out", tmp_path)  # fmt: skip
    assert last["auc"] > 0.6


def avazu_csv(path, rows=6000):
    """Avazu's columns; the site and the banner decide."""
    rng = np.random.default_rng(0)
    head = "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
    head += "device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
    lines = [head]
    for i in range(rows):
        site, banner = int(rng.integers(20)), int(rng.integers(3))
        click = int(rng.random() < 1 / (1 + np.exp(2.5 - 0.2 * site + banner)))
        ids = ",".join(f"{int(rng.integers(50)):08x}" for _ in range(8))
        numbers = ",".join(str(int(n)) for n in rng.integers(1, 20, 8))
        kinds = f"{rng.integers(3)},{rng.integers(3)}"
        hour = f"141021{i * 24 // rows:02d}"
        lines.append(f"{i},{click},{hour},1005,{banner},{site:08x},{ids},{kinds},{numbers}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_avazu_end_to_end(script, tmp_path):
    data = avazu_csv(tmp_path / "train.csv")
    flags = ["--data", data, "--split", "random:0.1,0.2,1", "--lr", 0.1, "--epochs", 2]
    _, last = script("train_avazu", *flags, *SMALL, *DLRM, "--out", tmp_path / "run")
    check_run(tmp_path / "run", last)
    assert last["auc"] > 0.7


def test_own_table_end_to_end(script, tmp_path):
    rng = np.random.default_rng(0)
    user, price = rng.integers(0, 30, 4000), rng.random(4000)
    clicked = rng.random(4000) < 1 / (1 + np.exp(1.5 - 0.1 * user + price))
    rows = "\n".join(f"{int(c)},{p:.3f},u{u}" for c, p, u in zip(clicked, price, user, strict=True))
    (tmp_path / "clicks.csv").write_text("clicked,price,user\n" + rows + "\n")
    (tmp_path / "clicks.yaml").write_text(
        "label: {column: clicked}\ndense: [{column: price}]\n"
        'categorical: [{column: user, encoding: string}]\ndelimiter: ","\nheader: true\n'
    )
    flags = ["--data", tmp_path / "clicks.csv", "--schema", tmp_path / "clicks.yaml", "--split", "random:0,0.25,1"]
    _, last = script("train_table", *flags, "--lr", 0.1, "--epochs", 3, *SMALL, *DLRM, "--out", tmp_path / "run")
    check_run(tmp_path / "run", last)
    assert last["auc"] > 0.65


CACHED = ["--tiers", "ram,lmdb", "--cache-rows", "60"]


def test_rows_on_disk_train_to_the_same_bits(script, criteo_log, tmp_path):
    flags = ["--data", criteo_log, "--columns", tmp_path / "columns", "--ids", "hash:500", "--split", "last:0.1,0.2"]
    flags += [*SMALL, "--model", "deepfm", "--deep-mlp", "16", "--lr", 0.05, "--eval-every", 10]
    _, plain = script("train_criteo", *flags, "--out", tmp_path / "plain")
    lines, cached = script("train_criteo", *flags, *CACHED, "--out", tmp_path / "run", "--store", tmp_path / "rows")
    assert cached == plain
    check_run(tmp_path / "run", cached)
    assert any(re.match(r"store [\d,]+ rows touched, [\d,]+ bytes on disk, [\d,]+ samples/s$", line) for line in lines)
    assert (tmp_path / "rows" / "manifest.json").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()
    text = (tmp_path / "run" / "report.html").read_text()
    for words in ("Cache and disk", "Hit rate", "Megabytes a step below the cache", "miss read"):
        assert words in text
    assert "Cache and disk" not in (tmp_path / "plain" / "report.html").read_text()
    with pytest.raises(FileExistsError, match="give another --store"):
        script("train_criteo", *flags, *CACHED, "--out", tmp_path / "run", "--store", tmp_path / "rows")


def test_raw_ids_in_unbounded_tables(script, criteo_log, tmp_path):
    """No vocabulary pass, any int64 is an id: in memory, over a cache, resumed under another: the same bits."""
    flags = ["--data", criteo_log, "--columns", tmp_path / "columns", "--ids", "raw", "--split", "last:0.1,0.2"]
    flags += [*SMALL, *DLRM, "--lr", 0.05]
    _, plain = script("train_criteo", *flags, "--out", tmp_path / "plain")
    assert plain["auc"] > 0.65
    part = tmp_path / "part"
    script("train_criteo", *flags, *CACHED, "--out", part, "--steps", 9, "--test-weights", "last")
    other = ["--tiers", "ram,lmdb", "--cache-bytes", "300KiB", "--policy", "lru", "--depth", "0", "--resume"]
    _, resumed = script("train_criteo", *flags, *other, "--out", part)
    assert resumed == plain
    assert "unbounded" in (part / "report.html").read_text()


def test_a_trillion_parameters(script, tmp_path):
    flags = ["--rows", "8_000_000_000", "--dim", "128", "--samples", 20_000, "--steps", 4, "--lr", 0.05]
    small = [f for f in SMALL if f not in ("--dim", "8")]
    flags += [*small, "--bottom-mlp", "16,128", "--top-mlp", "32", "--tiers", "ram,lmdb", "--cache-bytes", "16MiB"]
    lines, last = script("train_synthetic", *flags, "--out", tmp_path)
    check_run(tmp_path, last)
    touched = int(next(line for line in lines if line.startswith("store ")).split()[1].replace(",", ""))
    assert 4 * 512 < touched < 4 * 512 * 26
    assert "1.02 T" in (tmp_path / "report.html").read_text()


def test_synthetic_end_to_end(script, tmp_path):
    flags = ["--samples", 30_000, "--rows", 1300, "--n-dense", 4, "--alpha", 1.2, "--lr", 0.05]
    lines, last = script("train_synthetic", *flags, *SMALL, *DLRM, "--out", tmp_path / "run")
    check_run(tmp_path / "run", last)
    best = float(next(line for line in lines if line.startswith("best possible auc")).split()[3].rstrip(","))
    assert 0.6 < last["auc"] < best


def test_demo_end_to_end(script, tmp_path):
    flags = ["--out", tmp_path / "demo", "--threads", 1]
    lines, last = script("demo", "--rows", 80_000, *flags)
    assert last["auc"] > 0.7
    assert any("of the way from a coin to the best" in line for line in lines)
    assert any(str(tmp_path / "demo" / "report.html") in line for line in lines)
    assert "best possible" in (tmp_path / "demo" / "report.html").read_text()
    _, other = script("demo", "--rows", 41_000, *flags)  # the folder may be used again
    assert other != last


# resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", [[], CACHED], ids=["in memory", "on disk"])
def test_a_killed_run_resumes_to_the_same_end(script, criteo_log, tmp_path, tiers):
    flags = ["--data", criteo_log, "--columns", tmp_path / "columns", "--split", "last:0.1,0.2", "--lr", 0.05]
    flags += [*SMALL, *DLRM, "--epochs", 2, "--checkpoint-every", 9, "--eval-every", 20, "--dropout", 0.1]
    flags += tiers
    _, whole = script("train_criteo", *flags, "--out", tmp_path / "whole")

    out = tmp_path / "killed"
    command = [sys.executable, SCRIPTS / "train_criteo.py", *flags, "--out", out]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([str(c) for c in command], env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 400  # a first use may compile kernels
    saved = "store" if tiers else "checkpoints"
    while not (out / saved / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    assert process.wait(timeout=30) in (-signal.SIGKILL, 0)
    assert (out / saved / "manifest.json").exists()

    _, resumed = script("train_criteo", *flags, "--out", out, "--resume")
    assert resumed == whole
    a, b = ((tmp_path / name / "result.json").read_text() for name in ("whole", "killed"))
    assert a == b
    if tiers:
        rows = [blocks_of(tmp_path / name / saved) for name in ("whole", "killed")]
        assert all(torch.equal(x, y) for x, y in zip(*rows, strict=True))
    states = [sorted((tmp_path / n / saved).glob("generation-*"))[-1] for n in ("whole", "killed")]
    files = sorted(p.name for p in states[0].glob("*.safetensors"))
    assert files == sorted(p.name for p in states[1].glob("*.safetensors"))
    assert all((states[0] / f).read_bytes() == (states[1] / f).read_bytes() for f in files)


def blocks_of(folder):
    """Ids, weights and state of everything in a store on disk."""
    with ec.EmbeddingStore.open(folder, readonly=True) as store:
        return [tensor for name in store.names for block in store.written_rows(name, 1 << 20) for tensor in block]


def test_an_existing_run_is_not_overwritten(script, criteo_log, tmp_path):
    flags = ["--data", criteo_log, *SMALL, *DLRM, "--steps", 2, "--out", tmp_path / "run"]
    script("train_criteo", *flags)
    with pytest.raises(FileExistsError, match=r"already holds a run: go on with it \(--resume\)"):
        script("train_criteo", *flags)
    with pytest.raises(SchemaMismatch, match=r"saved {'lr': 0.01}, declared {'lr': 0.5}"):
        script("train_criteo", *flags, "--resume", "--lr", 0.5)
    saved = tmp_path / "run" / "config.yaml"
    good = saved.read_bytes()
    for torn in (b"", b"{", b"\xff", b"[1]"):
        saved.write_bytes(torn)
        with pytest.raises(CorruptStore, match=r"config.yaml is not the configuration of a run"):
            script("train_criteo", *flags, "--resume")
        assert saved.read_bytes() == torn
    saved.write_bytes(good)
    script("train_criteo", *flags, "--resume", "--steps", 4)


def test_a_run_has_one_place_for_its_checkpoints(script, criteo_log, tmp_path):
    """Other tiers or another --store neither begin a second run in the folder nor resume from nothing."""
    flags = ["--data", criteo_log, "--columns", tmp_path / "columns", *SMALL, *DLRM, "--steps", 2]
    script("train_criteo", *flags, "--out", tmp_path / "ram")
    script("train_criteo", *flags, "--out", tmp_path / "disk", *CACHED)
    for out, other in (("ram", CACHED), ("disk", []), ("disk", [*CACHED, "--store", tmp_path / "elsewhere"])):
        files = sorted(p for p in (tmp_path / out).rglob("*"))
        config = (tmp_path / out / "config.yaml").read_bytes()
        place = tmp_path / out / ("checkpoints" if out == "ram" else "store")
        with pytest.raises(FileExistsError, match=f"{out} already holds a run, with its checkpoints in {place}: go on"):
            script("train_criteo", *flags, "--out", tmp_path / out, *other)
        with pytest.raises(FileNotFoundError, match=f"--resume: the run in .*{out} has its checkpoints in {place}"):
            script("train_criteo", *flags, "--out", tmp_path / out, *other, "--resume")
        assert (tmp_path / out / "config.yaml").read_bytes() == config
        assert sorted(p for p in (tmp_path / out).rglob("*")) == files
    assert not (tmp_path / "elsewhere").exists()


def test_a_resumed_run_finds_its_store_where_it_was_moved(script, criteo_log, tmp_path):
    flags = ["--data", criteo_log, "--columns", tmp_path / "columns", *SMALL, *DLRM, "--split", "last:0,0.2"]
    _, whole = script("train_criteo", *flags, "--steps", 6, "--out", tmp_path / "whole", *CACHED)
    out = tmp_path / "moved"
    script("train_criteo", *flags, "--steps", 2, "--out", out, *CACHED, "--store", tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    with pytest.raises(FileNotFoundError, match=r"has its checkpoints in .*one, not in .*three"):
        script("train_criteo", *flags, "--steps", 6, "--out", out, *CACHED, "--store", tmp_path / "three", "--resume")
    other = ["--tiers", "ram,ram,lmdb", "--cache-rows", "9,40", "--store", tmp_path / "two"]
    script("train_criteo", *flags, "--steps", 4, "--out", out, *other, "--resume")
    _, resumed = script("train_criteo", *flags, "--steps", 6, "--out", out, *CACHED, *other[-2:], "--resume")
    assert {**resumed, "loss": 0} == {**whole, "loss": 0}  # the loss is of the steps since it was last noted
    rows = [blocks_of(tmp_path / name) for name in ("whole/store", "two")]
    assert all(torch.equal(x, y) for x, y in zip(*rows, strict=True))


# messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("train_criteo", "", "the following arguments are required: --data"),
        ("train_criteo", "--data x --cross-layers 3", "--cross-layers is no option of dlrm"),
        ("train_criteo", "--data x --model gpt", "invalid choice: 'gpt'"),
        ("train_criteo", "--data x --split sometimes", "split 'sometimes'"),
        ("train_criteo", "--data x --ids words", "ids 'words'"),
        ("train_criteo", "--data x --micro-batches 0", "--micro-batches must be at least 1"),
        ("train_criteo", "--data x --device toaster", "--device toaster: "),
        ("train_criteo", "--data x --device meta", "--device meta: there is no such device here"),
        ("train_criteo", "--data x --threads 100000", "--threads 100000: at most 1024"),
        ("train_criteo", "--data x --steps inf", "argument --steps: invalid int value: 'inf'"),
        ("train_criteo", "--data x --workers 0", "--workers must be at least 1, got 0"),
        ("train_synthetic", "--eval-batch-size 0", "--eval-batch-size must be at least 1, got 0"),
        ("train_criteo", "--data x --max-bad-rows -1", "--max-bad-rows must not be negative, got -1"),
        ("train_criteo", "--data x --balance lpt", "unrecognized arguments: --balance lpt"),
        ("train_criteo", "--data x --tiers lmdb", "--tiers lmdb: rows train in memory, so a cache stands over lmdb"),
        ("train_avazu", "--data x --tiers ram,lmdb", "--tiers ram,lmdb needs --cache-rows or --cache-bytes"),
        ("train_table", "--data x", "the following arguments are required: --schema"),
        ("train_synthetic", "--rows 3", "--rows 3: at least 3 for each of the 26 tables"),
    ],
)
def test_bad_flags(name, flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(load(name).Config, flags.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("train_criteo", "--data absent.tsv", "absent.tsv"),
        ("train_criteo", "--data bad.tsv", "bad.tsv, line 1"),
        ("train_table", "--data bad.tsv --schema absent.yaml", "absent.yaml"),
        ("train_table", "--data bad.tsv --schema bad.tsv", "bad.tsv: while scanning"),
        ("train_criteo", "--data .", "Is a directory"),
        ("train_criteo", "--data bad.tsv --max-bad-rows 1", "no rows to train on: the data has none"),
        ("train_criteo", "--data bad.tsv --split time:1,1", "the schema has no time column"),
        ("train_synthetic", "--samples 900 --dropout 2 --rows 100", "dropout must lie in [0, 1), got 2.0"),
        ("train_synthetic", "--samples 900 --dense-weight-decay -1 --rows 100", "Invalid weight_decay value: -1.0"),
        ("train_synthetic", "--samples 900 --valid 0.5 --test 0.5 --rows 100", "the data has valid 450, test 450"),
    ],
)
def test_mistakes_end_in_one_line(name, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.tsv").write_text("1\tx\n")
    module = load(name)
    monkeypatch.setattr(sys, "argv", [name, *flags.split(), "--out", "run"])
    with pytest.raises(SystemExit) as stop:
        run(module.main, module.Config)
    assert str(stop.value.code).startswith("error: ")
    assert message in str(stop.value.code)


@pytest.mark.parametrize("name", ["train_criteo", "train_avazu", "train_table", "train_synthetic", "demo"])
def test_help_explains_and_promises_nothing_that_is_not_there(name, capsys):
    module = load(name)
    with pytest.raises(SystemExit) as stop:
        parse(module.Config, ["--help"], module.__doc__)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--out" in text
    assert "--seed" in text
    for later in ("--balance", "--dense-wire"):
        assert later not in text
