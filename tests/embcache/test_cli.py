"""The commands of ``python -m embcache``."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.checkpoint import Checkpoints
from embcache.cli import main
from embcache.tiers import Lmdb, Ram


def tables():
    return [
        ec.TableConfig("user", None, 4, optimizer=ec.optim.Adagrad()),
        ec.TableConfig("item", 1000, 2, dtype=torch.bfloat16),
    ]


def fill(store, low, high):
    ids = torch.arange(low, high)
    store.load_rows("user", ids * 2**40, torch.arange(4.0).repeat(len(ids), 1) + ids[:, None])
    store.load_rows("item", ids, torch.ones(len(ids), 2))


@pytest.fixture
def store(tmp_path):
    """A folder with two generations: 300 rows of each table in the last one."""
    path = tmp_path / "store"
    with ec.EmbeddingStore(tables(), [Ram(rows=64), Lmdb(path)]) as made:
        fill(made, 0, 100)
        made.commit({"dense": torch.ones(2)}, notes={"step": 1})
        fill(made, 100, 300)
        made.delete("user", torch.tensor([0]))
        made.commit({"dense": torch.ones(2) * 2}, notes={"step": 2}, keep="best")
    return path


def rows(path):
    with ec.EmbeddingStore.open(path, readonly=True, rows=64) as opened:
        return [
            {
                int(i): bytes(row.numpy())
                for ids, block in opened.raw_rows(t, 64)
                for i, row in zip(ids, block, strict=True)
            }
            for t in range(len(opened.tables))
        ]


@pytest.fixture
def run(capsys):
    """``run(*arguments) -> (exit status, lines out, lines of errors)``."""

    def call(*arguments):
        status = main([str(a) for a in arguments])
        said = capsys.readouterr()
        return status, said.out.splitlines(), said.err.splitlines()

    return call


# info and verify -------------------------------------------------------------------------------------------------


def test_info_of_a_store(store, run):
    status, out, err = run("info", store)
    assert (status, err) == (0, [])
    text = "\n".join(out)
    assert 'generation     1  {"step": 1}' in out
    assert 'generation     2 (best)  {"step": 2}' in out
    assert out[-3].split() == ["table", "ids", "dim", "dtype", "optimizer", "row_bytes", "step", "rows"]
    assert out[-2].split() == ["user", "any", "int64", "4", "float32", "Adagrad", "32", "0", "299"]
    assert out[-1].split() == ["item", "1,000", "2", "bfloat16", "SGD", "4", "0", "300"]
    assert "base_bytes     " in text


def test_info_as_json(store, run):
    status, out, _ = run("info", store, "--json")
    found = json.loads("\n".join(out))
    assert status == 0
    assert [g["number"] for g in found["generation"]] == [1, 2]
    assert [(t["table"], t["ids"], t["rows"]) for t in found["tables"]] == [("user", None, 299), ("item", 1000, 300)]


def test_info_and_verify_of_checkpoints_without_a_store(tmp_path, run):
    saved = Checkpoints(tmp_path)
    saved.save({"weight": torch.ones(2)}, notes={"step": 7})
    status, out, _ = run("info", tmp_path)
    assert status == 0
    assert 'generation     1  {"step": 7}' in out
    assert run("verify", tmp_path) == (0, [f"{tmp_path}: intact"], [])
    path = tmp_path / "generation-00000001" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    status, out, _ = run("verify", tmp_path)
    assert (status, out[-1]) == (1, f"{tmp_path}: 1 problems")
    assert "state.safetensors" in out[0]


def test_verify_finds_damage(store, run):
    assert run("verify", store) == (0, [f"{store}: intact"], [])
    segment = max((store / "segments").iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    status, out, err = run("verify", store)
    assert status == 1
    assert segment.name in "\n".join(out + err)


def test_verify_and_info_beside_a_writer(store, run):
    with ec.EmbeddingStore.open(store, rows=64) as writer:
        fill(writer, 300, 400)
        assert run("verify", store)[0] == 0
        assert run("info", store)[0] == 0
        writer.commit()


def test_verify_of_an_export(store, tmp_path, run):
    run("export", store, tmp_path / "x")
    assert run("verify", tmp_path / "x") == (0, [f"{tmp_path / 'x'}: intact"], [])
    file = next((tmp_path / "x" / "table-0000").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    status, out, _ = run("verify", tmp_path / "x")
    assert status == 1
    assert file.name in out[0]


# export, import, compact -----------------------------------------------------------------------------------------


def test_export_and_import_into_a_new_store(store, tmp_path, run):
    status, out, _ = run("export", store, tmp_path / "x", "--buckets", 8)
    assert status == 0
    assert out[0].startswith(f"{tmp_path / 'x'}: full export of generation 2 of ")
    assert out[0].endswith(": 599 rows")
    status, out, _ = run("info", tmp_path / "x")
    assert (status, out[1].split()) == (0, ["kind", "full"])
    status, out, _ = run("import", tmp_path / "copy", tmp_path / "x")
    assert status == 0
    assert out[0].endswith("committed as generation 1")
    assert rows(tmp_path / "copy") == rows(store)
    assert run("verify", tmp_path / "copy")[0] == 0


def test_deltas_follow(store, tmp_path, run):
    assert run("export", store, tmp_path / "1", "--generation", 1)[0] == 0
    status, out, _ = run("export", store, tmp_path / "2", "--since", tmp_path / "1")
    assert status == 0
    assert ": 400 rows, 1 deleted ids, since generation 1 of " in out[0]
    assert run("export", store, tmp_path / "2b", "--since", 1)[0] == 0
    status, _, err = run("import", tmp_path / "copy", tmp_path / "2")
    assert (status, len(err)) == (1, 1)
    assert err[0].startswith("WrongParent: ")
    assert run("import", tmp_path / "copy", tmp_path / "1", tmp_path / "2")[0] == 0
    assert rows(tmp_path / "copy") == rows(store)
    with ec.EmbeddingStore.open(store, rows=64) as writer:
        fill(writer, 300, 301)
        writer.commit()
    assert run("export", store, tmp_path / "3", "--since", tmp_path / "2")[0] == 0
    assert run("import", tmp_path / "copy", tmp_path / "3")[0] == 0
    assert rows(tmp_path / "copy") == rows(store)


def test_one_table_out_and_in(store, tmp_path, run):
    assert run("export", store, tmp_path / "item.npy", "--table", "item")[0] == 0
    assert np.load(tmp_path / "item.npy").shape == (1000, 2)
    status, out, _ = run("export", store, tmp_path / "user.parquet", "--table", "user", "--state")
    assert (status, out) == (0, [f"{tmp_path / 'user.parquet'}: 299 rows of table 'user', generation 2"])
    np.save(tmp_path / "new.npy", np.full((2, 4), 7.0))
    np.save(tmp_path / "keys.npy", np.array([-1, 2**40]))
    status, out, _ = run("import", store, tmp_path / "new.npy", "--table", "user", "--ids", tmp_path / "keys.npy")
    assert status == 0
    assert out[0].endswith("2 rows of table 'user', committed as generation 3")
    with ec.EmbeddingStore.open(store, readonly=True, rows=64) as opened:
        assert opened.read_rows("user", torch.tensor([-1, 2**40]))[0].tolist() == [[7.0] * 4] * 2
        assert torch.equal(opened.restore("latest")["dense"], torch.ones(2) * 2)  # goes on
        assert opened.checkpoints.latest.notes == {"step": 2}


def test_compact(store, run):
    before = rows(store)
    status, out, _ = run("compact", store)
    assert status == 0
    assert " before, " in out[0]
    assert rows(store) == before
    assert run("verify", store)[0] == 0


def test_compact_removes_what_has_expired_and_keeps_the_rest_of_the_generation(tmp_path, run):
    table = ec.TableConfig("a", None, 2, optimizer=ec.optim.SGD(lr=0.5), expiry=ec.Expiry(idle=2, every=1))
    with ec.EmbeddingStore([table], [ec.tiers.Ram(rows=2), ec.tiers.Lmdb(tmp_path)]) as made:
        for step in range(8):
            batch = ec.KeyedJaggedTensor(["a"], torch.tensor([10 * step, 7]), lengths=torch.tensor([2]))
            with made.stage(batch, training=True) as handle:
                made.update(handle, {"a": torch.ones(1, 2)})
            made.step()
        made.commit({"dense": torch.ones(3)}, {"step": 8}, keep="best")
        physical = made.front.below[-1].count(0)
    before = rows(tmp_path)
    assert run("compact", tmp_path)[0] == 0
    assert rows(tmp_path) == before
    with ec.EmbeddingStore.open(tmp_path, rows=2) as again:
        assert again.front.below[-1].count(0) == again.count_written("a") < physical
        assert torch.equal(again.restore("best")["dense"], torch.ones(3))
        assert again.checkpoints.latest.notes == {"step": 8}


# what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["verify", "info", "export", "import", "compact"])
def test_a_folder_that_holds_nothing(tmp_path, run, command):
    more = [tmp_path / "x"] if command in ("export", "import") else []
    status, out, err = run(command, tmp_path / "nothing", *more)
    assert (status, out, len(err)) == (1, [], 1)
    assert err[0].startswith("FileNotFoundError: ")
    assert not (tmp_path / "nothing").exists()


def test_a_foreign_manifest(tmp_path, run):
    (tmp_path / "manifest.json").write_text('{"name": "an app"}')
    status, _, err = run("info", tmp_path)
    assert (status, len(err)) == (1, 1)
    assert err[0].startswith("CorruptStore: ")


def test_a_store_that_another_process_writes(store, run, tmp_path):
    code = (
        "import sys, embcache as ec\n"
        f"with ec.EmbeddingStore.open({str(store)!r}, rows=64):\n"
        "    print('ready', flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"ready\n"
        status, _, err = run("compact", store)
        assert (status, len(err)) == (1, 1)
        assert err[0].startswith("StoreLocked: ")
        assert str(other.pid) in err[0]
        assert run("export", store, tmp_path / "x")[0] == 0
    finally:
        other.communicate()


@pytest.mark.parametrize(
    "arguments",
    [
        ["x.npy", "--table", "user", "--since", "1"],
        ["x", "--state"],
        ["x", "--rows", "all"],
        ["x", "--buckets", "0"],
        ["x.csv", "--table", "user"],
        ["x.npy", "--table", "nobody"],
    ],
)
def test_options_that_do_not_go_together(store, tmp_path, run, arguments):
    status, _, err = run("export", store, tmp_path / arguments[0], *arguments[1:])
    assert (status, len(err)) == (1, 1)
    assert err[0].startswith("BadConfig: ")


def test_usage_and_help(capsys):
    for arguments, code in [([], 2), (["fly"], 2), (["export", "x"], 2), (["--help"], 0), (["export", "--help"], 0)]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == code
        said = capsys.readouterr()
        assert "usage: python -m embcache" in said.out + said.err


def test_it_runs_as_a_module(store):
    done = subprocess.run([sys.executable, "-m", "embcache", "verify", store], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{store}: intact\n", "")
