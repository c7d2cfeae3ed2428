"""Staging ahead: the same bits at every depth, errors at their batch, and nothing left behind however it ends."""

import copy
import gc
import multiprocessing
import pickle
import threading
import time

import pytest
import torch

import embcache as ec
from embcache.errors import BadConfig, BadJagged, CacheTooSmall, IdOutOfRange
from embcache.lookahead import LookAhead


def batches(count=12, rows=50, size=6, seed=0):
    out = []
    for t in range(count):
        g = torch.Generator().manual_seed(1000 * seed + t)
        lengths = torch.randint(0, 4, (2 * size,), generator=g)
        values = torch.randint(0, rows, (int(lengths.sum()),), generator=g)
        out.append(ec.KeyedJaggedTensor(["a", "b"], values, lengths=lengths))
    return out


def tables(rows=50):
    return [
        ec.TableConfig(name, rows, 4, optimizer=ec.optim.Adam(lr=0.1), init=ec.init.Uniform(0.5), seed=3)
        for name in "ab"
    ]


class Fake:
    """Stands for a store with room for ``rooms`` batches; knows who is pinned, and which calls might overflow."""

    class Handle:
        def __init__(self, fake, batch):
            self.fake, self.batch, self.open = fake, batch, True

        def release(self):
            if self.open:
                self.open = False
                with self.fake.lock:
                    self.fake.pins -= 1
                    self.fake.log.append(("release", self.batch))

    def __init__(self, rooms=100):
        self.rooms, self.pins, self.most = rooms, 0, 0
        self.lock, self.log, self.threads = threading.Lock(), [], set()
        self.tried = threading.Semaphore(0)

    def __call__(self, item, overflow):
        self.threads.add(threading.current_thread())
        try:
            with self.lock:
                if item.bad is not None:
                    raise item.bad
                if self.pins >= self.rooms and not overflow:
                    raise CacheTooSmall("t", self.pins + 1, self.rooms)
                self.pins += 1
                self.most = max(self.most, self.pins)
                self.log.append(("stage", item.number))
                return self.Handle(self, item.number)
        finally:
            self.tried.release()


class Item:
    def __init__(self, number, bad=None):
        self.number, self.bad, self.staged = number, bad, None


class Source:
    """A loader that says whether its iterator was closed."""

    def __init__(self, items, fail_at=None):
        self.items, self.fail_at, self.closed, self.given = items, fail_at, 0, 0

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        try:
            for k, item in enumerate(self.items):
                if k == self.fail_at:
                    raise OSError("torn file")
                self.given += 1
                yield item
        finally:
            self.closed += 1


def lookahead_threads():
    return [t for t in threading.enumerate() if t.name == "embcache-lookahead"]


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    if lookahead_threads():
        gc.collect()
    assert lookahead_threads() == []


def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# results ---------------------------------------------------------------------------------------------------------


def trained(depth, loader, collection=True, **options):
    store = ec.EmbeddingStore(tables(), backend="reference")
    outs = []
    ebc = ec.EmbeddingBagCollection(tables(), store=store)
    opt = ec.optim.SparseOptimizer(ebc)

    def stage(jagged, overflow):
        return store.stage(jagged, training=True)

    with LookAhead(stage, loader, depth, **options) as ahead:
        for batch in ahead:
            assert batch.staged is not None
            stages = store.stages
            out = ebc(batch).values()
            if not depth:
                assert store.stages == stages  # the handle on the batch was used
            outs.append(out.detach().clone())
            (out**2).sum().backward()
            opt.step()
            opt.zero_grad()
    return outs, store


@pytest.mark.parametrize("depth", [0, 1, 8, "auto"])
def test_every_depth_gives_the_bits_of_none(depth):
    loader = batches()
    plain = ec.EmbeddingStore(tables(), backend="reference")
    ebc = ec.EmbeddingBagCollection(tables(), store=plain)
    opt = ec.optim.SparseOptimizer(ebc)
    expected = []
    for batch in loader:
        out = ebc(batch).values()
        expected.append(out.detach().clone())
        (out**2).sum().backward()
        opt.step()
    outs, store = trained(depth, loader)
    assert len(outs) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    for table in "ab":
        assert torch.equal(store.weight(table), plain.weight(table))
        assert torch.equal(store.state(table), plain.state(table))
    assert store.stages == len(loader)  # each batch once
    assert all(batch.staged is None for batch in loader)


def test_one_batch_given_again_and_again():
    loader = [batches(1)[0]] * 6
    outs, _ = trained(3, loader)
    again, _ = trained(0, loader)
    assert all(torch.equal(a, b) for a, b in zip(outs, again, strict=True))


