# Every target does its own set-up in .venv; nothing outside this folder is touched.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH  ?= torch==2.13.0
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready

.PHONY: help demo test soak crash lint bench clean

help:
	@echo "make demo   train a DLRM on a generated click log, from nothing, and write a report"
	@echo "make test   linters, types, import contracts and every test"
	@echo "make soak   the tests that take minutes each: ranks killed, moved and resumed in every combination"
	@echo "make crash  kill trainings at 200 random instants and compare what is found with what was committed, bit for bit"
	@echo "make bench  benchmarks beside the peers (PEER_PYTHON=... names an interpreter that has them)"

# torch first and pinned: the extension is built against it, and a bare "torch" may pull a GPU build of gigabytes.
$(READY): pyproject.toml setup.py $(wildcard csrc/*)
	@test -n "$(PYTHON)" || { echo "Python 3.11 is needed"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PY) -m pip install -q --disable-pip-version-check "$(TORCH)" "setuptools>=70" wheel
	@$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation -e ".[cpu,test]"
	@touch $@

demo: $(READY)
	$(PY) scripts/demo.py --out demo

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test: lint
	$(PY) -m pytest -n 2 --dist loadfile

soak: $(READY)
	$(PY) -m pytest -m soak

crash: $(READY)
	$(PY) tests/crash/crash_harness.py --trials 200

PEER_PYTHON ?=
bench: $(READY)
	$(PY) scripts/bench_pooling.py $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) --json runs/bench_pooling.json
	$(PY) scripts/bench_train.py $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) --json runs/bench_train.json
	$(PY) scripts/bench_cache.py --json runs/bench_cache.json
	$(PY) scripts/bench_exchange.py $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) --json runs/bench_exchange.json

clean:
	rm -rf $(VENV) build dist *.egg-info embcache/*.so .pytest_cache .mypy_cache .ruff_cache demo
