# `make demo` and `make test` are all a newcomer needs: each makes .venv on a bare machine, installs what is missing, runs.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALLED := .venv/.installed
NPU := .venv-npu
EMULATED := $(NPU)/.installed
export DAGSTER_HOME ?= $(CURDIR)
export DAGSTER_DISABLE_TELEMETRY := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo test test-distributed check ui bench test-slow test-npu

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "PairLedger needs Python 3.11, 3.12 or 3.13; found: $$(python3 --version 2>&1). Install one, or name it: make PYTHON=/path/to/python3.12"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (once; a few minutes) …"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(INSTALLED) ## make .venv and install what is missing

demo: $(INSTALLED) ## preference files to a trained model and its token ledger, in under three minutes
	@$(BIN)/pairledger demo

test: $(INSTALLED) ## the everyday tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not distributed' -q

test-distributed: $(INSTALLED) ## runs of several processes, on every topology
	@$(BIN)/python -m pytest -m 'distributed and not slow' -q

check: $(INSTALLED) ## format, lint, types, import layers
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/basedpyright --level error
	@$(BIN)/python -m pytest -q tests/test_layers.py

ui: $(INSTALLED) ## the Dagster UI on 127.0.0.1
	@$(BIN)/pairledger ui

bench: $(INSTALLED) ## every benchmark; results in benchmarks/results
	@for script in benchmarks/*.py; do $(BIN)/python -m benchmarks.$$(basename $$script .py) || exit 1; done

test-slow: $(INSTALLED) ## what takes longer than the everyday suite allows
	@$(BIN)/python -m pytest -q -m slow

$(EMULATED): $(INSTALLED) tests/npu/machine.py $(wildcard tests/npu/cann/*.c)
	@command -v cc >/dev/null && command -v nm >/dev/null || { echo "the emulated CANN is written in C: install a compiler (cc) and binutils (nm)"; exit 2; }
	@$(BIN)/python -m venv --without-pip $(NPU)
	@$(BIN)/python -m pip --python $(NPU)/bin/python install --quiet --no-deps --constraint constraints.txt torch-npu
	@$(NPU)/bin/python tests/npu/machine.py $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	@touch $@

test-npu: $(EMULATED) ## torch_npu over an emulated Ascend runtime, in an environment of its own
	@$(NPU)/bin/python -m pytest -q tests/npu
