"""Running a training script under torchrun, watched by ``entry.py``."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRY = Path(__file__).with_name("entry.py")
SMALL = {
    "samples": 4000, "rows": 900, "n-tables": 3, "n-dense": 2, "dim": 4, "global-batch-size": 100, "log-every": 5,
    "bottom-mlp": "8,4", "top-mlp": 8, "lr": 0.05, "valid": 0.1, "test": 0.1, "threads": 1, "eval-batch-size": 150,
    "epochs": 1, "steps": 30, "eval-every": 10,
}  # fmt: skip


@dataclass
class Ended:
    """A run that has ended."""

    status: int
    out: str
    err: str
    seconds: float
    folder: Path

    @property
    def lines(self):
        """The last lines: words and numbers."""
        found = re.findall(r"^(loss|test [\w@]+) (\S+)$", self.out, re.MULTILINE)
        return {name.removeprefix("test "): float(value) for name, value in found}

    def points(self, out):
        """The curves, without what the clock decides."""
        lines = [json.loads(line) for line in (Path(out) / "history.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if "second" not in k} for line in lines]

    def bits(self):
        """By rank, a checksum of all it held at the end."""
        return [path.read_text() for path in sorted(self.folder.glob("bits-*"))]

    def audit(self):
        """(attempt, step) -> epoch, batch and rows of all ranks in rank order, where all have trained it."""
        found = {}
        for path in sorted(self.folder.glob("audit-*.jsonl")):
            attempt, rank = map(int, path.stem.split("-")[1:])
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                found.setdefault((attempt, entry["step"]), {})[rank] = entry
        return found

    def history(self):
        """Step -> the rows that the committed history has trained: an attempt counts up to where the next began."""
        audit, steps = self.audit(), {}
        world = max(len(entries) for entries in audit.values())
        attempts = sorted({attempt for attempt, _ in audit})
        begins = {a: min(step for attempt, step in audit if attempt == a) for a in attempts}
        for a, following in zip(attempts, [*attempts[1:], None], strict=True):
            for (attempt, step), entries in audit.items():
                if attempt == a and (following is None or step < begins[following]):
                    assert len(entries) == world, f"step {step} of attempt {a} was not trained by all"
                    assert step not in steps
                    steps[step] = [row for rank in sorted(entries) for row in entries[rank]["rows"]]
        return steps


def flags(values):
    """Command-line words."""
    words = []
    for name, value in values.items():
        words += [f"--{name}"] if value is True else [f"--no-{name}"] if value is False else [f"--{name}", str(value)]
    return words


def start(world, folder, *, script="train_synthetic", restarts=0, harm=None, delays=None, **settings):
    """Start a script on ``world`` ranks (0: without torchrun)."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {**(SMALL if script == "train_synthetic" else {}), "tensorboard": False}
    given.update({name.replace("_", "-"): value for name, value in settings.items()})
    command = [str(ENTRY), str(folder), str(ROOT / "scripts" / f"{script}.py"), *flags(given)]
    if world:
        options = ["--standalone", "--nproc-per-node", str(world), "--max-restarts", str(restarts)]
        options += ["--monitor-interval", "0.05"]
        command = ["-m", "torch.distributed.run", *options, *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {} if harm is None else {"ENTRY_HARM": harm}
    environment |= {} if delays is None else {"ENTRY_DELAYS": str(delays)}
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=environment, start_new_session=True)  # fmt: skip


def torchrun(world, folder, *, limit=600, **options):
    """What ``start`` starts, until it ends."""
    begun = time.monotonic()
    process = start(world, folder, **options)
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {limit} s\n{err[-4000:]}") from None
    return Ended(process.returncode, out, err, time.monotonic() - begun, folder)
