"""What every benchmark here shares: contestants in processes of their own, measured in turn, compared by ratios.

A *contestant* is one implementation of one workload. It lives in a worker process, of this interpreter or of another
one that has the peer installed (``--peer-python``), and answers calls over a pipe: one JSON object a line. Contestants
are measured round by round, in an order that rotates, so that a disturbance of the machine meets all of them; what is
reported is the median time and the median over rounds of the ratio to one of them, with the spread of both.

A script that uses it starts its workers from itself::

    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        serve({"build": build, "run": run})          # in the worker: functions of JSON values
    else:
        with Worker(__file__, python=args.peer_python) as peer:      # in the parent
            peer.call("build", name="fbgemm", rows=1_000_000)
            seconds = peer.call("run", steps=8)       # a list of seconds a step

Worker processes import nothing of this project unless their handlers do, so a peer's interpreter needs only the peer
and numpy. Exceptions of a handler are raised in the parent as :class:`WorkerError` with the worker's traceback.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Handler = Callable[..., Any]


class WorkerError(RuntimeError):
    """A worker's handler raised, or the worker died; the message holds its traceback or exit status."""


class Worker:
    """A process that runs `script --worker` and answers :meth:`call` until closed.

    `python` is the interpreter (default: this one). The worker's own stdout goes to its stderr, which is passed
    through, so that a library that prints cannot disturb the protocol. `env` adds environment variables.
    """

    def __init__(
        self, script: str | Path, python: str | None = None, env: Mapping[str, str] | None = None, quiet: bool = False
    ) -> None:
        command = [python or sys.executable, str(script), "--worker"]
        environment = {**os.environ, **(env or {})}
        if python:  # a foreign interpreter must find its own packages only
            environment.pop("PYTHONPATH", None)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
            env=environment,
        )

    def call(self, function: str, **arguments: Any) -> Any:
        """Runs the handler `function` in the worker and returns its (JSON) result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"call": function, "arguments": arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(f"worker ended with status {self.process.wait()} in {function!r}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{function!r} failed in the worker:\n{answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """Ends the worker and waits for it, so that its memory is free for the next one."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it died with a call unread
                self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(handlers: Mapping[str, Handler]) -> None:
    """The worker's side: answers calls from stdin until it closes."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries go to stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"result": handlers[request["call"]](**request["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def have_module(python: str | None, module: str) -> bool:
    """Whether the interpreter `python` (None: this one) can find `module` (it is not imported)."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python or sys.executable, "-c", code], capture_output=True).returncode == 0


def time_steps(step: Callable[[int], object], first: int, steps: int) -> list[float]:
    """Seconds of each call of `step(first)` ... `step(first + steps - 1)`."""
    seconds = []
    for i in range(first, first + steps):
        start = time.perf_counter()
        step(i)
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(
    contestants: Mapping[str, Callable[[int], Sequence[float]]],
    rounds: int,
    progress: Callable[[str], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds a step of each contestant and round: the median of what `contestants[name](round)` returns.

    Each round runs all of them, the order rotated by one place each round.

    >>> measure({"a": lambda r: [1.0, 3.0, 2.0], "b": lambda r: [4.0]}, rounds=2)
    {'a': [2.0, 2.0], 'b': [4.0, 4.0]}
    """
    names = list(contestants)
    result: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        shift = round_ % len(names)
        for name in names[shift:] + names[:shift]:
            result[name].append(statistics.median(contestants[name](round_)))
            if progress is not None:
                progress(f"round {round_ + 1}/{rounds} {name}: {result[name][-1] * 1e3:.2f} ms")
    return result


def ratio(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """How many times faster `seconds` is than `base`: median, lower and upper quartile of the rounds' ratios.

    >>> ratio([1.0, 1.0, 2.0], [3.0, 2.0, 2.0])
    (2.0, 1.5, 2.5)
    """
    quotients = [b / s for s, b in zip(seconds, base, strict=True)]
    return statistics.median(quotients), float(np.quantile(quotients, 0.25)), float(np.quantile(quotients, 0.75))


def noise(seconds: Sequence[float]) -> float:
    """Spread of the rounds: interquartile range over the median.

    >>> noise([1.0, 1.0, 1.0])
    0.0
    """
    q = np.quantile(seconds, [0.25, 0.5, 0.75])
    return float((q[2] - q[0]) / q[1])


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain-text table, first column left, the rest right aligned.

    >>> print(format_table(["what", "ms"], [["ours", 1.5], ["peer", "12"]]))
    what   ms
    ----  ---
    ours  1.5
    peer   12
    """
    cells = [[str(c) for c in header], *[[str(c) for c in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *[line(r) for r in cells[1:]]])


def machine() -> dict[str, Any]:
    """The machine as a reader of the numbers must know it: processor, cores, vector extensions, memory."""
    info: dict[str, Any] = {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in lines}
        info["processor"] = fields.get("model name", "unknown")
        flags = set(fields.get("flags", fields.get("Features", "")).split())
        wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
        info["extensions"] = [flag for flag in wanted if flag in flags]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        info["memory_gib"] = round(int(meminfo.read_text().split()[1]) / 2**20, 1)
    return info


def zipf_ids(rng: np.random.Generator, n: int, rows: int, alpha: float = 1.05) -> np.ndarray:
    """`n` int64 ids in [0, rows), bounded power law with exponent `alpha` != 1 (NVIDIA's generator), scattered.

    The rank r of an id has probability ~ r^-alpha; ranks are spread over the table by a fixed odd multiplier (a
    permutation where it has no common divisor with `rows`), so that frequent rows are not neighbours.
    """
    gamma = 1.0 - alpha
    u = rng.random(n)
    rank = np.floor((u * (float(rows) ** gamma - 1.0) + 1.0) ** (1.0 / gamma)).astype(np.int64)
    return (np.minimum(rank, rows - 1) * 2_654_435_761) % rows


def write_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """Writes `result` with the machine's description beside it."""
    Path(path).write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
