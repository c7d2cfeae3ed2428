"""Train a click model on your own CSV, TSV or Parquet files, described by a schema.

    python scripts/train_table.py --data clicks.parquet --schema clicks.yaml --split time:1,1 --out runs/mine

The schema names the label, the numbers and the ids, for example:

    label: {column: clicked}
    dense: [{column: price}, {column: age}]
    categorical: [{column: user, encoding: string}, {column: shop, encoding: decimal}]
    delimiter: ","
    header: true
"""

from dataclasses import dataclass
from pathlib import Path

from dlrm.run import ClickConfig, build_trainer, model_name, test_loader
from dlrm.source import DataConfig, open_data
from embcache.train.distributed import open_session
from embcache.train.flags import flag, run
from embcache.train.run import finish, open_run


@dataclass(frozen=True, kw_only=True)
class Config(ClickConfig):
    """Evaluation, loading and the schema."""

    data: DataConfig
    schema: Path = flag(help="YAML or JSON file that describes the columns (or: criteo, avazu)")


def main(config: Config) -> None:
    with open_session() as session:
        checkpoints = open_run(config.train, config, config.storage, session)
        columns = open_data(config.data, config.train.out, config.schema, session=session)

        trainer = build_trainer(config, columns, checkpoints, session)
        trainer.fit()

        result = finish(
            trainer, test_loader(config, columns, session), config, f"{model_name(config)} on {config.data.data[0]}"
        )
        session.say(f"report {result.report}", *result.lines())


if __name__ == "__main__":
    run(main, Config, __doc__)
