# Everything a person needs: `make demo` and `make test`. Both set up what is missing first, showing what they do.
#
#   make setup       virtual environment in .venv, dependencies, the C++ library
#   make demo        a real agent session with tool calls on the embedded model, CPU only
#   make test        the test suite that takes under ten minutes on two cores
#   make test-full   also what needs longer: client programs, kill matrices, sweeps
#   make soak        fuzz and load for SOAK_MINUTES (default 30)
#   make check       ruff, pyright, import contracts
#   make fmt         format and sort imports
#   make bench       every benchmark; appends JSON lines to benchmarks/results/
#   make run         serve the embedded model on 127.0.0.1:8741
#   make migrate     bring both databases to the newest schema
#
# PYTHON picks the interpreter (3.11 to 3.13), TORCH the PyTorch requirement, PIP_ARGS goes to pip: on a machine without a
# GPU, `make setup PIP_ARGS="--extra-index-url <PyTorch's CPU wheel index>"` saves two gigabytes of CUDA libraries.
# JOBS is how many tests run side by side (default 2, each with up to 2 GB), PYTEST_ARGS goes to pytest.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
PYTEST_ARGS ?=
SOAK_MINUTES ?= 30
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 15
NATIVE := CMakeLists.txt $(wildcard engine/csrc/*.cpp engine/csrc/*.h)

# Bytecode is kept even where a container's image says not to: without it every process compiles the tests and the server anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup fmt check test test-full soak demo bench migrate docs run clean
.DEFAULT_GOAL := help

help:
	@sed '/^$$/,$$d; s/^# \{0,1\}//' Makefile

setup: $(STAMP)

$(VENV)/bin/python:
	@echo "[1/4] virtual environment ($$($(PYTHON) --version))"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; ok = (3, 11) <= v <= (3, 13); \
	  sys.exit(0 if ok else "Python 3.11 to 3.13 is needed, this is %d.%d: set PYTHON=" % v)'
	@$(PYTHON) -m venv $(VENV)

# The stamp depends on what decides the environment; Python files need no reinstall.
$(STAMP): $(VENV)/bin/python pyproject.toml $(NATIVE)
	@echo "[2/4] PyTorch ($(TORCH))"
	@$(BIN)/python -m pip install $(PIP_ARGS) "$(TORCH)"
	@echo "[3/4] dependencies, and the C++ library, which is compiled here (minutes)"
	@$(BIN)/python -m pip install $(PIP_ARGS) -e '.[dev,bench]'
	@echo "[4/4] check"
	@$(BIN)/agentserve doctor --installation --brief
	@touch $(STAMP)

fmt: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports

test: setup
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-full: setup
	@TESTS_FULL=1 $(PYTEST) $(PYTEST_ARGS)

soak: setup
	@SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/python -m pytest tests/soak $(PYTEST_ARGS)

demo: setup
	@$(BIN)/agentserve demo

bench: setup
	@$(BIN)/python -m benchmarks.run --record

migrate: setup
	@$(BIN)/agentserve migrate

docs: setup
	@$(BIN)/python -m pytest -q tests/test_docs.py

run: setup
	@$(BIN)/agentserve serve

clean:
	@rm -rf $(VENV) build engine/_lib
