"""What ranks under torchrun do in test_launch.py: three attempts, of which two end badly.

torchrun --standalone --nproc-per-node 2 --max-restarts 2 tests/sharded/launch_run.py FOLDER
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from embcache.errors import RankFailed
from embcache.lock import FolderLock
from embcache.sharded import launch
from embcache.sharded.lanes import Lanes

CHILD = "import time; from embcache.sharded.launch import die_with_parent; die_with_parent({parent}); time.sleep(600)"


def note(folder: Path, name: str, value: object) -> None:
    part = folder / f"{name}.part"
    part.write_text(json.dumps(value), encoding="utf-8")
    part.rename(folder / f"{name}.json")


def main(folder: Path) -> None:
    with launch.session() as here:
        lanes = Lanes(here.mesh)
        before = here.lasting.check(["began"])
        lanes.control.barrier()
        here.lasting.set("began", "yes")
        held = FolderLock.take(folder / f"rank-{here.rank}")
        total = int(lanes.dense.header([[here.rank + 1]] * here.world).sum())
        note(folder, f"attempt-{here.attempt}-{here.rank}", [here.world, total, before, os.getpid()])
        if here.rank == 1 and here.attempt == 0:
            child = subprocess.Popen([sys.executable, "-c", CHILD.format(parent=os.getpid())])
            note(folder, "child", child.pid)
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        if here.rank == 1 and here.attempt == 1:
            raise ValueError("row 7 is odd")
        try:
            lanes.rows.barrier()
        except RankFailed as error:
            note(folder, f"told-{here.attempt}-{here.rank}", str(error))
            raise
        lanes.close()
        del held
    note(folder, f"finished-{here.rank}", here.attempt)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
