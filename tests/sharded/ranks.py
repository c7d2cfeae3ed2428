"""Run a function on W ranks: real processes, gloo on loopback, one thread each.

    def case(rank, start):                       # in a test module; rank is a Rank
        lanes = rank.lanes()
        ...
        return something that pickles

    results = ranks.run(2, case, start=3)        # or "module:case"; one result a rank, in rank order
    results = ranks.run(2, case, delays=7)       # seeded random delays of 0-5 ms before each operation of every lane

A function that raises on a rank, a rank that dies or takes longer than ``limit`` seconds fails the run: all ranks are
killed and RanksFailed shows the end of what each of them printed. To kill, stop or watch ranks, ``ranks.start`` returns
at once and ``wait`` gives what became of each.

One process imports torch and the library once and is forked for every rank, so that a run costs a fraction of a second
instead of an import a rank. Ranks start as under torchrun: the same environment, a store that outlives them.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_DELAY = 0.005
GRACE = 3.0  # seconds the others have to say what they saw once a rank has failed


class RanksFailed(AssertionError):
    """A rank raised, died or took too long."""


@dataclass
class Rank:
    """What a function sees of its rank. The default process group is up."""

    rank: int
    world: int
    folder: Path  # shared by the ranks of a run, removed after it
    delays: int | None = None

    def lanes(self, **options: Any) -> Any:
        """Lanes over the default group, with the delays the run asked for."""
        from embcache.sharded.lanes import Lanes

        if self.delays is not None:
            options.setdefault("seed_delays", (self.delays, MAX_DELAY))
        return Lanes(**options)

    def note(self, name: str, text: str = "") -> None:
        """Tell the test something while the ranks run: it waits for it with ``Ranks.noted``."""
        path = self.folder / f"note-{name}-{self.rank}"
        path.with_suffix(".tmp").write_text(text, encoding="utf-8")
        path.with_suffix(".tmp").rename(path)


@dataclass
class Outcome:
    """What became of a rank: ``value``, or ``error`` (type name and message), or ``status`` as waitpid gives it."""

    rank: int
    pid: int
    status: int
    seconds: float  # from the start of the run to the end of the process
    value: Any = None
    error: tuple[str, str] | None = None
    printed: str = ""

    @property
    def signal(self) -> int | None:
        """The signal that ended it."""
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None


@dataclass
class Ranks:
    """Ranks that run."""

    pids: list[int]
    folder: Path
    own_folder: bool
    began: float
    ended: dict[int, tuple[int, float]] = field(default_factory=dict)  # pid -> status, seconds

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank alone (SIGSTOP hangs it)."""
        os.kill(self.pids[rank], number)

    def kill_all(self) -> None:
        """End every rank and what it started."""
        for pid in self.pids:
            if pid not in self.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def noted(self, name: str, rank: int, limit: float = 30.0) -> str:
        """Wait for a note of a rank; its text."""
        path = self.folder / f"note-{name}-{rank}"
        end = time.monotonic() + limit
        while not path.exists():
            if time.monotonic() > end or self.pids[rank] in self.ended:
                self.kill_all()
                raise RanksFailed(f"rank {rank} did not note {name!r}\n{self._printed(rank)}")
            _server().poll(0.01)
        return path.read_text(encoding="utf-8")

    def wait(self, limit: float = 60.0, grace: float | None = None) -> list[Outcome]:
        """Until all have ended; those that have not after ``limit`` seconds (or, with ``grace``, so many seconds after
        the first that failed) are killed."""
        end = time.monotonic() + limit
        while len(self.ended) < len(self.pids):
            _server().poll(max(0.0, min(end - time.monotonic(), 1.0)))
            if grace is not None and any(status for status, _ in self.ended.values()):
                end, grace = min(end, time.monotonic() + grace), None
            if time.monotonic() >= end:
                self.kill_all()
                end = time.monotonic() + 10.0
        outcomes = [self._outcome(rank) for rank in range(len(self.pids))]
        if self.own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        return outcomes

    def _printed(self, rank: int) -> str:
        path = self.folder / f"rank-{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _outcome(self, rank: int) -> Outcome:
        status, seconds = self.ended[self.pids[rank]]
        outcome = Outcome(rank, self.pids[rank], status, seconds, printed=self._printed(rank))
        path = self.folder / f"rank-{rank}.result"
        if path.exists():
            good, value = pickle.loads(path.read_bytes())
            if good:
                outcome.value = value
            else:
                outcome.error = value
        return outcome


def start(
    world: int,
    target: Callable[..., Any] | str,
    *,
    delays: int | None = None,
    env: dict[str, str] | None = None,
    folder: Path | None = None,
    **arguments: Any,
) -> Ranks:
    """Start ``target(Rank, **arguments)`` on every rank."""
    own = folder is None
    folder = Path(tempfile.mkdtemp(prefix="ranks-")) if folder is None else folder
    if callable(target):
        target = f"{target.__module__}:{target.__qualname__}"
    job = {
        "world": world, "target": target, "delays": delays, "folder": str(folder), "env": env or {}, "path": sys.path,
        "arguments": pickle.dumps(arguments).hex(),
    }  # fmt: skip
    return _server().start(job, folder, own)


