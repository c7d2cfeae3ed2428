"""The error table of disk stores: a full disk, a second writer, forks, pickles, other tables, and files that are torn,
foreign, missing or of a newer version."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.errors import (
    BadConfig,
    CorruptStore,
    EmbcacheError,
    ForkError,
    FormatVersion,
    NotSupported,
    SchemaMismatch,
    StorageFull,
    StoreLocked,
)

pytestmark = pytest.mark.filterwarnings("ignore:table .* staged batches need")  # small caches are the point

MANIFEST = "manifest.json"


def tables(dim: int = 4, **more: Any) -> list[ec.TableConfig]:
    shared = {"optimizer": ec.optim.Adagrad(lr=0.1), **more}
    return [ec.TableConfig("a", 5000, dim, **shared), ec.TableConfig("b", None, dim, **shared)]


def open_store(path: Path, rows: int = 20, **more: Any) -> ec.EmbeddingStore:
    return ec.EmbeddingStore(tables(**more), [ec.tiers.Ram(rows=rows), ec.tiers.Lmdb(path)])


def train(store: ec.EmbeddingStore, first: int, n: int = 30) -> None:
    ids = torch.arange(first, first + 2 * n)
    batch = ec.KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(2 * n, dtype=torch.int64))
    with store.stage(batch, training=True) as handle:
        out = store.lookup(handle)
        store.update(handle, {name: rows + 1 for name, rows in out.items()})
    store.step()


def contents(store: ec.EmbeddingStore) -> list[Any]:
    """Ids, weights and state of the written rows of each table."""
    return [
        [torch.cat(parts).tolist() for parts in zip(*store.written_rows(name), strict=True)] for name in store.names
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store with two generations."""
    store = open_store(tmp_path / "store")
    train(store, 0)
    store.commit({"step": 1})
    train(store, 50)
    store.commit({"step": 2})
    store.close()
    return tmp_path / "store"


# full disk -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, leave: int) -> Path:
    """A file that leaves ``leave`` bytes free."""
    filler = place / "filler"
    free = shutil.disk_usage(place).free
    filler.write_bytes(bytes(max(0, free - leave)))
    return filler


def until_full(store: ec.EmbeddingStore, act: Callable[[int], object]) -> int:
    for k in range(400):
        try:
            act(k)
        except StorageFull:
            return k
    raise AssertionError("the disk never became full")


def test_a_disk_that_fills_up_while_rows_leave_the_cache(small_disk: Path) -> None:
    path = small_disk / "store"
    store, twin = open_store(path, dim=64), ec.EmbeddingStore(tables(dim=64), [ec.tiers.Ram()])
    for k in range(3):
        train(store, 60 * k)
        train(twin, 60 * k)
    store.commit({"step": 3})
    committed = contents(twin)
    filler = fill(small_disk, 300_000)

    def act(k: int) -> None:
        train(store, 200 + 60 * k)
        train(twin, 200 + 60 * k)

    k = until_full(store, act)
    assert contents(store) == contents(twin)  # nothing is lost: what could not leave is still here
    with pytest.raises(StorageFull):
        store.commit({"step": 4})
    assert contents(store) == contents(twin)
    reader = ec.EmbeddingStore.open(path, readonly=True)
    assert contents(reader) == committed
    reader.close()
    filler.unlink()
    act(k)  # the same call again
    act(k + 1)
    number = store.commit({"step": 5})
    assert contents(store) == contents(twin)
    store.close()
    again = open_store(path, dim=64)
    assert again.generation == number
    assert contents(again) == contents(twin)
    again.close()


def test_a_disk_that_is_full_at_the_commit(small_disk: Path) -> None:
    path = small_disk / "store"
    store = open_store(path, rows=4000, dim=64)
    train(store, 0)
    store.commit({"step": 1})
    before = contents(store)
    train(store, 1000, 1000)
    after = contents(store)
    filler = fill(small_disk, 20_000)
    for wait in (True, False):
        with pytest.raises(StorageFull, match=r"no room for .* at .*: \d+ free"):
            commit(store, wait)
        assert contents(store) == after
    reader = ec.EmbeddingStore.open(path, readonly=True)
    assert contents(reader) == before
    reader.close()
    filler.unlink()
    commit(store, False)
    store.close()
    again = open_store(path, rows=4000, dim=64)
    assert contents(again) == after
    again.close()


