"""Click logs: schemas, streaming preprocessing to a memory-mapped cache, a loader, and a synthetic log."""

from dlrm.data.batch import ClickBatch
from dlrm.data.cache import ColumnCache, with_splits
from dlrm.data.errors import (
    CacheVersion,
    CorruptCache,
    CorruptInput,
    DataError,
    MalformedRow,
    MemoryBudgetExceeded,
    ResumeMismatch,
    SchemaError,
)
from dlrm.data.ids import IdSpec
from dlrm.data.job import Limits
from dlrm.data.loader import Loader, Source
from dlrm.data.pipeline import preprocess
from dlrm.data.schema import Categorical, Dense, Label, Schema, Time
from dlrm.data.splits import SplitSpec
from dlrm.data.synthetic import SyntheticConfig, SyntheticLog

__all__ = [
    "CacheVersion",
    "Categorical",
    "ClickBatch",
    "ColumnCache",
    "CorruptCache",
    "CorruptInput",
    "DataError",
    "Dense",
    "IdSpec",
    "Label",
    "Limits",
    "Loader",
    "MalformedRow",
    "MemoryBudgetExceeded",
    "ResumeMismatch",
    "Schema",
    "SchemaError",
    "Source",
    "SplitSpec",
    "SyntheticConfig",
    "SyntheticLog",
    "Time",
    "preprocess",
    "with_splits",
]
