# Everything a developer or CI does has a target here. `make help` lists them.
SHELL := bash
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install quickstart test check lint types format docs clean \
	test-launcher test-data test-kernels test-model test-integration test-chaos test-cluster test-layouts test-pairs test-precision \
	test-optimizers gpu-check

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install:  ## Make .venv with all four packages (PYTHON=python3.12 to choose the interpreter)
	@PYTHON="$(PYTHON)" tools/environment.sh full

quickstart: install  ## Corpus, tokenizer, training, samples: the whole job on this machine, in quickstart/
	@$(MAKE) --no-print-directory -f tools/quickstart.mk

test: check  ## Everything CI runs: lint, types and all tests
	@tools/test.sh launcher data kernels model integration

check: lint types  ## Lint and types

lint: install  ## ruff: rules and formatting
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "run: make format"; exit 1; }

types: install  ## mypy
	@$(BIN)/mypy --no-error-summary packages/*/src

format: install  ## Format the code and mend what ruff can mend
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

test-launcher:  ## neox-launcher alone, on each Python found (PYTHONS="3.11" for one)
	@PYTHONS="$(PYTHONS)" tools/test.sh launcher

test-data:  ## neox-data alone, on each Python found
	@PYTHONS="$(PYTHONS)" tools/test.sh data

test-kernels: install  ## neox-kernels alone
	@tools/test.sh kernels

test-model: install  ## neox-model
	@tools/test.sh model

test-integration: install  ## What crosses packages: architecture and whole journeys
	@tools/test.sh integration

test-chaos: install  ## Long sweeps: training killed at random moments always resumes; no file breaks the reader
	@OMP_NUM_THREADS=1 $(BIN)/pytest --hypothesis-profile=random -m "sweep and not cluster" packages/neox-launcher packages/neox-data packages/neox-model tests \
		--ignore tests/integration/test_layouts.py --ignore tests/integration/test_pairs.py \
		--ignore tests/integration/test_precision.py --ignore tests/integration/test_optimizers.py

test-cluster: install  ## Several hosts on this machine, with the real tools of clusters and faults on purpose; needs root
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m cluster tests/cluster

test-layouts: install  ## Every architecture on every layout trains the model of one rank (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m sweep tests/integration/test_layouts.py

test-pairs: install  ## Every pair of options that no rule refuses trains (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m sweep tests/integration/test_pairs.py

test-precision: install  ## Every architecture on every layout in fp32, bf16 and fp16 (an hour); then run make docs
	@OMP_NUM_THREADS=1 PRECISION_RESULTS=tests/support/precision_results.jsonl \
		$(BIN)/pytest -m sweep tests/integration/test_precision.py

test-optimizers: install  ## Every optimizer resumes to the last bit on every layout in every precision (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m sweep tests/integration/test_optimizers.py

gpu-check: install  ## All that needs a GPU, in one run with one report (REPORT=FILE); REHEARSE=1 runs what can run on the CPU
	@PYTHONPATH=tests $(BIN)/python -m support.gpu_check $(if $(filter 1,$(REHEARSE)),--rehearse) $(if $(REPORT),--report "$(REPORT)")

docs: install  ## Write docs/configuration.md, its JSON schema, the table of readers and docs/compatibility-matrix.md
	@PYTHONPATH=tests $(BIN)/python -m support.pairs > docs/compatibility-matrix.md.new
	@mv docs/compatibility-matrix.md.new docs/compatibility-matrix.md
	@PYTHONPATH=tests $(BIN)/python -m support.readers > readers.json.new
	@mv readers.json.new packages/neox-launcher/src/neox_launcher/config/readers.json
	@$(BIN)/neox-config docs > docs/configuration.md.new && mv docs/configuration.md.new docs/configuration.md
	@$(BIN)/neox-config schema > docs/configuration.schema.json.new
	@mv docs/configuration.schema.json.new docs/configuration.schema.json

clean:  ## Remove environments and caches; what quickstart made stays
	@rm -rf .venv .venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis packages/*/build packages/*/src/*.egg-info
