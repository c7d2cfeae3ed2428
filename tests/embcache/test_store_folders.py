"""Where a store lives: relative paths, links, folders that move or vanish, files of another store."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch

import embcache as ec
from embcache.cli import main
from embcache.errors import BadConfig, CorruptStore, SchemaMismatch, StoreLocked

TABLE = ec.TableConfig("t", None, 4)


def opened(path: str | Path) -> ec.EmbeddingStore:
    return ec.EmbeddingStore([TABLE], [ec.tiers.Ram(rows=2), ec.tiers.Lmdb(path)])


def put(store: ec.EmbeddingStore, *ids: int) -> None:
    store.load_rows("t", torch.tensor(ids), torch.tensor(ids).float().view(-1, 1).expand(-1, 4))


def get(store: ec.EmbeddingStore, id: int) -> float:
    return float(store.read_rows("t", torch.tensor([id]))[0][0, 0])


def test_a_relative_path_is_of_the_directory_it_was_given_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    store, saved = opened("store"), ec.checkpoint.Checkpoints("saved")
    put(store, 1)
    store.commit()
    monkeypatch.chdir(elsewhere)
    put(store, 2)
    store.commit()
    store.durable.merge()  # type: ignore[union-attr]
    put(store, 3)
    store.commit()
    saved.save({"a": 1})
    with pickle.loads(pickle.dumps(store)) as copy:
        assert get(copy, 2) == 2
    store.close()
    with opened(tmp_path / "store") as again:
        assert [get(again, k) for k in (1, 2, 3)] == [1, 2, 3]
    assert ec.checkpoint.Checkpoints(tmp_path / "saved").load() == {"a": 1}
    assert not list(elsewhere.iterdir())
    with pytest.raises(BadConfig, match="must name a folder"):
        ec.tiers.Lmdb("")


def test_a_link_is_the_store_that_it_leads_to(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    with opened(tmp_path / "real") as store:
        put(store, 1)
        store.commit()
        with pytest.raises(StoreLocked):
            opened(link)
        with ec.EmbeddingStore.open(link, readonly=True) as reader:
            assert get(reader, 1) == 1
    with opened(link) as store:
        put(store, 2)
        store.commit()
    with opened(tmp_path / "real") as store:
        assert get(store, 2) == 2


@pytest.mark.parametrize("fate", ["moved", "removed", "replaced"])
def test_nothing_is_committed_to_a_folder_that_is_gone(tmp_path: Path, fate: str) -> None:
    folder = tmp_path / "store"
    store = opened(folder)
    put(store, 1)
    store.commit()
    if fate == "moved":
        folder.rename(tmp_path / "moved")
    else:
        shutil.rmtree(folder)
    if fate == "replaced":
        folder.mkdir()
    for wait in (True, False):
        with pytest.raises(CorruptStore, match="was moved, removed or replaced while it was open"):
            store.commit(wait=wait)
    store.close()
    assert not (folder / "manifest.json").exists()
    if fate == "moved":
        with opened(tmp_path / "moved") as again:
            assert get(again, 1) == 1


def test_a_folder_made_for_other_tables_says_so_before_the_first_commit(tmp_path: Path) -> None:
    opened(tmp_path).close()
    wider = ec.TableConfig("t", None, 64)
    with pytest.raises(SchemaMismatch, match=r"bytes of a row of each table in .*data.mdb: saved '16', declared '256'"):
        ec.EmbeddingStore([wider], [ec.tiers.Ram(rows=2), ec.tiers.Lmdb(tmp_path)])


def test_verify_reads_the_lists_of_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path) as store:
        for k in range(4):
            put(store, k, 9)
            store.commit()
            store.durable.merge()
    assert main(["verify", str(tmp_path)]) == 0
    path = sorted((tmp_path / "changes").iterdir())[-1]
    altered = bytearray(path.read_bytes())
    altered[-1] ^= 1
    path.write_bytes(altered)
    assert main(["verify", str(tmp_path)]) == 1
    assert f"{path}: the checksum does not match" in capsys.readouterr().out