def commit(store: ec.EmbeddingStore, wait: bool) -> None:
    """Begun and ended."""
    store.commit({"step": 2}, wait=wait)
    store.checkpoints.wait()


# writers, readers, copies --------------------------------------------------------------------------------------------


class Child:
    """A forked process that calls ``body`` when it is asked for ``result``: what it raises, as type and message."""

    def __init__(self, body: Callable[[], object]) -> None:
        begin, self._begin = os.pipe()
        self._result, send = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            text = ""
            try:
                os.read(begin, 1)
                body()
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(send, text.encode())
            os._exit(0)
        os.close(begin)
        os.close(send)

    def result(self) -> str:
        os.write(self._begin, b"x")
        os.close(self._begin)
        with os.fdopen(self._result, "rb") as file:
            text = file.read().decode()
        os.waitpid(self._pid, 0)
        return text


def in_child(body: Callable[[], object]) -> str:
    """What ``body`` raises in a child forked now; "" for nothing."""
    return Child(body).result()


def test_a_second_writer_is_refused_by_name_and_readers_are_not(path: Path) -> None:
    writer, reader = Child(lambda: open_store(path)), Child(lambda: print_contents(path))
    store = open_store(path)
    train(store, 200)
    refused = writer.result()
    assert refused.startswith("StoreLocked")
    assert f"process {os.getpid()} on {socket.gethostname()}" in refused
    seen = json.loads(reader.result().removeprefix("SystemExit: "))
    assert len(seen[0][0]) == 60  # of generation 2, not what is not committed
    store.close()
    assert in_child(lambda: open_store(path)) == ""


def print_contents(path: Path) -> None:
    reader = ec.EmbeddingStore.open(path, readonly=True)
    raise SystemExit(json.dumps(contents(reader)))


def test_a_second_store_of_one_process_is_refused(path: Path) -> None:
    store = open_store(path)
    with pytest.raises((StoreLocked, BadConfig)):
        open_store(path)
    train(store, 300)
    store.commit()
    store.close()
    open_store(path).close()


def test_a_killed_writer_leaves_no_lock(path: Path) -> None:
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = open_store(path)
        train(store, 300)
        os.write(send, b"x")
        signal.pause()
    assert os.read(receive, 1) == b"x"
    with pytest.raises(StoreLocked, match=f"process {pid} on"):
        open_store(path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    store = open_store(path)
    assert store.generation == store.recovered_from == 2
    store.close()
    os.close(receive)
    os.close(send)


def test_a_forked_child_may_not_use_the_store(path: Path) -> None:
    store = open_store(path)
    train(store, 300)
    handle = store.stage(
        ec.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 4000]), lengths=torch.tensor([1, 1])), training=True
    )
    uses: list[Callable[[], object]] = [
        lambda: train(store, 0),
        lambda: store.lookup(handle),
        lambda: store.commit(),
        lambda: contents(store),
        lambda: store.read_rows("a", torch.tensor([4999])),
        lambda: store.flush(),
    ]
    for use in uses:
        assert in_child(use).startswith(ForkError.__name__)
    assert in_child(lambda: open_store(path)).startswith(StoreLocked.__name__)
    handle.release()
    train(store, 400)  # the children's ends disturbed nothing
    assert store.commit() == 3
    expected = contents(store)
    store.close()
    again = open_store(path)
    assert contents(again) == expected
    again.close()


def test_pickles_carry_the_path_and_copies_are_refused(path: Path) -> None:
    store = open_store(path)
    with pytest.raises(NotSupported):
        copy.deepcopy(store)
    data = pickle.dumps(store)
    assert len(data) < 20_000
    expected = contents(store)
    for _ in range(2):  # beside the writer, and without it
        again = pickle.loads(data)
        assert again.durable is not None
        assert again.durable.readonly
        assert contents(again) == expected
        again.close()
        store.close()
    shutil.rmtree(path)
    with pytest.raises((FileNotFoundError, EmbcacheError), match="store"):
        pickle.loads(data)


def test_a_closed_store_says_so(path: Path) -> None:
    store = open_store(path)
    store.close()
    store.close()
    for use in (lambda: train(store, 0), lambda: store.commit(), lambda: contents(store)):
        with pytest.raises(Exception, match="closed"):
            use()


# files ---------------------------------------------------------------------------------------------------------------


