"""Train a click model on an endless generated log whose best reachable AUC is known; nothing is written but the run.

python scripts/train_synthetic.py --samples 1_000_000 --rows 1_000_000 --dim 16 --out runs/synthetic

Tables may be far larger than memory; 10^12 parameters:

python scripts/train_synthetic.py --samples 2_000_000 --rows 8_000_000_000 --dim 128 --steps 500 --out runs/trillion \\
    --tiers ram,lmdb --cache-bytes 2GiB --checkpoint-every 100
"""

from dataclasses import dataclass

from dlrm.data.synthetic import SyntheticConfig, SyntheticLog
from dlrm.run import ClickConfig, build_trainer, test_loader
from embcache.train.distributed import open_session
from embcache.train.flags import flag, run
from embcache.train.run import finish, open_run


@dataclass(frozen=True)
class Config(ClickConfig):
    """The log."""

    samples: int = flag(1_000_000, "samples of the log; the last ones validate and test")
    rows: int = flag(1_000_000, "rows of all tables together")
    n_tables: int = flag(26, "tables, all of one size")
    n_dense: int = flag(13, "dense features")
    alpha: float = flag(1.05, "skew of the ids' popularity")
    click_rate: float = flag(0.25, "share of clicks")
    drift: float = flag(0.0, "share of a table that the popularity moves by in a million samples")
    valid: float = flag(0.02, "last share of the samples that validates")
    test: float = flag(0.05, "last share of the samples that tests")
    log_seed: int = flag(0, "seed of the log")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_tables < 1 or self.rows < 3 * self.n_tables:
            raise ValueError(f"--rows {self.rows}: at least 3 for each of the {self.n_tables} tables")


def generated(config: Config) -> SyntheticLog:
    # One row of each table stands for a missing id.
    sizes = (config.rows // config.n_tables - 1,) * config.n_tables
    return SyntheticLog(
        SyntheticConfig(
            rows=config.samples,
            tables=sizes,
            n_dense=config.n_dense,
            alpha=config.alpha,
            click_rate=config.click_rate,
            drift=config.drift,
            valid=config.valid,
            test=config.test,
            seed=config.log_seed,
        )
    )


def main(config: Config) -> None:
    with open_session() as session:
        checkpoints, log = open_run(config.train, config, config.storage, session), generated(config)
        trainer = build_trainer(config, log, checkpoints, session)
        trainer.fit()

        best = log.best("test") if "test" in log.splits else {}
        result = finish(trainer, test_loader(config, log, session), config, "A generated click log", best)
        lines = [f"report {result.report}"]
        if best:
            lines.append(f"best possible auc {best['auc']:.4f}, ne {best['ne']:.4f}, logloss {best['log_loss']:.4f}")
        session.say(*lines, *result.lines())


if __name__ == "__main__":
    run(main, Config, __doc__)
