"""The report: complete, self-contained, quiet in a browser, and honest about missing parts."""

import math
import re
import shutil
import subprocess

import pytest

from embcache.train.charts import Series, compact, duration, line_chart
from embcache.train.report import RunRecord, TableFacts, machine_facts, write_report


def full_record():
    history = []
    for step in range(10, 2001, 10):
        loss = 0.42 + 0.28 * math.exp(-step / 200)
        point = {"step": step, "kind": "train", "loss": loss, "samples_per_second": 50_000.0, "lr": 0.02}
        moved = {"bytes_read": 3e6, "bytes_written": 12.5e6, "seconds_miss_read": 0.05, "seconds_evict_write": 0.015}
        history.append({**point, "hit_rate": 0.9 - 0.3 * math.exp(-step / 200), **moved})
        if step % 100 == 0:
            auc = 0.79 - 0.2 * math.exp(-step / 300)
            history.append({"step": step, "kind": "eval", "auc": auc, "ne": 0.9, "logloss": loss, "calibration": 1.0})
    rates = [0.02 * 1.25**i for i in range(16)]
    return RunRecord(
        title="dlrm on a <log> & more",
        summary="A summary.",
        when="1 May",
        test={"auc": 0.7931, "ne": 0.8123, "logloss": 0.4312, "calibration": 1.01},
        best_possible={"auc": 0.8012, "ne": 0.79},
        history=history,
        seconds=148.0,
        samples=4_096_000,
        samples_per_second=51_000.0,
        dense_parameters=420_000,
        sparse_parameters=32_000_000,
        best_step=1500,
        stages={"forward": 50.0, "backward": 51.0, "waiting for data": 3.0},
        tables=[TableFacts(f"C{i}", 1000 * i + 1, 16, 500 * i, 10_000 * (27 - i), 68_000 * i) for i in range(26)],
        calibration=[(10_000.0, r, r * 1.02) for r in rates],
        config={"lr": 0.02, "steps": None, "tensorboard": True, "data": ["<script>alert(1)</script>"]},
        machine=machine_facts(),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, full_record())
    return path


def test_it_holds_everything(report):
    text = report.read_text()
    for words in ("0.7931", "97.3%", "best possible 0.8012", "0.8123", "51,000", "32.4 M", "2 min 28 s", "Loss", "AUC"):
        assert words in text
    for words in ("Calibration", "Time per stage", "Embedding tables", "C25", "Configuration", "processor", "torch"):
        assert words in text
    assert text.index(">C0<") < text.index(">C25<")  # most lookups first
    for words in ("Cache and disk", "Hit rate", "read, 600 MB in all", "written, 2.5 GB in all", "miss read", "10.0 s"):
        assert words in text


def test_it_loads_nothing_from_anywhere(report):
    text = report.read_text()
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<link|<img|<iframe|\bsrc=|\bfetch\(|XMLHttp|WebSocket", text)
    assert "default-src 'none'" in text


def test_values_cannot_become_markup(report):
    text = report.read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "dlrm on a &lt;log&gt; &amp; more" in text


@pytest.mark.parametrize(
    "record",
    [
        RunRecord("empty"),
        RunRecord("undefined", test={"auc": math.nan}, history=[{"step": 1, "kind": "train", "loss": math.nan}]),
        RunRecord("one", test={"hr@10": 0.3}, lead="hr@10", history=[{"step": 1, "kind": "eval", "hr@10": 0.3}]),
        RunRecord("flat", history=[{"step": s, "kind": "train", "loss": 0.0, "lr": 0.0} for s in (1, 2)]),
        RunRecord("unbounded", tables=[TableFacts("t", None, 8, 0, 0, 0)], calibration=[(1.0, 0.5, 0.5)]),
    ],
    ids=lambda r: r.title,
)
def test_missing_parts_are_left_out(tmp_path, record):
    write_report(tmp_path / "report.html", record)
    text = (tmp_path / "report.html").read_text()
    assert record.title in text
    assert ">nan<" not in text
    assert "nan%" not in text
    assert "calibration" not in text  # one bin, or none, is not drawn and not announced
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_long_curves_are_thinned_and_keep_their_mean():
    n = 50_000
    chart = line_chart("x", [Series("a", "c1", list(range(n)), [float(i % 7) for i in range(n)])])
    assert len(chart) < 60_000


def test_numbers_for_people():
    assert [compact(v) for v in (999, 1000, 1_234_567, 8e9)] == ["999", "1 k", "1.23 M", "8 G"]
    assert [duration(v) for v in (59.9, 59.96, 119.9, 3599.9)] == ["59.9 s", "1 min 0 s", "2 min 0 s", "1 h 0 min"]


CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]


def browse(report, tmp_path, *extra):
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *extra, report.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
def test_a_browser_shows_it_without_errors_or_requests(report, tmp_path):
    done = browse(report, tmp_path, "--enable-logging=stderr", "--v=0", "--dump-dom")
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert 'data-requests="0"' in done.stdout  # the script ran to its end, and the page asked for nothing


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1240])
def test_nothing_is_wider_than_the_window(report, tmp_path, width):
    """The script notes the page's width; on a phone and on a desk it must fit."""
    done = browse(report, tmp_path, f"--window-size={max(width, 500)},900", "--dump-dom")
    noted = re.search(r'data-width="(\d+)" data-window="(\d+)"', done.stdout)
    assert noted is not None
    assert int(noted[1]) <= int(noted[2])
