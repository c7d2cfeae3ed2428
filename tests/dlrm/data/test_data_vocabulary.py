"""Parts of the vocabulary stages: codes, the key table, external order; against dicts and Counters."""

from collections import Counter

import numpy as np
import pytest
from data_logs import finished, small_log

from dlrm.data import Limits, MemoryBudgetExceeded, preprocess
from dlrm.data import vocabulary as vocabulary_module
from dlrm.data.keytable import KeyTable, TableFull, keys_within
from dlrm.data.parsed import PARTS, Parsed, encode
from dlrm.data.schema import Categorical, Label, Schema
from dlrm.data.vocabulary import Run, _merge

EDGES = np.array([0, -1, 2**63 - 1, -(2**63), 1], np.int64)


def test_codes_decode_to_the_keys() -> None:
    rng, n = np.random.default_rng(0), 20_000
    keys = np.stack([rng.integers(0, 5, n), rng.integers(-(2**63), 2**63 - 1, n), np.resize(EDGES, n)])
    missing = rng.random((3, n)) < 0.1
    bag = rng.integers(0, 900, 5000)
    schema = Schema(
        Label("y"), (), (Categorical("a"), Categorical("m", multi=True), Categorical("b"), Categorical("c"))
    )
    parsed = Parsed(np.zeros(n, np.float32), np.zeros((n, 0), np.float32), keys, missing, np.zeros(0, np.int64),
                    [np.zeros(n, np.int64)], [bag], n, 0, [])  # fmt: skip
    coded = encode(parsed, schema)
    assert np.array_equal(coded.dictionaries[1][coded.bag_codes[0]], bag)
    for column, f in enumerate((0, 2, 3)):
        codes, dictionary = coded.codes[:, column], coded.dictionaries[f]
        assert np.array_equal(codes == -1, missing[column])
        present = ~missing[column]
        assert np.array_equal(dictionary[codes[present]], keys[column, present])
        assert len(np.unique(dictionary)) == len(dictionary) == coded.parts[f, PARTS]
        part = np.searchsorted(coded.parts[f], np.arange(len(dictionary)), "right") - 1
        assert np.array_equal(part, [_mix(int(k)) >> 59 for k in dictionary])


def _mix(z: int) -> int:
    mask = 2**64 - 1
    z &= mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_key_table_counts_like_a_counter_while_it_grows() -> None:
    rng, table, want = np.random.default_rng(1), KeyTable(1 << 40), Counter()
    for _ in range(20):
        keys = np.concatenate([rng.zipf(1.2, 3000).astype(np.int64) % 2**62, EDGES])
        values = rng.integers(0, 3, len(keys))
        table.add(keys, values)
        for k, v in zip(keys.tolist(), values.tolist(), strict=True):
            want[k] += v
    want = Counter({k: v for k, v in want.items() if v})
    keys, values = table.at_least(1)
    assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == dict(want)
    assert table.size == len(want)
    assert table.get(np.array([12345678901234567, 0, -1])).tolist() == [0, want[0], want[-1]]
    often = dict(zip(*(a.tolist() for a in table.at_least(5)), strict=True))
    assert often == {k: v for k, v in want.items() if v >= 5}


def test_a_full_table_says_so_before_it_grows() -> None:
    limit = keys_within(16 * 3 // 2 * 4096)
    assert limit == int(0.6 * 4096)
    table = KeyTable(limit)
    table.add(np.arange(limit), np.ones(limit, np.int64))
    table.add(np.arange(limit), np.ones(limit, np.int64))
    with pytest.raises(TableFull):
        table.add(np.array([-5]), np.array([1]))


@pytest.mark.parametrize("most", [1, 50, 700, 10**9])
def test_runs_merge_in_order_whatever_the_pieces(tmp_path, most) -> None:
    rng = np.random.default_rng(2)
    keys = rng.permutation(np.unique(rng.integers(-(10**6), 10**6, 4000)))
    counts = rng.zipf(1.5, len(keys)).clip(1, 50)
    runs = []
    for k, place in enumerate(np.array_split(np.arange(len(keys)), 7)):
        order = place[np.lexsort((keys[place], -counts[place]))]
        runs.append(Run(keys[order], counts[order]).spill(tmp_path / f"run_{k}"))
    pieces = list(_merge(runs, most))
    assert np.array_equal(np.concatenate(pieces), keys[np.lexsort((keys, -counts))])
    if most == 700:
        assert len(pieces) > 4
        assert max(len(p) for p in pieces) <= 2 * most
    for run in runs:
        run.remove()
    assert not list(tmp_path.iterdir())


def test_parts_and_the_external_sort_are_really_used(tmp_path, monkeypatch) -> None:
    path, schema = small_log(tmp_path)
    preprocess(path, tmp_path / "all", schema, "vocab:1")
    passes: list[int] = []
    frequent = vocabulary_module.Vocabularies._frequent

    def watched(self, table: int, this: int, count: int) -> Run:
        passes.append(count)
        return frequent(self, table, this, count)

    monkeypatch.setattr(vocabulary_module, "keys_within", lambda memory: 30)
    monkeypatch.setattr(vocabulary_module.Vocabularies, "_frequent", watched)
    preprocess(path, tmp_path / "parts", schema, "vocab:1", limits=Limits(memory_bytes=1))
    assert max(passes) >= 8
    assert finished(tmp_path / "all") == finished(tmp_path / "parts")
    monkeypatch.setattr(vocabulary_module, "keys_within", lambda memory: 2)
    with pytest.raises(MemoryBudgetExceeded, match="more than 64 keys: raise the memory budget"):
        preprocess(path, tmp_path / "never", schema, "vocab:1")


def test_the_keys_of_one_part_fill_the_table_evenly() -> None:
    # A pass holds one part only: were slots chosen by the bits that choose parts, probing would be quadratic.
    keys = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 400_000)
    part = keys[[_mix(int(k)) >> 59 == 7 for k in keys]]
    table = KeyTable(1 << 40, bits=16)
    table.add(part, np.ones(len(part), np.int64))
    used = np.flatnonzero(table._values)
    assert abs(np.mean(used) / len(table._values) - 0.5) < 0.02
    assert np.array_equal(table.get(part), np.ones(len(part)))
