"""Kill a training at random instants, open what it left, compare, go on: until the number of kills is reached.

    python tests/crash/crash_harness.py --trials 200

One process imports everything, computes what each step must look like, and forks the training for each trial, so that a
trial costs a fraction of a second. A trial is killed by SIGKILL at a random time, or a random moment after it said that
it begins a commit, has one behind it (a merge follows) or closes; its two loader processes stay alive, also while the
next trial opens the store. Checked at each opening: the generation is at least the last one whose commit returned, and
every bit is that of the undisturbed run at its step. A run that reaches its end must end in the undisturbed run's
bits; then the next one begins in a new folder, stored in another way. In some trials a reader opens the store again and
again beside the training, and must always see a whole generation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODES = ["early", "time", "time", "commit", "commit", "merge", "merge", "close", "whole group"]


@dataclass
class Run:
    """One folder, from its first step to its last."""

    folder: Path
    job: Any
    acknowledged: int = 0
    groups: list[int] = field(default_factory=list)


@dataclass
class Seen:
    """What a process said before it ended."""

    messages: list[list[Any]] = field(default_factory=list)
    status: int = 0

    def last(self, *kinds: str) -> Any:
        return next((m for m in reversed(self.messages) if m[0] in kinds), None)


class Failure(RuntimeError):
    """A trial found what must not be."""


def fork(body: Callable[[Callable[..., None]], None]) -> tuple[int, int]:
    """Run ``body(report)`` in a child of its own process group; (pid, descriptor its messages come from)."""
    receive, send = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(send)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid, receive
    status = 1
    try:
        os.setpgid(0, 0)
        os.close(receive)

        def report(*message: Any) -> None:
            os.write(send, (json.dumps(message) + "\n").encode())

        try:
            body(report)
            report("done")
            status = 0
        except BaseException:
            report("failed", traceback.format_exc()[-3000:])
    finally:
        os._exit(status)


def watch(pid: int, receive: int, kill_at: Callable[[list[Any] | None], float | None], whole_group: bool) -> Seen:
    """Read messages until the process ends, or kill it when the time that ``kill_at`` last gave has come."""
    seen, rest = Seen(), b""
    deadline = kill_at(None)
    killed = False
    while True:
        wait = 60.0 if deadline is None or killed else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([receive], [], [], wait)
        if not ready:
            if deadline is None:
                os.killpg(pid, signal.SIGKILL)
                raise Failure(f"nothing was heard for a minute after {seen.messages[-1:]}")
            (os.killpg if whole_group else os.kill)(pid, signal.SIGKILL)
            killed = True
            break
        data = os.read(receive, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            seen.messages.append(json.loads(line))
            deadline = kill_at(seen.messages[-1]) or deadline
    _, seen.status = os.waitpid(pid, 0)
    tail = b""
    while select.select([receive], [], [], 0)[0] and (data := os.read(receive, 1 << 16)):  # said just before the end
        tail += data
    seen.messages += [json.loads(line) for line in (rest + tail).split(b"\n")[:-1]]
    os.close(receive)
    return seen


def killer(mode: str, rng: random.Random) -> Callable[[list[Any] | None], float | None]:
    """When to kill: a time after the start, or after a message of the training."""
    start = time.monotonic()
    skip = rng.randrange(6)

    def kill_at(message: list[Any] | None) -> float | None:
        nonlocal skip
        if message is None:
            return start + rng.uniform(0.0, 0.15) if mode == "early" else None
        if mode in ("time", "whole group") and message[0] == "opened":
            return time.monotonic() + rng.uniform(0.0, 0.6)
        if mode == "commit" and message[0] == "committing":
            skip -= 1
            if skip < 0:
                skip = 1 << 30
                return time.monotonic() + rng.uniform(0.0, 0.02)
        if mode == "merge" and message[0] in ("committed", "begun"):
            skip -= 2
            if skip < 0:
                skip = 1 << 30
                return time.monotonic() + rng.uniform(0.0, 0.25)
        if mode == "close" and message[0] == "closing":
            return time.monotonic() + rng.uniform(0.0, 0.03)
        return None

    return kill_at


class Harness:
    """The trials: ``run`` does them and returns counts of what happened."""

    def __init__(self, seed: int, base: Path) -> None:
        import crash_run
        import torch

        torch.set_num_threads(1)
        self.crash_run, self.base = crash_run, base
        self.rng = random.Random(seed)
        self.expected = crash_run.control()
        self.counts: Counter[str] = Counter()
        self.runs = 0
        self.readers: list[tuple[int, int]] = []

    def run(self, trials: int) -> Counter[str]:
        current: Run | None = None
        while self.counts["kills"] < trials:
            if current is None:
                job = self.crash_run.JOBS[self.runs % len(self.crash_run.JOBS)]
                current = Run(self.base / f"run{self.runs}", job)
                self.runs += 1
            if self.trial(current):
                self.finish(current)
                current = None
        if current is not None:
            while not self.trial(current, "never"):
                pass
            self.finish(current)
        return self.counts

    def trial(self, run: Run, mode: str | None = None) -> bool:
        """One process; whether it came to the end."""
        mode = mode or self.rng.choice(MODES)
        pid, receive = fork(lambda report: self.crash_run.go_on(run.folder, run.job, self.expected, report))
        run.groups.append(pid)
        reader = self.start_reader(run) if run.acknowledged and self.rng.random() < 0.15 else None
        seen = watch(pid, receive, killer(mode, self.rng), mode == "whole group")
        if reader is not None:
            self.stop_reader(*reader)
        self.judge(run, seen)
        ended = os.WIFEXITED(seen.status) and os.WEXITSTATUS(seen.status) == 0
        if not ended:
            self.counts["kills"] += 1
            self.counts[f"killed: {mode}"] += 1
            last = seen.last("opened", "step", "committing", "committed", "begun", "closing")
            self.counts[f"after: {last[0] if last else 'fork'}"] += 1
        return ended

    def judge(self, run: Run, seen: Seen) -> None:
        failed = seen.last("failed")
        if failed is not None:
            raise Failure(f"{run.job}, {run.folder}, acknowledged {run.acknowledged}:\n{failed[1]}")
        if os.WIFSIGNALED(seen.status) and os.WTERMSIG(seen.status) != signal.SIGKILL:
            raise Failure(f"{run.job}: ended by signal {os.WTERMSIG(seen.status)}")
        opened = seen.last("opened")
        if opened is not None:
            self.counts["openings"] += 1
            if opened[1] < run.acknowledged:
                raise Failure(f"{run.job}: generation {run.acknowledged} was committed, {opened[1]} came back")
            for group in run.groups[:-1]:  # loader processes of trials before were alive until here
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            del run.groups[:-1]
        closing = seen.last("closing")
        self.counts["merges of runs that came to their end"] += closing[1] if closing else 0
        committed = [m[1] for m in seen.messages if m[0] == "committed"]
        run.acknowledged = max([run.acknowledged, *committed])
        self.counts["commits"] += sum(m[0] in ("committed", "begun") for m in seen.messages)

    def start_reader(self, run: Run) -> tuple[int, int]:
        def read(report: Callable[..., None]) -> None:
            ended = False

            def end(*_: Any) -> None:
                nonlocal ended
                ended = True

            signal.signal(signal.SIGTERM, end)
            number = 0
            while not ended:
                store = self.crash_run.ec.EmbeddingStore.open(run.folder, readonly=True)
                step = store.checkpoints.latest.notes["step"]
                bits = [self.crash_run.row_bits(store, t, ids) for t, ids in enumerate(self.crash_run.all_ids())]
                count = sum(len(part) for part in bits)
                whole = b"".join(part.tobytes() for part in bits)
                if whole != self.expected[step][-count:].tobytes():
                    raise AssertionError(f"a reader saw other rows at step {step}")
                if store.generation < number:
                    raise AssertionError(f"a reader saw generation {store.generation} after {number}")
                number = store.generation
                store.close()
                report("read", number)

        return fork(read)

    def stop_reader(self, pid: int, receive: int) -> None:
        os.kill(pid, signal.SIGTERM)
        seen = watch(pid, receive, lambda message: None, False)
        if seen.status or seen.last("failed"):
            raise Failure(f"reader: {seen.last('failed') or seen.status}")
        self.counts["reads beside the training"] += len(seen.messages) - 1

    def finish(self, run: Run) -> None:
        """The run is at its end: nobody else of it lives, and a reader sees its last step."""
        for group in run.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

        def last(report: Callable[..., None]) -> None:
            again = self.crash_run.opened(run.folder, run.job, self.expected)
            if again.step != self.crash_run.STEPS:
                raise AssertionError(f"the finished run came back at step {again.step}")
            again.store.close()

        pid, receive = fork(last)
        seen = watch(pid, receive, lambda message: None, False)
        if seen.status:
            raise Failure(f"{run.job} at its end: {seen.last('failed')}")
        self.counts["runs to the end"] += 1
        shutil.rmtree(run.folder)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where the stores lie (default: a temporary folder); kept after a failure")
    args = parser.parse_args(argv)
    base = Path(args.folder or tempfile.mkdtemp(prefix="embcache-crash-"))
    base.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent.parent)]
    start = time.monotonic()
    try:
        counts = Harness(args.seed, base).run(args.trials)
    except Failure as failure:
        print(f"FAILED (seed {args.seed}, files in {base}): {failure}")
        return 1
    shutil.rmtree(base, ignore_errors=True)
    for what, number in sorted(counts.items()):
        print(f"{what}: {number}")
    print(f"{args.trials} kills in {time.monotonic() - start:.0f} s, every bit as committed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
