"""Lanes: bytes arrive where and in the order they should, are counted, and a group that breaks names the rank."""

import signal
import threading
import time

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist

from embcache.errors import RankFailed
from embcache.sharded.lanes import NAMES, Lanes
from embcache.sharded.ledger import Ledger, Link


def uneven(rank, seed):
    """Every rank sends every other a random number of bytes, often none, on every lane; returns what came."""
    lanes = rank.lanes()
    came = []
    for turn in range(6):
        rng = np.random.default_rng([seed, turn])
        counts = rng.integers(0, 50, (rank.world, rank.world)) * rng.integers(0, 2, (rank.world, rank.world))
        if turn == 3:
            counts[:] = 0
        rng = np.random.default_rng([seed, turn, rank.rank])
        parts = [rng.integers(0, 256, n).astype(np.uint8) for n in counts[rank.rank]]
        lane = lanes[NAMES[turn % 6]]
        header = lane.header(counts[rank.rank][:, None])
        sizes = header[:, 0]
        if turn % 2:
            got = lane.all_to_all(parts, sizes)
        else:
            out = torch.full((int(sizes.sum()) + 3,), 7, dtype=torch.uint8)
            got = lane.all_to_all((np.concatenate(parts), counts[rank.rank]), sizes, out)
            assert out[-3:].tolist() == [7, 7, 7]
        came.append(got.tolist())
    report = lanes.ledger.report()
    lanes.close()
    return came, report


@pytest.mark.parametrize(("world", "delays"), [(1, None), (2, None), (3, 11), (4, None)])
def test_uneven_and_empty_parts_arrive_and_are_counted(world, delays):
    results = ranks.run(world, uneven, delays=delays, seed=5)
    want = {r: {name: np.zeros(world, int) for name in NAMES} for r in range(world)}
    for turn in range(6):
        rng = np.random.default_rng([5, turn])
        counts = rng.integers(0, 50, (world, world)) * rng.integers(0, 2, (world, world))
        counts = counts * (turn != 3)
        sent = []
        for r in range(world):
            rng = np.random.default_rng([5, turn, r])
            sent.append([rng.integers(0, 256, n).astype(np.uint8) for n in counts[r]])
        for r in range(world):
            assert results[r][0][turn] == np.concatenate([sent[p][r] for p in range(world)]).tolist()
            want[r][NAMES[turn % 6]] += np.where(np.arange(world) == r, 0, counts[r])
    for r in range(world):
        lanes = results[r][1]["lanes"]
        assert {name: lane["sent"] for name, lane in lanes.items()} == {n: v.tolist() for n, v in want[r].items()}
        assert sum(lane["header_bytes"] for lane in lanes.values()) == 6 * 8 * (world - 1)
        assert [lanes[name]["operations"] for name in NAMES] == [1] * 6
    for a in range(world):
        for b in range(world):
            for name in NAMES:
                assert results[a][1]["lanes"][name]["sent"][b] == results[b][1]["lanes"][name]["received"][a]


def gathers(rank):
    lanes = rank.lanes()
    words = ["", "one", "two and more", "x"]
    got = [bytes(t.numpy()).decode() for t in lanes.control.all_gather(words[rank.rank].encode())]
    rows = lanes.dense.all_gather(np.full(rank.rank + 1, rank.rank, np.int32), [4 * (r + 1) for r in range(rank.world)])
    spoken = bytes(lanes.control.broadcast(f"from {rank.rank}".encode(), root=rank.world - 1).numpy()).decode()
    lanes.control.barrier()
    return got, [t.view(torch.int32).tolist() for t in rows], spoken


def test_gather_and_broadcast():
    for world in (1, 3):
        words = ["", "one", "two and more"][:world]
        rows = [[r] * (r + 1) for r in range(world)]
        assert ranks.run(world, gathers) == [(words, rows, f"from {world - 1}")] * world


