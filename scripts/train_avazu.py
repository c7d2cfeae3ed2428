"""Train a click model on an Avazu log (CSV with its header, plain, .gz, or Parquet).

python scripts/train_avazu.py --data train.gz --split time:1,1 --out runs/avazu --lr 0.02 --eval-every 1000 --patience 3
"""

from dataclasses import dataclass

from dlrm.run import ClickConfig, build_trainer, model_name, test_loader
from dlrm.source import DataConfig, open_data
from embcache.train.distributed import open_session
from embcache.train.flags import run
from embcache.train.run import finish, open_run


@dataclass(frozen=True, kw_only=True)
class Config(ClickConfig):
    """Evaluation and loading."""

    data: DataConfig


def main(config: Config) -> None:
    with open_session() as session:
        # The run's folder: config.yaml now, checkpoints and curves on the way, report.html at the end.
        checkpoints = open_run(config.train, config, config.storage, session)

        # Log lines to columns, once; later runs with the same --columns start at once.
        columns = open_data(config.data, config.train.out, "avazu", session=session)

        # Tables, model, loaders, optimizers.
        trainer = build_trainer(config, columns, checkpoints, session)
        trainer.fit()

        # The best weights (or the last) on the test rows.
        result = finish(trainer, test_loader(config, columns, session), config, f"{model_name(config)} on an Avazu log")
        session.say(f"report {result.report}", *result.lines())


if __name__ == "__main__":
    run(main, Config, __doc__)
