"""A training script as torchrun starts it, watched: ``entry.py FOLDER SCRIPT FLAG...``

In FOLDER each rank leaves ``audit-ATTEMPT-RANK.jsonl`` with a line for every step it has trained (step, epoch, batch,
rows of its share), ``pid-ATTEMPT-RANK``, and at the end ``bits-RANK`` with a checksum of all it holds.

ENTRY_HARM="ATTEMPT RANK STEP SECONDS WHAT": after so many seconds from the beginning of that step the rank kills itself
(kill), stops (stop), or that step finds a NaN (nan) or an id out of range (id) in its share of the batch.
ENTRY_DELAYS=SEED: seeded random delays of 0-5 ms before each operation of every lane.
"""

import hashlib
import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

from dlrm.data.loader import Loader
from embcache.train import state
from embcache.train.loop import Trainer

FOLDER = Path(sys.argv[1])
ATTEMPT, RANK = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(os.environ.get("RANK", "0"))
HARM = os.environ.get("ENTRY_HARM", "-1 0 0 0 none").split()


def watch():
    get, train_step, close = Loader.get, Trainer.train_step, Trainer.close
    audit = (FOLDER / f"audit-{ATTEMPT}-{RANK}.jsonl").open("w")
    (FOLDER / f"pid-{ATTEMPT}-{RANK}").write_text(str(os.getpid()))

    def gathering(loader, epoch, t):
        gather, seen = loader.source.gather, []

        class Source:
            def gather(self, rows):
                seen.extend(rows.tolist())
                return gather(rows)

        class Seen:
            source = Source()

            def __getattr__(self, name):
                return getattr(loader, name)

            def __len__(self):
                return len(loader)

        batch = get(Seen(), epoch, t)
        batch.audit = {"epoch": epoch, "batch": t, "rows": seen}
        return batch

    def stepping(trainer, batch):
        step = trainer.progress.step + 1
        if [ATTEMPT, RANK, step] == [int(word) for word in HARM[:3]]:
            harm(batch)
        loss = train_step(trainer, batch)
        audit.write(json.dumps({"step": step, **batch.audit}) + "\n")
        audit.flush()
        return loss

    def closing(trainer):
        (FOLDER / f"bits-{RANK}").write_text(checksum(trainer))
        close(trainer)

    Loader.get, Trainer.train_step, Trainer.close = gathering, stepping, closing


def harm(batch):
    what = HARM[4]
    if what in ("kill", "stop"):
        number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
        threading.Timer(float(HARM[3]), end, (number,)).start()
    elif what == "nan":
        batch.dense[0] = float("nan")
    elif what == "id":
        batch.sparse.values()[0] = 1 << 30


def end(number):
    (FOLDER / "harmed").touch()
    os.kill(os.getpid(), number)


def checksum(trainer):
    digest = hashlib.sha256()
    for name, tensor in state.dense_state(trainer.task.model).items():
        digest.update(name.encode() + tensor.detach().numpy().tobytes())
    for store in trainer.stores:
        local = getattr(store, "local", store)
        digest.update(str(list(local.steps)).encode())
        for t, table in enumerate(local.tables):
            rows = {}
            for ids, block in local.raw_rows(t, 1 << 16):
                width = table.meta_offset + table.meta_bytes
                rows.update(zip(ids.tolist(), map(bytes, block[:, :width].numpy()), strict=True))
            digest.update(b"".join(str(key).encode() + rows[key] for key in sorted(rows)))
    return digest.hexdigest()


def delay():
    if "ENTRY_DELAYS" in os.environ:
        from embcache.sharded.lanes import Lanes

        begin = Lanes.__init__
        Lanes.__init__ = lambda self, *a, **k: begin(
            self, *a, **{**k, "seed_delays": (int(os.environ["ENTRY_DELAYS"]), 0.005)}
        )


if __name__ == "__main__":
    watch()
    delay()
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
