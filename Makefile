# Two commands for users: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
# torch's CPU build is enough, and a range would pull gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: help setup demo test test-all lint bench clean

help:
	@echo "make demo   train the two-turn spiral and draw a report (about two minutes)"
	@echo "make test   run the tests (about five minutes)"
	@echo "make test-all   those that take longer: long runs, several processes, other instruction sets"
	@echo "make lint   ruff and mypy"
	@echo "make bench  measure against peers (about ten minutes; QUICK=1 is a check in two)"

setup: .venv/ready

.venv/ready: pyproject.toml setup.py src/holonomic/native/kernels.cpp
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; this is $$($(PYTHON) --version). Set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: setup
	@$(BIN)/holonomic demo

test: setup
	@$(BIN)/python -m pytest -n 2 -m "not slow"

# What takes longer; and the core without the kernels, and with those of the lower instruction sets.
CORE := tests/test_native.py tests/test_noise.py tests/test_robustness.py tests/test_invariants.py tests/test_replicas.py tests/test_testing.py
test-all: setup
	@$(BIN)/python -m pytest -n 2 -m slow
	@HOLONOMIC_NATIVE=0 $(BIN)/python -m pytest -n 2 -m "not slow" $(CORE)
	@for isa in avx2 baseline; do \
		echo "kernels for $$isa"; \
		HOLONOMIC_ISA=$$isa $(BIN)/python -m pytest -n 2 -m "not slow" $(CORE) || exit 1; \
	done

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