def test_ids_finds_the_jagged_inputs_of_a_batch():
    store = ec.EmbeddingStore(tables(), backend="reference")
    loader = [{"x": batch, "y": batch.with_suffix("!")} for batch in batches(4)]
    seen = []

    def stage(jagged, overflow):
        seen.append(jagged)
        return store.stage(jagged, tuple(k for k in ("a", "b") if k in jagged.keys()), training=True)  # noqa: SIM118

    with LookAhead(stage, loader, 2, ids=lambda batch: [batch["x"], batch["y"]]) as ahead:
        for batch in ahead:
            assert batch["x"].staged is not None
            assert batch["y"].staged is not None
    assert [id(s) for s in seen] == [id(batch[k]) for batch in loader for k in "xy"]


def test_a_handle_of_another_store_or_of_other_features_is_not_used():
    batch = batches(1)[0]
    store, other = (ec.EmbeddingStore(tables(), backend="reference") for _ in range(2))
    other.load_weight("a", torch.full((50, 4), 7.0))
    both = ec.EmbeddingBagCollection(tables(), store=store)
    one = ec.EmbeddingBagCollection(tables()[1:], store=store)
    expected = both(batch).values()
    with other.stage(batch) as batch.staged:
        assert torch.equal(both(batch).values(), expected)
    with store.stage(batch) as batch.staged:
        assert torch.equal(one(batch).values(), expected[:, 4:])
        stages = store.stages
        assert torch.equal(both(batch).values(), expected)
        assert store.stages == stages
    assert torch.equal(both(batch).values(), expected)  # released: staged anew
    with store.stage(batch) as batch.staged:
        batch.values()[0] = (batch.values()[0] + 1) % 50  # a loader that reuses its memory
        fresh = ec.KeyedJaggedTensor(["a", "b"], batch.values().clone(), lengths=batch.lengths())
        assert torch.equal(both(batch).values(), both(fresh).values())


def test_pooled_and_unpooled_features_of_one_handle():
    mixed = [tables()[0], ec.TableConfig("b", 50, 4, pooling="none")]
    store = ec.EmbeddingStore(mixed, backend="reference")
    bags, rows = ec.EmbeddingBagCollection(mixed[:1], store=store), ec.EmbeddingCollection(mixed[1:], store=store)
    batch = batches(1)[0]
    expected = bags(batch).values(), rows(batch)["b"].values()
    with store.stage(batch) as batch.staged:
        stages = store.stages
        assert torch.equal(bags(batch).values(), expected[0])
        assert torch.equal(rows(batch)["b"].values(), expected[1])
        assert store.stages == stages


def test_copies_of_a_staged_batch_have_no_handle():
    batch = batches(1)[0]
    store = ec.EmbeddingStore(tables(), backend="reference")
    with store.stage(batch) as batch.staged:
        for other in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
            assert other.staged is None
            assert torch.equal(other.values(), batch.values())
        assert batch.staged is not None


# order and bounds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_pins_are_bounded_and_given_back_in_order(depth):
    fake = Fake()
    ahead = LookAhead(fake, Source([Item(i) for i in range(10)]), depth)
    assert len(ahead) == 10
    for i, item in enumerate(ahead):
        assert item.number == i
        assert item.staged.open
        eventually(lambda i=i: fake.log.count(("stage", min(i + depth, 9))) == 1)
    assert fake.pins == 0
    assert fake.most == depth + 1
    assert [n for what, n in fake.log if what == "release"] == list(range(10))
    assert next(ahead, None) is None


def test_depth_0_works_on_the_callers_thread():
    fake = Fake(rooms=0)  # always beyond the cache, which a lone batch may
    assert [item.number for item in LookAhead(fake, Source([Item(i) for i in range(3)]), 0)] == [0, 1, 2]
    assert fake.threads == {threading.current_thread()}


def test_nothing_is_read_before_the_first_batch_is_asked_for():
    source = Source([Item(0)])
    ahead = LookAhead(Fake(), source)
    assert lookahead_threads() == []
    assert source.given == 0
    assert next(ahead).number == 0
    ahead.close()


def test_each_batch_of_the_window_is_announced_once_with_its_distance():
    heard = []
    items = [Item(i) for i in range(6)]
    ahead = LookAhead(Fake(), items, 0, window=2, announce=lambda item, ahead: heard.append((item.number, ahead)))
    heard.extend("|" for _ in ahead)
    first = [(0, 1), (1, 2), (2, 3)]
    assert heard == [*first, "|", (3, 3), "|", (4, 3), "|", (5, 3), "|", "|", "|"]


