# Two commands for users: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
# torch's CPU build is enough, and a range would pull gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: help setup demo test test-all lint bench clean

help:
	@echo "make demo   train the two-turn spiral and draw a report (about two minutes)"
	@echo "make test   run the tests (about five minutes)"
	@echo "make test-all   those that take longer: long runs, several processes"
	@echo "make lint   ruff and mypy"
	@echo "make bench  measure against peers (about ten minutes; QUICK=1 is a check in two)"

setup: .venv/ready

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; this is $$($(PYTHON) --version). Set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: setup
	@$(BIN)/holonomic demo

test: setup
	@$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: setup
	@$(BIN)/python -m pytest -n 2 -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/bench: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" --editable ".[bench]"
	@touch $@

bench: .venv/bench
	@KINETO_LOG_LEVEL=99 $(BIN)/python -m benchmarks $(if $(QUICK),--quick)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
