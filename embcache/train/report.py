"""The report of a run: one HTML file that needs nothing else, for a person who was not there.

``write_report`` draws whatever a ``RunRecord`` holds and leaves out what it does not; it knows no model family.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from embcache.train.charts import (
    Mark,
    Series,
    bar_table,
    calibration_plot,
    compact,
    duration,
    line_chart,
    stacked_bar,
)
from embcache.train.page import page

__all__ = ["RunRecord", "TableFacts", "machine_facts", "write_report"]

_NAMES = {"auc": "AUC", "ne": "normalised entropy", "logloss": "log loss", "gauc": "GAUC", "mrr": "MRR"}
_COLOURS = ("c1", "c3", "c4", "c5")
_SHOWN_TABLES = 40
_NOT_DRAWN = ("step", "kind", "logloss", "calibration", "seconds")
_STAGING = "seconds_"  # begins the names of what staging spends its time on


@dataclass(frozen=True)
class TableFacts:
    """What one embedding table did: rows written at least once, ids looked up in training, bytes of rows and state."""

    name: str
    rows: int | None
    dim: int
    written: int
    lookups: int
    bytes: int


@dataclass
class RunRecord:
    """Everything a report shows.

    ``history``: dictionaries with ``step`` and ``kind`` ("train": loss, samples_per_second, lr, and of cached tables
    hit_rate, bytes_read, bytes_written, seconds_<stage>, all since the point before; "eval": metrics).
    ``best_possible``: value of a metric that no model can beat, where it is known (generated data).
    ``exchange``: of every rank, what it sent and waited for by lane (``Ledger.report``); empty with one process.
    ``calibration``: (weight, mean prediction, observed rate) per bin. ``machine``: facts as from ``machine_facts``.
    """

    title: str
    summary: str = ""
    when: str = ""
    lead: str = "auc"
    test: Mapping[str, float] = field(default_factory=dict)
    best_possible: Mapping[str, float] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()
    seconds: float = 0.0
    samples: int = 0
    samples_per_second: float = 0.0
    dense_parameters: int = 0
    sparse_parameters: int = 0
    best_step: int | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    tables: Sequence[TableFacts] = ()
    calibration: Sequence[tuple[float, float, float]] = ()
    exchange: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)


def write_report(path: Path, record: RunRecord) -> None:
    """Write the report; the file appears complete or not at all."""
    body = "".join(
        (
            _header(record),
            _hero(record),
            _section("Curves", _curves(record)),
            _section(
                "Time, machine, calibration" if calibration_plot(record.calibration) else "Time and machine",
                _time_and_calibration(record),
            ),
            _section("Cache and disk", _cache(record)),
            _section("Exchange between ranks", _exchange(record)),
            _section("Embedding tables", _tables(record)),
            _section("Configuration", _facts(record.config)),
            "<footer>Everything in this file was written by the run itself; it loads nothing from anywhere.</footer>",
        )
    )
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page(record.title, body), encoding="utf-8")
    os.replace(temporary, path)


def machine_facts(ranks: int = 1) -> dict[str, str]:
    """Processor, threads, system and versions, as far as the system tells."""
    facts = {"processor": _processor(), "threads": f"{torch.get_num_threads()} of {os.cpu_count()}"}
    if ranks > 1:
        facts["ranks"] = str(ranks)
    facts["system"] = f"{platform.system()} {platform.release()}"
    facts["python"] = sys.version.split()[0]
    for package in ("embcache", "torch", "numpy"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return facts


def metric_name(name: str) -> str:
    """A metric for people: ``auc`` -> ``AUC``, ``hr@10`` -> ``HR@10``."""
    return _NAMES.get(name, name.upper() if "@" in name else name)


def _header(r: RunRecord) -> str:
    summary = f"<p>{escape(r.summary)}</p>" if r.summary else ""
    return f'<header><div><h1>{escape(r.title)}</h1>{summary}</div><p class="when">{escape(r.when)}</p></header>'


def _hero(r: RunRecord) -> str:
    lead = ""
    if r.lead in r.test:
        lead = (
            f'<div class="lead"><div class="label">test {escape(metric_name(r.lead))}</div>'
            f'<div class="value">{_value(r.test[r.lead])}</div>{_gauge(r)}</div>'
        )
    others = [name for name in r.test if name != r.lead]
    facts = [("test " + metric_name(name), _value(r.test[name]), _note(r, name)) for name in others]
    if r.samples_per_second:
        facts.append(("samples per second", f"{r.samples_per_second:,.0f}", "without evaluations"))
    if r.sparse_parameters or r.dense_parameters:
        total = compact(r.sparse_parameters + r.dense_parameters)
        facts.append(("parameters", total, f"{compact(r.dense_parameters)} of them dense"))
    if r.seconds:
        facts.append(("time", duration(r.seconds), f"{compact(r.samples)} samples"))
    cells = "".join(
        f'<div><p class="label">{escape(label)}</p><p class="value">{escape(value)}</p>'
        f'<p class="note">{escape(note)}</p></div>'
        for label, value, note in facts
    )
    return f'<section class="card hero">{lead}<div class="facts">{cells}</div></section>'


def _gauge(r: RunRecord) -> str:
    """How far the AUC is on the way from a coin to the best any model could do."""
    best = r.best_possible.get(r.lead)
    value = r.test[r.lead]
    if r.lead != "auc" or not math.isfinite(value):
        return ""
    top = best if best is not None else 1.0
    share = (value - 0.5) / (top - 0.5) if top > 0.5 else 0.0
    words, end = "between a coin and certainty", "1.0"
    if best is not None:
        words, end = f"<b>{share:.1%}</b> of the way to the best possible", f"best possible {top:.4f}"
    return (
        f'<div class="gauge"><div class="track"><i style="width:{100 * min(max(share, 0), 1):.2f}%"></i></div>'
        f'<div class="ends"><span>coin 0.5</span><span>{end}</span></div>'
        f'<p class="note words">{words}</p></div>'
    )


def _note(r: RunRecord, name: str) -> str:
    if name in r.best_possible:
        return f"best possible {_value(r.best_possible[name])}"
    return {"ne": "1 is the base rate alone", "logloss": "nats", "calibration": "predicted over observed"}.get(name, "")


def _curves(r: RunRecord) -> str:
    train = [h for h in r.history if h.get("kind") == "train"]
    evals = [h for h in r.history if h.get("kind") == "eval"]
    marks = [Mark("best", x=float(r.best_step))] if r.best_step is not None and len(evals) > 1 else []
    cards = [_loss_chart(train, evals, marks)]
    cards[0] = cards[0] and f'<div class="card wide">{cards[0]}</div>'
    names = [n for n in (evals[0] if evals else {}) if n not in _NOT_DRAWN]
    for i, name in enumerate(names):
        best = r.best_possible.get(name)
        limits = [Mark(f"best possible {best:.4f}", y=best)] if best is not None else []
        points = [h for h in evals if name in h]
        steps, few = _column(points, "step"), len(points) < 60
        series = Series(metric_name(name), _COLOURS[i % 4], steps, _column(points, name), dots=few)
        cards.append(_card(line_chart(_capital(metric_name(name)), [series], note="validation", marks=limits + marks)))
    for title, key, digits in (("Samples per second", "samples_per_second", 0), ("Learning rate", "lr", 5)):
        series = Series(title.lower(), "c6", _column(train, "step"), _column(train, key))
        cards.append(_card(line_chart(title, [series], digits=digits, zero=True), "small"))
    return f'<div class="grid2">{"".join(cards)}</div>' if any(cards) else ""


def _loss_chart(train: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], marks: Sequence[Mark]) -> str:
    losses = _column(train, "loss")
    series = [Series("training loss", "c1", _column(train, "step"), _smoothed(losses), raw=losses)]
    points = [h for h in evals if "logloss" in h]
    if points:
        steps = _column(points, "step")
        series.append(Series("validation log loss", "c2", steps, _column(points, "logloss"), dots=len(points) < 60))
    return line_chart("Loss", series, marks=marks)


def _time_and_calibration(r: RunRecord) -> str:
    stages = [(name, seconds) for name, seconds in r.stages.items() if seconds > 0]
    total = sum(s for _, s in stages)
    left = _card(stacked_bar("Time per stage", stages, f"{duration(total)} in all")) + _facts(r.machine)
    cards = [f'<div class="column">{left}</div>' if left else "", _card(calibration_plot(r.calibration))]
    return f'<div class="split">{"".join(cards)}</div>' if any(cards) else ""


def _cache(r: RunRecord) -> str:
    """Hit rate and traffic over the steps, and what staging did with its time."""
    points = [h for h in r.history if h.get("kind") == "train" and "hit_rate" in h]
    if not points:
        return ""
    steps = _column(points, "step")
    lengths = [b - a for a, b in zip([0.0, *steps], steps, strict=False)]
    hits = Series("hit rate", "c3", steps, _column(points, "hit_rate"))
    cards = [line_chart("Hit rate", [hits], note="of the unique ids of a batch")]
    moved = []
    for name, key, colour in (("read", "bytes_read", "c1"), ("written", "bytes_written", "c2")):
        values = _column(points, key)
        megabytes = [v / n / 1e6 if n > 0 else math.nan for v, n in zip(values, lengths, strict=True)]
        moved.append(Series(f"{name}, {_bytes(_total(values))} in all", colour, steps, megabytes))
    cards.append(line_chart("Megabytes a step below the cache", moved, digits=3, zero=True))
    stages = dict.fromkeys(key for h in points for key in h if key.startswith(_STAGING))
    spent = [(key.removeprefix(_STAGING).replace("_", " "), _total(_column(points, key))) for key in stages]
    staging = _card(stacked_bar("Staging", spent, "behind training, where it runs ahead"), "wide")
    return f'<div class="grid2">{"".join(map(_card, cards))}{staging}</div>'


def _exchange(r: RunRecord) -> str:
    """Bytes and seconds by lane, and bytes by rank and peer."""
    if not r.exchange:
        return ""
    ranks, lanes = range(len(r.exchange)), list(r.exchange[0]["lanes"])
    sent = {lane: [rank["lanes"][lane]["sent"] for rank in r.exchange] for lane in lanes}
    moved = {lane: sum(map(sum, sent[lane])) for lane in lanes}
    total = sum(moved.values()) or 1
    rows, shares = [], []
    for lane in lanes:
        accounts = [rank["lanes"][lane] for rank in r.exchange]
        operations = f"{accounts[0]['operations'] + accounts[0]['headers']:,}"
        seconds = [max(a[name] for a in accounts) for name in ("seconds", "waited")]
        rows.append((lane, _bytes(moved[lane]), operations, *(f"{s:,.2f} s" for s in seconds)))
        shares.append(moved[lane] / total)
    table = bar_table(("lane", "bytes sent", "operations", "in operations", "waited for"), rows, shares)
    pairs = [[sum(sent[lane][a][b] for lane in lanes) for b in ranks] for a in ranks]
    rows = [(f"rank {a}", _bytes(sum(pairs[a])), *map(_bytes, pairs[a])) for a in ranks]
    peers = bar_table(("from", "bytes sent", *(f"to {b}" for b in ranks)), rows, [sum(row) / total for row in pairs])
    link = r.exchange[0].get("emulated")
    words = "payload of all ranks; seconds of the rank that took longest"
    note = f"{words}; on an emulated link of {link['text']}" if link else words
    return f'<div class="card long"><p class="note total">{escape(note)}</p>{table}{peers}</div>'


def _total(values: Sequence[float]) -> float:
    return sum(v for v in values if math.isfinite(v))


def _tables(r: RunRecord) -> str:
    if not r.tables:
        return ""
    ordered = sorted(r.tables, key=lambda t: (-t.lookups, -t.written))
    rows, shares = [], []
    for t in ordered[:_SHOWN_TABLES]:
        share = t.written / t.rows if t.rows else 0.0
        touched = f"{share:.1%}" if t.rows else "–"
        declared = f"{t.rows:,}" if t.rows else "unbounded"
        per_row = f"{t.lookups / t.written:,.1f}" if t.written else "–"
        counts = (f"{t.written:,}", declared, str(t.dim), compact(t.lookups), per_row, _bytes(t.bytes))
        rows.append((t.name, touched, *counts))
        shares.append(share)
    headers = ("table", "rows touched", "touched", "rows", "dim", "lookups", "lookups a touched row", "stored")
    rest = len(ordered) - len(rows)
    more = f'<p class="note">and {rest} more tables with fewer lookups</p>' if rest > 0 else ""
    written, lookups = sum(t.written for t in r.tables), sum(t.lookups for t in r.tables)
    total = f"{compact(written)} rows touched by {compact(lookups)} lookups, most-hit tables first"
    table = bar_table(headers, rows, shares)
    return f'<div class="card long"><p class="note total">{total}</p>{table}{more}</div>'


def _facts(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    items = [f"<div><dt>{escape(str(k))}</dt><dd>{escape(_config_value(v))}</dd></div>" for k, v in facts.items()]
    return f'<div class="card"><dl>{"".join(items)}</dl></div>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _card(content: str, kind: str = "") -> str:
    return f'<div class="card {kind}">{content}</div>' if content else ""


def _column(points: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(p.get(key, math.nan)) for p in points]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Centred mean over a thirtieth of the run, narrower at its start; NaN where the input is."""
    half = len(values) // 60
    sums, counts = [0.0], [0]
    for v in values:
        sums.append(sums[-1] + (v if math.isfinite(v) else 0.0))
        counts.append(counts[-1] + math.isfinite(v))
    out = []
    for i, v in enumerate(values):
        reach = min(half, i)
        low, high = i - reach, min(i + reach + 1, len(values))
        out.append((sums[high] - sums[low]) / (counts[high] - counts[low]) if math.isfinite(v) else math.nan)
    return out


def _value(value: float) -> str:
    if not math.isfinite(value):
        return "undefined"
    return f"{value:.4f}" if abs(value) < 1000 else compact(value)


def _config_value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _bytes(size: float) -> str:
    text = compact(size)
    return text + ("B" if " " in text else " B")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