# a cache that is too small ---------------------------------------------------------------------------------------


def test_a_fixed_depth_raises_at_the_batch_that_did_not_fit():
    fake = Fake(rooms=2)
    ahead = LookAhead(fake, Source([Item(i) for i in range(9)]), 2)
    assert next(ahead).number == 0
    eventually(lambda: len(fake.log) == 2 and not fake.tried.acquire(timeout=0.05))
    assert next(ahead).number == 1
    with pytest.raises(CacheTooSmall, match=r"need 3 rows at once, the cache holds 2"):
        next(ahead)
    assert fake.pins == 0
    assert next(ahead, None) is None


@pytest.mark.parametrize("rooms", [0, 1, 2, 3])
def test_auto_waits_where_the_next_does_not_fit(rooms):
    fake = Fake(rooms)
    numbers = []
    for item in LookAhead(fake, Source([Item(i) for i in range(30)]), "auto"):
        assert item.staged.open
        numbers.append(item.number)
        if len(numbers) == 5:
            time.sleep(0.02)
    assert numbers == list(range(30))
    assert fake.pins == 0
    assert fake.most <= max(rooms, 1)


def test_auto_that_waits_can_be_left():
    fake = Fake(rooms=1)
    for item in LookAhead(fake, Source([Item(i) for i in range(30)]), "auto"):
        for _ in range(2):
            fake.tried.acquire()
        assert item.number == 0
        break
    assert fake.pins == 0


# errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 8])
@pytest.mark.parametrize("window", [0, 3])
def test_errors_surface_at_their_batch(depth, window):
    for where in ("loader", "ids", "stage"):
        fake = Fake()
        items = [Item(i, ValueError("bad row") if (where, i) == ("stage", 4) else None) for i in range(9)]
        source = Source(items, fail_at=4 if where == "loader" else None)
        find = (lambda item: {}[item.number] if item.number == 4 else item) if where == "ids" else None
        numbers = []
        ahead = LookAhead(fake, source, depth, find, window, lambda item, distance: None)
        with pytest.raises({"loader": OSError, "ids": KeyError, "stage": ValueError}[where]):
            numbers.extend(item.number for item in ahead)
        numbers = [n for what, n in fake.log if what == "release"]
        assert numbers[:4] == [0, 1, 2, 3]
        assert fake.pins == 0
        assert source.closed == 1
        assert next(ahead, None) is None


def test_an_id_out_of_range_is_found_at_its_batch():
    loader = batches(5)
    loader[3].values()[0] = 50
    store = ec.EmbeddingStore(tables(), backend="reference")
    seen = []
    ahead = LookAhead(lambda jagged, overflow: store.stage(jagged), loader, 4)
    with pytest.raises(IdOutOfRange, match=r"= 50, valid range \[0, 50\)"):
        seen.extend(ahead)
    assert [id(b) for b in seen] == [id(b) for b in loader[:3]]


def test_one_input_that_fails_gives_the_others_back():
    fake = Fake()
    items = [(Item(0), Item(0, ValueError("bad")))]
    with pytest.raises(ValueError, match="bad"):
        next(LookAhead(fake, items, 1))
    assert fake.pins == 0


def test_a_stop_iteration_of_ids_is_an_error_not_the_end():
    def ids(item):
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(LookAhead(Fake(), [Item(0)], 1, ids))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": -1}, "depth = -1, must be an integer >= 0 or 'auto'"),
        ({"depth": "all"}, "depth = 'all'"),
        ({"depth": True}, "depth = True"),
        ({"window": -2}, "window = -2, must be an integer >= 0"),
        ({"window": 2}, "nothing to announce"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(BadConfig, match=words):
        LookAhead(Fake(), [], **options)


# ends ------------------------------------------------------------------------------------------------------------


def left_by_break(ahead):
    for _ in ahead:
        break


def left_by_an_exception(ahead):
    def train():
        for _ in ahead:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def left_by_with(ahead):
    with ahead:
        next(ahead)


def left_by_close(ahead):
    next(ahead)
    ahead.close()
    ahead.close()


def left_in_a_cycle(ahead):
    next(ahead)
    cycle = [ahead]
    cycle.append(cycle)


def left_by_a_generator(ahead):
    def outer():
        yield from ahead

    generator = outer()
    next(generator)
    generator.close()


def left_before_it_began(ahead):
    return


LEFT = [left_by_break, left_by_an_exception, left_by_with, left_by_close, left_in_a_cycle, left_by_a_generator,
        left_before_it_began]  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1, 8, "auto"])