def run(
    world: int,
    target: Callable[..., Any] | str,
    *,
    delays: int | None = None,
    limit: float = 60.0,
    env: dict[str, str] | None = None,
    folder: Path | None = None,
    **arguments: Any,
) -> list[Any]:
    """The results of ``target(Rank, **arguments)``, in rank order."""
    ranks = start(world, target, delays=delays, env=env, folder=folder, **arguments)
    outcomes = ranks.wait(limit, grace=GRACE)
    if any(o.status or o.error for o in outcomes):
        raise RanksFailed("\n".join(_story(o) for o in outcomes))
    return [o.value for o in outcomes]


def _story(outcome: Outcome) -> str:
    end = f"signal {outcome.signal}" if outcome.signal else f"status {os.waitstatus_to_exitcode(outcome.status)}"
    tail = "\n    ".join(outcome.printed.splitlines()[-25:])
    return f"rank {outcome.rank}: {end} after {outcome.seconds:.1f} s, {outcome.error or ''}\n    {tail}"


# ---- the process that is forked


class _Server:
    """The test's end of it."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
        )
        self.rest = b""
        self.lines: list[Any] = []
        self.running: dict[int, Ranks] = {}
        self.runs = 0

    def start(self, job: dict[str, Any], folder: Path, own: bool) -> Ranks:
        self.runs += 1
        job["env"] = {
            "WORLD_SIZE": str(job["world"]), "LOCAL_WORLD_SIZE": str(job["world"]), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": f"{os.getpid()}.{self.runs}",
            "GLOO_SOCKET_IFNAME": "lo", **job["env"],
        }  # fmt: skip
        began = time.monotonic()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        while not any("pids" in line for line in self.lines):
            self._read(60.0)
        found = next(line for line in self.lines if "pids" in line)
        self.lines.remove(found)
        ranks = Ranks(found["pids"], folder, own, began)
        self.running.update(dict.fromkeys(ranks.pids, ranks))
        self._settle()
        return ranks

    def poll(self, seconds: float) -> None:
        """Take in what has been said, waiting so long for a first word."""
        self._read(seconds)
        self._settle()

    def _settle(self) -> None:
        for line in [line for line in self.lines if line.get("ended") in self.running]:
            self.lines.remove(line)
            ranks = self.running.pop(line["ended"])
            ranks.ended[line["ended"]] = (line["status"], time.monotonic() - ranks.began)

    def _read(self, seconds: float) -> None:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            raise RanksFailed("the process that starts ranks has ended")
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.lines += [json.loads(line) for line in lines]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


_SERVERS: dict[int, _Server] = {}


def _server() -> _Server:
    if os.getpid() not in _SERVERS:
        server = _SERVERS[os.getpid()] = _Server()
        atexit.register(server.close)
    return _SERVERS[os.getpid()]


def _serve() -> None:
    """Fork ranks on request and report their ends, until the test closes its end."""
    import torch
    import torch._dynamo  # DistributedDataParallel asks for it
    import torch.distributed

    import embcache  # noqa: F401

    torch.set_num_threads(1)
    alive: set[int] = set()
    for request in _requests(alive):
        pids = [_fork(request, rank) for rank in range(request["world"])]
        alive.update(pids)
        print(json.dumps({"pids": pids}), flush=True)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _requests(alive: set[int]) -> Iterator[dict[str, Any]]:
    rest = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.005 if alive else None)
        if ready:
            data = os.read(0, 1 << 20)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield json.loads(line)
        for pid in list(alive):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                alive.remove(pid)
                print(json.dumps({"ended": pid, "status": status}), flush=True)


def _fork(job: dict[str, Any], rank: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        folder = Path(job["folder"])
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(job["env"], RANK=str(rank), LOCAL_RANK=str(rank))
        sys.path[:] = job["path"]
        status = _work(job, Rank(rank, job["world"], folder, job["delays"]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _work(job: dict[str, Any], rank: Rank) -> int:
    result: tuple[bool, Any]
    try:
        _connect()
        module, _, name = job["target"].partition(":")
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        result = True, function(rank, **pickle.loads(bytes.fromhex(job["arguments"])))
        payload = pickle.dumps(result)
    except BaseException as error:
        traceback.print_exc()
        payload = pickle.dumps((False, (type(error).__name__, str(error))))
        result = False, None
    path = rank.folder / f"rank-{rank.rank}.result"
    path.with_suffix(".part").write_bytes(payload)
    path.with_suffix(".part").rename(path)
    return 0 if result[0] else 1


def _connect() -> None:
    from datetime import timedelta

    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefix = f"{os.environ['TORCHELASTIC_RUN_ID']}/attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    timeout = timedelta(seconds=float(os.environ.get("RANKS_TIMEOUT", "15")))
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=world, timeout=timeout)


if __name__ == "__main__":
    _serve()
