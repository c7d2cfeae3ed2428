"""Starting ranks: what ``torchrun`` says in the environment becomes a process group, and a rank that ends badly ends
the others soon, with its name.

    with launch.session() as here:  # in a script: alone, or as one of the ranks that torchrun started
        train(here.rank, here.world, here.mesh)

Ranks that are started again meet under another prefix of the same store, since what the ranks before them left there
points to processes that are gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from embcache.errors import BadConfig, RankFailed
from embcache.lock import FolderLock
from embcache.sharded.faults import watcher

__all__ = ["Launch", "die_with_parent", "failing", "finish", "init", "limit", "session", "under_torchrun"]

TIMEOUT = 15.0  # seconds until a rank that does not come is given up; EMBCACHE_TIMEOUT is another number
LOCK_PATIENCE = 30.0  # seconds in which what the ranks before a restart held becomes free


@dataclass(frozen=True)
class Launch:
    """Where this process stands.

    Args:
        rank, world: its number and how many there are; 0 and 1 when it is alone.
        attempt: how often the ranks were started again.
        store: shared by the ranks of this attempt; None when alone.
        lasting: outlives an attempt: what a rank set there, ranks started again find.
    """

    rank: int = 0
    world: int = 1
    attempt: int = 0
    store: Any = None
    lasting: Any = None

    @property
    def mesh(self) -> Any:
        """The ranks as a device mesh of one dimension, "shard"; None when alone."""
        if self.world == 1:
            return None
        return dist.init_device_mesh("cpu", (self.world,), mesh_dim_names=("shard",))


def under_torchrun() -> bool:
    """Whether the environment says that this is a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def init(timeout: float | None = None) -> Launch:
    """Join the other ranks (gloo), or be alone where there are none. ``timeout`` bounds every collective, and with it
    the time until a rank that hangs is noticed."""
    if not under_torchrun():
        return Launch()
    timeout = limit() if timeout is None else timeout
    environment = os.environ
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        die_with_parent()
    if attempt:
        FolderLock.patience = LOCK_PATIENCE
    if sys.platform == "linux" and environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine, whatever its name resolves to
    lasting = dist.PrefixStore(environment.get("TORCHELASTIC_RUN_ID", "embcache"), _store(rank, timeout))
    store = dist.PrefixStore(f"attempt{attempt}", lasting)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    if world > 1:
        watcher()
    return Launch(rank, world, attempt, store, lasting)


def _store(rank: int, timeout: float) -> Any:
    """The agent's store, which outlives ranks; where there is no agent, rank 0's."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=not agent and rank == 0,
        timeout=timedelta(seconds=max(timeout, 60.0)),  # ranks of many machines do not start in the same second
        wait_for_workers=False,
    )


def limit() -> float:
    """Seconds after which a rank that says nothing counts as hanging."""
    return _seconds("EMBCACHE_TIMEOUT", TIMEOUT)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if value <= 0:
        raise BadConfig(f"{name} = {text!r}, must be a number of seconds")
    return value


def failing(error: BaseException) -> None:
    """This rank stops with ``error``: the others, waiting for it, raise RankFailed with its name and these words."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(Exception):  # the store may be what has failed
            watcher().report(error)


def finish() -> None:
    """Leave the group after the last collective."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            watcher().close()
        dist.destroy_process_group()


@contextlib.contextmanager
def session(timeout: float | None = None) -> Iterator[Launch]:
    """``init`` for a script. A rank whose body raises tells the others and ends at once with status 1: threads that
    wait in a broken group cannot be ended otherwise before its timeout."""
    here = init(timeout)
    try:
        yield here
    except BaseException as error:
        if here.world == 1 or (isinstance(error, SystemExit) and not error.code):
            finish()
            raise
        failing(error)
        _say(here, error)
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
    finish()


def _say(here: Launch, error: BaseException) -> None:
    """On stderr, and where torchrun looks for the reason."""
    with contextlib.suppress(Exception):
        if isinstance(error, RankFailed):  # not this rank's fault: a line is enough
            print(f"rank {here.rank} stops: {error}", file=sys.stderr)
        else:
            print(f"rank {here.rank} of {here.world} stops:", file=sys.stderr)
            traceback.print_exception(error)
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            if os.environ.get("TORCHELASTIC_ERROR_FILE"):
                get_error_handler().record_exception(error)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def die_with_parent(parent: int | None = None) -> None:
    """End this process with the one that started it, however that ends (Linux). For ranks, and for the processes they
    start themselves, which call it first; ``parent`` is the number of that process as it knew it, since it may have
    ended before this is called."""
    if sys.platform != "linux":
        return
    import ctypes

    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)