def digests(path: Path) -> dict[str, str]:
    return {
        str(f.relative_to(path)): hashlib.sha1(f.read_bytes()).hexdigest()
        for f in sorted(path.rglob("*"))
        if f.is_file() and f.name not in ("lock", "lock.mdb", "readers")
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 5}, ["'embedding_dim': 4", "'embedding_dim': 5"]),
        ({"dtype": torch.bfloat16}, ["torch.float32", "torch.bfloat16"]),
        ({"optimizer": ec.optim.Adam(lr=0.1)}, ["Adagrad", "Adam"]),
        ({"seed": 3}, ["'seed': 0", "'seed': 3"]),
    ],
)
def test_other_tables_are_refused_listing_both(path: Path, change: dict[str, Any], words: list[str]) -> None:
    before = digests(path)
    with pytest.raises(SchemaMismatch) as error:
        open_store(path, **change)
    assert all(word in str(error.value) for word in words)
    assert digests(path) == before
    open_store(path).close()


def damaged(file: Path, how: str) -> None:
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "torn":
        file.write_bytes(data[: len(data) // 2])
    elif how == "one bit":
        at = len(data) // 2
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    else:
        file.write_bytes(b"something else entirely" * 300)


@pytest.mark.parametrize("how", ["torn", "one bit", "foreign"])
def test_a_damaged_manifest_is_refused(path: Path, how: str) -> None:
    damaged(path / MANIFEST, how)
    before = digests(path)
    with pytest.raises(CorruptStore, match=MANIFEST):
        open_store(path)
    with pytest.raises(CorruptStore, match=MANIFEST):
        ec.EmbeddingStore.open(path, readonly=True)
    assert digests(path) == before


@pytest.mark.parametrize("how", ["missing", "torn", "one bit", "foreign"])
def test_damaged_files_are_named_before_anything_is_written(path: Path, how: str) -> None:
    files = [f for f in path.rglob("*") if f.is_file() and needed(f)]
    assert files
    for file in files:
        kept = path.with_name("kept")
        shutil.copytree(path, kept)
        damaged(file, how)
        before = digests(path)
        with pytest.raises(CorruptStore, match=file.name.split(".")[0]):
            open_store(path)
        assert digests(path) == before, file
        shutil.rmtree(path)
        kept.rename(path)
        open_store(path).close()


def needed(file: Path) -> bool:
    """Whether reading the last generation depends on a file (of locks, other tests; what an older generation or a delta
    export needs may be bad)."""
    known = ("lock", "lock.mdb", "readers", "data.mdb", "keys.filter", MANIFEST)
    return file.name not in known and "changes" not in file.parts and "generation-00000001" not in file.parts


def test_a_newer_manifest_is_refused(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["version"] = 99
    (path / MANIFEST).write_text(json.dumps(manifest))
    before = digests(path)
    with pytest.raises(FormatVersion, match="version 99"):
        open_store(path)
    assert digests(path) == before


def test_a_foreign_database_is_refused(tmp_path: Path, path: Path) -> None:
    (path / "data.mdb").write_bytes(np.random.default_rng(0).integers(0, 255, 40_960, dtype=np.uint8).tobytes())
    with pytest.raises(CorruptStore, match=r"data\.mdb"):
        open_store(path)


def test_a_lost_database_is_noticed(path: Path) -> None:
    store = ec.EmbeddingStore(tables(), [ec.tiers.Ram(rows=20), ec.tiers.Lmdb(path, overlay_bytes=1)])
    for step in range(4):
        train(store, 500 * step)
        store.commit()
    store.close()
    (path / "data.mdb").unlink()
    with pytest.raises(CorruptStore, match=r"data\.mdb"):
        open_store(path)


def test_what_was_not_committed_is_swept(path: Path) -> None:
    before = set(digests(path))
    store = open_store(path)
    expected = contents(store)
    for first in range(1000, 2000, 60):
        train(store, first)
    store.flush()
    store.close()  # without a commit
    store = open_store(path)
    assert contents(store) == expected
    store.close()
    assert set(digests(path)) <= before | {"data.mdb"}


def test_reading_only_refuses_to_write(path: Path) -> None:
    before = digests(path)
    reader = ec.EmbeddingStore.open(path, readonly=True)
    with pytest.raises(EmbcacheError):
        reader.commit()
    reader.close()
    assert digests(path) == before
    with pytest.raises((FileNotFoundError, EmbcacheError)):
        ec.EmbeddingStore.open(path.parent / "absent", readonly=True)