def in_groups(rank):
    """Lanes of shard groups inside replica groups, and a further road of one kind."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    lanes = Lanes(mesh["shard"])
    more = lanes.more("ids")
    both = [lane.submit(lane.header, [[rank.rank]] * 2) for lane in (more, lanes.ids)]
    came = [pending.result()[:, 0].tolist() for pending in both]
    report = lanes.ledger.report()
    lanes.close()
    return lanes.rank, lanes.ranks, came, report["lanes"]["ids"]["headers"]


def test_lanes_of_a_part_of_the_ranks():
    for rank, result in enumerate(ranks.run(4, in_groups)):
        group = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert result == (rank % 2, group, [group, group], 2)


def in_order(rank, rounds):
    """Many operations on all lanes at once, submitted lane by lane in another order on each rank."""
    lanes = rank.lanes()
    order = list(np.random.default_rng(rank.rank).permutation(len(NAMES)))
    log = {name: [] for name in NAMES}

    def operation(lane, turn):
        mine = np.full((rank.world, 1), 1000 * turn + rank.rank)
        log[lane.name].append(lane.header(mine)[:, 0].tolist())
        return turn

    pending = [(lanes[NAMES[k]].submit(operation, lanes[NAMES[k]], t), t) for t in range(rounds) for k in order]
    assert all(p.result() == t for p, t in pending)
    return log, lanes.ledger.report()


def test_lanes_are_independent_and_each_is_first_in_first_out():
    want = [[1000 * t + r for r in range(3)] for t in range(20)]
    for delays in (None, 3, 4):
        for log, report in ranks.run(3, in_order, delays=delays, rounds=20):
            assert log == dict.fromkeys(NAMES, want)
            assert [report["lanes"][name]["headers"] for name in NAMES] == [20] * 6


def test_one_process_alone_has_lanes_without_a_group():
    lanes = Lanes()
    assert (lanes.rank, lanes.world, lanes.ranks) == (0, 1, [0])
    assert lanes.ids.header([[4, 5]]).tolist() == [[4, 5]]
    assert lanes.rows.all_to_all([np.arange(3, dtype=np.float32)], [12]).view(torch.float32).tolist() == [0, 1, 2]
    assert lanes.ids.submit(lambda: threading.current_thread().name).result() == "embcache lane ids"
    with pytest.raises(ZeroDivisionError):
        lanes.ids.submit(lambda: 1 // 0).result()
    with pytest.raises(ValueError, match=r"shape \[1, n\]"):
        lanes.ids.header([[1], [2]])
    assert lanes.grads.outbox(10).data_ptr() == lanes.grads.outbox(11).data_ptr() != lanes.grads.inbox(10).data_ptr()
    lanes.close()


def test_waiting_is_counted_by_the_thread_that_waits():
    lanes = Lanes()
    lanes.rows.submit(time.sleep, 0.05).result()
    other = threading.Thread(target=lambda: lanes.ids.submit(time.sleep, 0.05).result())
    other.start()
    other.join()
    accounts = lanes.ledger.accounts
    assert 0.03 < accounts["rows"].waited < 2
    assert 0.03 < accounts["ids"].waited_behind < 2
    assert accounts["rows"].waited_behind == accounts["ids"].waited == 0
    lanes.close()


def test_ledger_counts_from_a_mark():
    ledger = Ledger(["a", "b"], rank=1, world=3)
    ledger.done("a", time.monotonic(), [5, 7, 9], [1, 2, 3])
    mark = ledger.mark()
    ledger.done("a", time.monotonic(), [1, 1, 1], [4, 4, 4])
    ledger.header_done("b", time.monotonic(), 16)
    assert ledger.report()["lanes"]["a"]["sent"] == [6, 0, 10]
    since = ledger.since(mark)["lanes"]
    assert (since["a"]["sent"], since["a"]["received"], since["a"]["operations"]) == ([1, 0, 1], [4, 0, 4], 1)
    assert since["b"]["header_bytes"] == 32
    assert since["b"]["headers"] == 1


def emulated(rank):
    """Two lanes carry 1 MB each at once over 0.1 Gb/s; rank 1 comes late."""
    lanes = rank.lanes(emulate=Link(gigabits=0.1, latency=0.01))
    data = np.zeros(1_000_000, np.uint8)
    parts = [np.empty(0, np.uint8) if p == rank.rank else data for p in range(2)]
    sizes = [0 if p == rank.rank else 1_000_000 for p in range(2)]
    lanes.control.barrier()
    if rank.rank == 1:
        time.sleep(0.1)
    begun = time.monotonic()
    pending = [lane.submit(lane.all_to_all, parts, sizes) for lane in (lanes.rows, lanes.grads)]
    for p in pending:
        p.result()
    return time.monotonic() - begun, lanes.ledger.report(), lanes.ledger.describe()


def test_the_emulated_link_is_one_for_all_lanes_and_counts_from_the_last_peer():
    (first, report, text), (second, *_) = ranks.run(2, emulated)
    assert 0.169 <= second < 0.4  # 2 x 80 ms of bytes and 10 ms until they arrive
    assert 0.269 <= first < 0.5  # the same, and 100 ms for the other
    assert report["emulated"] == {"gigabits": 0.1, "latency": 0.01, "text": "0.1 Gb/s, 10000 us"}
    assert "emulated link: 0.1 Gb/s" in text
    assert sorted(report["lanes"][n]["seconds"] for n in ("rows", "grads"))[1] >= 0.169


# ---- ranks that fail


def one_stops(rank, how):
    """Rank 1 stops after some exchanges; the others wait in a lane, one of them also in a second lane."""
    lanes = rank.lanes()
    lanes.rows.barrier()
    rank.note("ready")
    if rank.rank == 1:
        if how == "raises":
            lanes._faults.report(ValueError("no such file"))
            raise ValueError("no such file")
        time.sleep(60)
    began = time.monotonic()
    waiting = lanes.ids.submit(lanes.ids.barrier) if rank.rank == 0 else None
    try:
        lanes.rows.barrier()
    except RankFailed as error:
        seconds = time.monotonic() - began
        again = []
        for attempt in (lambda: lanes.grads.barrier(), lambda: waiting.result() if waiting else lanes.ids.barrier()):
            try:
                attempt()
            except RankFailed as later:
                again.append((later.rank, later.what))
        rank.note("done")
        return error.rank, error.what, seconds, again
    return None


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_dies_or_hangs_is_named_by_all_within_the_timeout(how):
    started = ranks.start(3, one_stops, how=how, env={"RANKS_TIMEOUT": "2"})
    for r in range(3):
        started.noted("ready", r)
    started.kill(1, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    if how == "stopped":
        for r in (0, 2):
            started.noted("done", r)
        started.kill(1)
    outcomes = started.wait(limit=40)
    assert outcomes[1].signal == signal.SIGKILL
    for r in (0, 2):
        assert outcomes[r].error is None, outcomes[r].printed
        rank, what, seconds, again = outcomes[r].value
        assert rank == 1
        assert "died or hangs" in what
        assert seconds < (6 if how == "killed" else 8)
        assert again == [(rank, what)] * 2
    assert outcomes[0].value[1] == outcomes[2].value[1]


def test_a_rank_that_raises_is_named_with_its_error():
    started = ranks.start(3, one_stops, how="raises")
    outcomes = started.wait(limit=30)
    for r in (0, 2):
        rank, what, seconds, again = outcomes[r].value
        assert (rank, what) == (1, "stopped with ValueError: no such file")
        assert seconds < 5
        assert again == [(rank, what)] * 2


def one_is_late(rank):
    lanes = rank.lanes()
    lanes.rows.barrier()
    if rank.rank == 0:
        time.sleep(5)
        return None
    try:
        lanes.rows.barrier()
    except RankFailed as error:
        return error.rank, error.what


def test_a_rank_that_does_not_come_is_told_from_one_that_is_dead():
    results = ranks.run(2, one_is_late, env={"RANKS_TIMEOUT": "2"})
    rank, what = results[1]
    assert rank == 0
    assert "has not begun operation 2 of lane 'rows', others are at 2" in what