@pytest.mark.parametrize("leave", LEFT, ids=lambda f: f.__name__)
def test_however_it_is_left_no_thread_and_no_pin_stays(leave, depth):
    fake, source = Fake(), Source([Item(i) for i in range(100)])
    leave(LookAhead(fake, source, depth))
    if leave is left_in_a_cycle:
        gc.collect()
    assert lookahead_threads() == []
    assert fake.pins == 0
    assert source.closed == (leave is not left_before_it_began)
    assert all(item.staged is None for item in source.items)


def test_it_may_be_dropped_while_the_loader_is_slow():
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        yield Item(0)
        begun.set()
        go_on.wait()
        yield Item(1)

    fake = Fake()
    ahead = LookAhead(fake, slow(), 2)
    next(ahead)
    begun.wait()
    threading.Timer(0.05, go_on.set).start()
    ahead.close()
    assert fake.pins == 0
    assert lookahead_threads() == []


def test_closed_by_another_thread_while_it_is_waited_for():
    go_on = threading.Event()

    def slow():
        yield Item(0)
        go_on.wait()

    ahead = LookAhead(Fake(), slow(), 1)
    next(ahead)
    threading.Timer(0.05, lambda: (threading.Timer(0.05, go_on.set).start(), ahead.close())).start()
    assert next(ahead, None) is None


def test_dropped_by_its_own_thread():
    """The collector may run anywhere, also on the thread that stages."""
    fake, source = Fake(), Source([Item(i) for i in range(100)])
    held = {"ahead": LookAhead(fake, source, 3)}

    def ids(item):
        if item.number == 2:
            taken.wait()
            held.clear()
        return item

    taken = threading.Event()
    held["ahead"] = LookAhead(fake, source, 3, ids)
    next(held["ahead"])
    taken.set()
    eventually(lambda: not lookahead_threads() and fake.pins == 0 and source.closed == 1)


def test_a_program_that_ends_in_the_middle_ends():
    import subprocess
    import sys

    code = (
        "import embcache as ec, torch, itertools\n"
        "from embcache.lookahead import LookAhead\n"
        "store = ec.EmbeddingStore([ec.TableConfig('a', 9, 4)], backend='reference')\n"
        "batch = lambda i: ec.KeyedJaggedTensor(['a'], torch.tensor([i % 9]), lengths=torch.tensor([1]))\n"
        "ahead = LookAhead(lambda j, overflow: store.stage(j), map(batch, itertools.count()), 2)\n"
        "print(next(ahead).values().tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0]\n", "")


# modules of torch's signature, and torch's loader --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bags of rows", "bags with offsets and weights", "max", "rows"])
def test_drop_in_modules_find_their_rows_staged(kind):
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 30, (4, 3), generator=g) for _ in range(5)]
    if kind == "bags with offsets and weights":
        loader = [(x.reshape(-1), torch.tensor([0, 2, 2, 9]), torch.rand(12, generator=g)) for x in ids]
    else:
        loader = [(x,) for x in ids]

    def make():
        if kind == "rows":
            return ec.Embedding(30, 4, seed=0, backend="reference")
        return ec.EmbeddingBag(30, 4, mode="max" if kind == "max" else "sum", seed=0, backend="reference")

    plain, ahead = make(), make()
    expected = [plain(*batch) for batch in loader]
    stages = ahead.store.stages
    outs = []
    for batch in ahead.store.lookahead(loader, depth=2, ids=lambda batch: ahead.jagged(*batch)):
        outs.append(ahead(*batch).detach().clone())
        assert torch.equal(plain(*batch), outs[-1])  # another store: staged for itself
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    assert ahead.store.stages == stages + 5
    assert torch.equal(ahead(*loader[0]), expected[0])  # released: staged anew
    loader[0][0][:] = loader[1][0]  # overwritten
    assert torch.equal(ahead(*loader[0]), plain(*loader[0]))


def test_an_embedding_takes_ids_alone():
    with pytest.raises(BadJagged, match="ids alone"):
        ec.Embedding(9, 2, backend="reference").jagged(torch.tensor([1]), torch.tensor([0]))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return ec.KeyedJaggedTensor(["a", "b"], torch.tensor([i, i + 1]), lengths=torch.tensor([1, 1]))


def test_the_processes_of_torchs_loader_end_too():
    store = ec.EmbeddingStore(tables(), backend="reference")
    loader = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2)
    for k, batch in enumerate(store.lookahead(loader, depth=2)):
        assert batch.values().tolist() == [k, k + 1]
        if k == 5:
            break
    eventually(lambda: not multiprocessing.active_children())
