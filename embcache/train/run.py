"""A run as a folder: what stands in it at the start, what is written at its end."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embcache.checkpoint import MANIFEST, Checkpoints
from embcache.errors import CorruptStore, SchemaMismatch
from embcache.statefile import replace_file
from embcache.tiers import Lmdb
from embcache.train.config import TrainConfig
from embcache.train.distributed import Session, ShardingConfig
from embcache.train.flags import flatten, save_yaml
from embcache.train.loop import Trainer
from embcache.train.observe import Console, History, Observer, TensorBoard, read_history
from embcache.train.report import RunRecord, TableFacts, machine_facts, write_report
from embcache.train.storage import StorageConfig, checkpoint_folder, disk_bytes
from embcache.train.task import BatchSource, Evaluation, Progress

__all__ = ["Result", "finish", "observers", "open_run"]

# What a resumed run may change: none of it takes part in what the next steps compute.
FREE = {"out", "resume", "steps", "epochs", "eval_every", "checkpoint_every", "keep", "patience", "min_delta"}
FREE |= {"test_weights", "log_every", "tensorboard", "threads", "eval_batch_size", "workers"}
FREE |= {
    "tiers",
    "store",
    "cache_rows",
    "cache_bytes",
    "policy",
    "depth",
    "window",
    "plan",
    "checkpoint_dir",
    "schedule",
}
NEW = {"wire": None}  # what runs had that were begun before there was such a setting


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    loss: float
    test: Evaluation | None
    report: Path
    storage: Sequence[str] = ()

    def lines(self) -> list[str]:
        """The last lines of a run: what its tables on disk hold, the loss, then the test metrics."""
        metrics = {} if self.test is None else self.test.metrics
        tests = [f"test {name} {value:.4f}" for name, value in metrics.items()]
        return [*self.storage, f"loss {self.loss:.4f}", *tests]


def open_run(
    train: TrainConfig, config: Any, storage: StorageConfig | None = None, session: Session | None = None
) -> Checkpoints:
    """Make or reopen the run's folder and save ``config.yaml`` there; gives the checkpoints of the run, which lie with
    the rows where ``storage`` keeps those on disk. Ranks that were started again go on as with ``--resume``.

    Raises FileExistsError when the folder holds a run and ``--resume`` was not given, FileNotFoundError when a resumed
    run's checkpoints lie elsewhere, StoreLocked when another process trains there, and SchemaMismatch when a resumed
    run changes a setting that its past depends on.
    """
    session = session or Session()
    folder = (storage or StorageConfig()).folder(train.out)
    checkpoints = session.checkpoints(folder, train.keep, getattr(config, "sharding", ShardingConfig()))
    session.first(lambda: _claim(train, config, checkpoints, folder, session) if session.is_main else None)
    session.opened()
    return checkpoints


def _claim(train: TrainConfig, config: Any, checkpoints: Checkpoints, folder: Path, session: Session) -> None:
    train.out.mkdir(parents=True, exist_ok=True)
    saved, resume = train.out / "config.yaml", train.resume or session.restarted
    _check_place(train, checkpoints, _folder_before(saved, folder), resume)
    session.claim(checkpoints)
    if not resume and checkpoints.latest is not None:
        where = train.out if folder.is_relative_to(train.out) else folder
        flag = "--out" if where == train.out else "--store"
        raise FileExistsError(f"{where} already holds a run: go on with it (--resume) or give another {flag}")
    if checkpoints.latest is not None and saved.exists():
        _check_same(saved, flatten(config))
    save_yaml(config, saved)


def observers(train: TrainConfig, session: Session | None = None) -> list[Observer]:
    """The console, the history on disk and, if wanted, TensorBoard; nothing but on the rank that speaks."""
    if session is not None and not session.is_main:
        return []
    watching: list[Observer] = [Console(), History(train.out / "history.jsonl")]
    if train.tensorboard:
        watching.append(TensorBoard(train.out / "tensorboard"))
    return watching


def finish(
    trainer: Trainer,
    test: BatchSource | None,
    config: Any,
    title: str,
    best_possible: Mapping[str, float] | None = None,
) -> Result:
    """Test the weights that the configuration asks for, write ``result.json`` and ``report.html``, close the stores."""
    train, session = trainer.config, trainer.session
    progress = dataclasses.replace(trainer.progress)
    tables, saved = _table_facts(trainer), trainer.checkpoints
    if train.test_weights == "best" and saved is not None and saved.best not in (None, saved.latest):
        trainer.restore("best")
    evaluation = trainer.test(test) if test is not None else None
    speed = progress.samples / progress.seconds if progress.seconds else 0.0
    result = Result(progress.loss, evaluation, train.out / "report.html", _storage_lines(trainer, tables, speed))
    exchange = session.exchange()
    if session.is_main:
        record = RunRecord(
            title=title,
            when=time.strftime("%-d %B %Y, %H:%M"),
            best_possible=best_possible or {},
            samples_per_second=speed,
            tables=tables,
            exchange=exchange,
            config=flatten(config),
        )
        _write(trainer, progress, result, record)
    trainer.close()
    return result


def _write(trainer: Trainer, progress: Progress, result: Result, record: RunRecord) -> None:
    train, evaluation = trainer.config, result.test
    metrics = {} if evaluation is None else dict(evaluation.metrics)
    facts = {"loss": progress.loss, "test": metrics, "step": progress.step, "best_step": progress.best_step}
    replace_file(train.out, "result.json", (json.dumps(_finite(facts), indent=1) + "\n").encode())
    record = dataclasses.replace(
        record,
        summary=_summary(trainer, progress),
        lead=trainer.task.monitor,
        test=metrics,
        history=read_history(train.out / "history.jsonl"),
        seconds=sum(progress.stages.values()),
        samples=progress.samples,
        dense_parameters=sum(p.numel() for p in trainer.task.model.parameters()),
        sparse_parameters=sum((t.rows or t.written) * t.dim for t in record.tables),
        best_step=progress.best_step,
        stages=progress.stages,
        calibration=() if evaluation is None else evaluation.calibration,
        machine=machine_facts(trainer.session.world),
    )
    write_report(result.report, record)


def _table_facts(trainer: Trainer) -> list[TableFacts]:
    lookups, facts = trainer.lookups(), []
    for store in trainer.stores:
        for t, table in enumerate(store.tables):
            written = store.count_written(table.name)
            held = table.num_embeddings if store.front.direct(t) and table.num_embeddings else written
            facts.append(
                TableFacts(
                    name=table.name,
                    rows=table.num_embeddings,
                    dim=table.embedding_dim,
                    written=written,
                    lookups=sum(lookups.get(feature, 0) for feature in table.feature_names),
                    bytes=held * table.row_bytes,
                )
            )
    return facts


def _storage_lines(trainer: Trainer, tables: Sequence[TableFacts], speed: float) -> list[str]:
    """Of tables on disk: rows touched of rows declared, bytes on disk, speed."""
    lines = []
    for store in trainer.stores:
        if isinstance(store.tiers[-1], Lmdb) and trainer.checkpoints is not None:
            written = sum(table.written for table in tables)
            size = disk_bytes(trainer.checkpoints.folder)
            lines.append(f"store {written:,} rows touched, {size:,} bytes on disk, {speed:,.0f} samples/s")
    return lines


def _summary(trainer: Trainer, progress: Any) -> str:
    passes = f"{progress.step / max(len(trainer.batches), 1):.3g}"
    text = f"{progress.step:,} steps of {trainer.config.global_batch_size:,} samples"
    text += f", {passes} pass{'' if passes == '1' else 'es'} over the data"
    if progress.best_step is not None:
        which = "these weights are tested" if trainer.config.test_weights == "best" else "the last weights are tested"
        text += f"; best {trainer.task.monitor.upper()} at step {progress.best_step:,}, {which}"
    if progress.stopped:
        text += "; stopped early"
    return text + "."


def _check_place(train: TrainConfig, here: Checkpoints, before: Path, resume: bool) -> None:
    """The run in ``--out`` has its checkpoints here, or they were moved here, or it has none."""
    if before.resolve() == here.folder.resolve():
        return
    if (before / MANIFEST).exists():
        if not resume:
            raise FileExistsError(f"{train.out} already holds a run, with its checkpoints in {before}: go on with it "
                                  "(--resume, and its --tiers and --store) or give another --out")  # fmt: skip
    elif not resume or here.latest is not None:
        return
    raise FileNotFoundError(f"--resume: the run in {train.out} has its checkpoints in {before}, not in {here.folder}: "
                            "give its --tiers and --store")  # fmt: skip


def _folder_before(path: Path, otherwise: Path) -> Path:
    """Where the run whose configuration lies at ``path`` has its checkpoints."""
    before = _load(path) if path.exists() else None
    tiers, store = (before or {}).get("tiers"), (before or {}).get("store")
    if not tiers or not isinstance(tiers, list) or not isinstance(store, str | None):
        return otherwise
    return checkpoint_folder(tiers, store, path.parent)


def _load(path: Path) -> dict[str, Any] | None:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    return loaded if isinstance(loaded, dict) else None


def _check_same(path: Path, now: dict[str, Any]) -> None:
    loaded = _load(path)
    if loaded is None:
        raise CorruptStore(f"{path} is not the configuration of a run")
    before = {**NEW, **loaded}
    # The length of the run is free where the learning rate does not follow it.
    free = FREE if now.get("lr_schedule") == "constant" else FREE - {"steps", "epochs"}
    names = [n for n in {**before, **now} if n not in free and before.get(n) != now.get(n)]
    if names:
        raise SchemaMismatch(f"--resume: {path}", {n: before.get(n) for n in names}, {n: now.get(n) for n in names})


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
