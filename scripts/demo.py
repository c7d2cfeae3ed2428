"""The whole way once, on data made on the spot: log -> columns -> DLRM -> test metrics -> report.

The log is in Criteo's format and drawn from a known model, so the best AUC that any model could reach on its test rows
is known, and the demo says how near it came.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dlrm.data import SyntheticConfig, SyntheticLog
from dlrm.run import ClickConfig, ModelConfig, build_trainer, test_loader
from dlrm.source import DataConfig, StageLine, open_data
from embcache.train.charts import duration
from embcache.train.config import TrainConfig
from embcache.train.distributed import Session, open_session
from embcache.train.flags import flag, run
from embcache.train.optimizers import OptimizerConfig
from embcache.train.run import Result, finish, open_run


@dataclass(frozen=True)
class Config:
    """The demo."""

    out: Path = flag(Path("demo"), "folder of the log, the columns and the run")
    rows: int = flag(2_000_000, "rows of the log")
    seed: int = flag(0, "seed of the log and of the training")
    threads: int | None = flag(None, "threads of torch (none: torch decides)")


@dataclass(frozen=True, kw_only=True)
class DemoConfig(ClickConfig):
    """Evaluation, loading and data."""

    data: DataConfig


def settings(config: Config, log: Path) -> DemoConfig:
    """One pass over the data: rates that fall to nothing, small layers, an evaluation every tenth of the way."""
    train = TrainConfig(out=config.out / "run", seed=config.seed, threads=config.threads, log_every=20)
    steps = max(1, int(0.85 * config.rows) // train.global_batch_size)
    return DemoConfig(
        train=replace(train, eval_every=-(-steps // 8)),
        optimizer=OptimizerConfig(lr=0.08, lr_schedule="linear", warmup_steps=min(100, steps // 10)),
        model=ModelConfig(dim=16, bottom_mlp=(64, 16), top_mlp=(128, 64)),
        data=DataConfig(data=(str(log),), columns=config.out / "columns", split="last:0.05,0.1"),
    )


def generate(log: SyntheticLog, path: Path) -> dict[str, float]:
    """Write the log unless it is there already; returns the best possible metrics on its test rows."""
    facts = path.with_name(path.name + ".json")
    if path.exists() and facts.exists():
        known = json.loads(facts.read_text())
        if known["config"] == json.loads(json.dumps(asdict(log.config))):
            return dict(known["best"]["test"])
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path.parent / "columns", ignore_errors=True)  # those of another log
    line = StageLine(sys.stderr)
    written = log.write(path, progress=lambda rows: line("writing", rows, rows / log.rows))
    line.close()
    return dict(written["best"]["test"])


def main(config: Config) -> None:
    began = time.perf_counter()
    with open_session() as session:
        say = speaker(session)
        path = config.out / "log.tsv"
        say(f"1/3  a click log of {config.rows:,} rows in Criteo's format: {path}")
        log = SyntheticLog(SyntheticConfig(rows=config.rows, valid=0.05, test=0.1, seed=config.seed))
        best = session.first(lambda: generate(log, path))

        say("2/3  its lines to columns")
        demo = settings(config, path)
        if not session.restarted:
            session.first(lambda: forget(demo.train.out) if session.is_main else None)
        columns = open_data(demo.data, config.out, log.schema, session=session)

        say("3/3  a DLRM learns to predict the clicks")
        trainer = build_trainer(demo, columns, open_run(demo.train, demo, session=session), session)
        trainer.fit()
        possible = {"auc": best["auc"], "ne": best["ne"], "logloss": best["log_loss"]}
        result = finish(trainer, test_loader(demo, columns, session), demo, "DLRM on a generated click log", possible)
        if session.is_main:
            show(config, result, possible, time.perf_counter() - began)


def forget(folder: Path) -> None:
    """Remove the run of an earlier demo."""
    shutil.rmtree(folder, ignore_errors=True)


def show(config: Config, result: Result, possible: dict[str, float], seconds: float) -> None:
    report = config.out / "report.html"
    shutil.copyfile(result.report, report)
    metrics = result.test.metrics if result.test is not None else {}
    share = (metrics["auc"] - 0.5) / (possible["auc"] - 0.5)
    print(f"\ndone in {duration(seconds)}; open {report} in a browser\n")
    print("                     this model   best possible   base rate alone")
    print(f"test AUC                 {metrics['auc']:.4f}          {possible['auc']:.4f}            0.5000")
    print(f"test NE                  {metrics['ne']:.4f}          {possible['ne']:.4f}            1.0000")
    print(f"\n{share:.1%} of the way from a coin to the best any model could reach on this log\n")
    print("\n".join(result.lines()))


def speaker(session: Session) -> Callable[[str], None]:
    def say(text: str) -> None:
        if session.is_main:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    return say


if __name__ == "__main__":
    run(main, Config, __doc__)
