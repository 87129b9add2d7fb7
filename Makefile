# Targets for developers and CI. `make help` lists them.
SHELL := bash
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install aio quickstart test test-all check lint types format docs docs-site dist clean \
	test-launcher test-data test-pythons test-kernels test-chaos test-cluster test-layouts test-pairs test-precision \
	fuzz-port fuzz-archives fuzz-config fuzz-manifests test-optimizers test-conversion test-services test-sanitizers test-recipes test-architecture test-contracts test-versions coverage gpu-check gpu-gate gpu-minutes gpu-minutes-prepare

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install:  ## Create .venv with all four packages (PYTHON=python3.12 to choose the interpreter, TORCH=2.15.0 another torch)
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" tools/environment.sh full

aio: install  ## DeepSpeed's operator async_io for offloading to NVMe; requires libaio; ten minutes, once
	@tools/aio.sh

quickstart: install  ## Corpus, tokenizer, training and samples on this machine, in quickstart/
	@$(MAKE) --no-print-directory -f tools/quickstart.mk

# A process per core; loading a file's fixtures twice would take longer than the tests that share them.
PARALLEL := env --default-signal=INT,QUIT,HUP OMP_NUM_THREADS=1 $(BIN)/pytest -q -n logical --maxprocesses 8 --dist loadfile

test: check  ## Lint, types and all fast tests (ten minutes on two cores)
	@$(PARALLEL) -m "not slow and not sweep and not cluster and not recipe" packages tests

test-all: install  ## The rest of what CI runs: slow tests, simulated hosts, and three packages without the others
	@$(PARALLEL) -m "slow and not sweep and not cluster and not recipe" packages tests
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "cluster and not sweep" tests/cluster
	@tools/test.sh launcher data kernels

check: lint types  ## Lint, types and the size of the sources
	@$(BIN)/python tools/size.py --check

lint: install  ## ruff: rules and formatting
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "run: make format"; exit 1; }

types: install  ## mypy
	@$(BIN)/mypy --no-error-summary packages/*/src

format: install  ## Format the code and apply ruff's fixes
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

test-launcher:  ## neox-launcher alone (PYTHONS="3.12 3.13" to choose the interpreters)
	@PYTHONS="$(PYTHONS)" tools/test.sh launcher

test-data:  ## neox-data alone (PYTHONS as above)
	@PYTHONS="$(PYTHONS)" tools/test.sh data

test-pythons:  ## neox-launcher and neox-data alone, on Python 3.12 and 3.13, or those of PYTHONS
	@PYTHONS="$(or $(PYTHONS),3.12 3.13)" tools/test.sh launcher data

test-kernels: install  ## neox-kernels alone
	@tools/test.sh kernels

test-architecture: install  ## Rules of the repository: imports, names, documents (seconds)
	@$(BIN)/pytest -q -m "not slow and not sweep and not cluster" tests/architecture

test-contracts: $(if $(PYTHON_ENV),,install)  ## What we use of torch and DeepSpeed beyond their documentation (PYTHON_ENV=FOLDER: in another environment)
	@OMP_NUM_THREADS=1 $(or $(PYTHON_ENV),.venv)/bin/python -m pytest -q $(wildcard packages/neox-model/tests/test_*_compat.py)

test-versions:  ## Contracts and fast tests with the oldest and the newest versions allowed; writes docs/reports/versions.md (an hour; ENVIRONMENTS=oldest to choose)
	@python3 tools/versions.py $(ENVIRONMENTS)

coverage: install  ## Line and branch coverage of the packages' fast tests
	@$(BIN)/coverage erase
	@OMP_NUM_THREADS=1 env --default-signal=INT,QUIT,HUP $(BIN)/coverage run -m pytest -q -m "not slow and not sweep and not cluster" \
		-k "not finds_no_room" packages  # Its limit on file sizes also applies to the files of coverage.
	@$(BIN)/coverage combine --quiet && $(BIN)/coverage report

test-chaos: install  ## Long sweeps: kill training at random moments and resume; read damaged files
	@OMP_NUM_THREADS=1 $(BIN)/pytest --hypothesis-profile=random -m "sweep and not cluster" packages/neox-launcher packages/neox-data packages/neox-model tests \
		$(addprefix --ignore ,$(OF_LAYOUTS)) --ignore tests/integration/test_pairs.py \
		--ignore tests/integration/test_precision.py --ignore tests/integration/test_optimizers.py \
		--ignore packages/neox-launcher/tests/controller/test_listener.py \
		--ignore packages/neox-launcher/tests/cli/test_fuzz_check.py \
		--ignore packages/neox-data/tests/preprocess/test_damaged_archives.py \
		--ignore packages/neox-model/tests/checkpoint/test_hostile_manifests.py --ignore packages/neox-model/tests/convert

fuzz-port: install  ## 100,000 connections with random lines to the launcher's port (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -s -m sweep packages/neox-launcher/tests/controller/test_listener.py

fuzz-archives: install  ## Read 3,000 damaged corpus files: every document is counted, or there is an error
	@$(BIN)/pytest -q -o log_cli=true --log-cli-level=INFO -m sweep packages/neox-data/tests/preprocess/test_damaged_archives.py

fuzz-manifests: install  ## Load 3,000 mutated manifests of checkpoints: they load, or are refused and change nothing
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -m sweep packages/neox-model/tests/checkpoint/test_hostile_manifests.py

test-cluster: install  ## Simulate several hosts with real cluster tools and injected faults; requires root
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m cluster tests/cluster

OF_LAYOUTS := $(addprefix tests/integration/test_,$(addsuffix .py,compression engines layouts learning_rate nonfinite))

test-layouts: install  ## Compare training of every architecture and compression on every layout with one rank (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m sweep $(OF_LAYOUTS)

fuzz-config: install  ## 10,000 mutations of configs/ and wrong values of every name through neox-config (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -m sweep packages/neox-launcher/tests/cli/test_fuzz_check.py

test-pairs: install  ## Train with every pair of options that no rule refuses (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m sweep tests/integration/test_pairs.py

test-precision: install  ## Every architecture on every layout in fp32, bf16 and fp16 (an hour); then run make docs
	@OMP_NUM_THREADS=1 PRECISION_RESULTS=tests/support/precision_results.jsonl \
		$(BIN)/pytest -m sweep tests/integration/test_precision.py

test-optimizers: install  ## Every optimizer resumes to the last bit on every layout in every precision (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m sweep tests/integration/test_optimizers.py tests/integration/test_one_bit.py

test-services: install  ## Uploads to a real S3 server, Comet and wandb; installs their packages into .venv
	@$(BIN)/python -m pip install --quiet --no-input -c constraints.txt "moto[s3]" flask flask-cors s3fs comet_ml wandb
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/pytest -p support.no_skips -q -rs packages/neox-model/tests/checkpoint/test_s3.py tests/integration/test_object_store.py \
		packages/neox-model/tests/metrics/test_comet.py packages/neox-model/tests/train/test_wandb.py

test-conversion: install  ## Round trips of random models of transformers, and 200 wrong mappings (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -m sweep packages/neox-model/tests/convert

test-sanitizers: install  ## neox-data's extension under AddressSanitizer and UndefinedBehaviorSanitizer
	@tools/sanitize.sh

test-recipes: install  ## Follow CONTRIBUTING.md's recipes, run the documents' commands, install the wheels, rehearse gpu-check and gpu-minutes (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m recipe tests/integration/test_recipes.py tests/integration/test_documents_run.py \
		tests/integration/test_gpu_check.py tests/integration/test_gpu_minutes.py tests/integration/test_wheels.py

gpu-check: install  ## Everything that requires a GPU, with a report (REPORT=FILE); REHEARSE=1 runs what works on the CPU
	@PYTHONPATH=tests $(BIN)/python -m support.gpu_check $(if $(filter 1,$(REHEARSE)),--rehearse) $(if $(REPORT),--report "$(REPORT)")

gpu-minutes: $(if $(PYTHON),,install)  ## Nine minutes of measurements on one GPU (OUTPUT=FOLDER, REHEARSE=1: on the CPU; PYTHON: without an installation)
	@$(or $(PYTHON),$(BIN)/python) tools/gpu_minutes.py $(if $(filter 1,$(REHEARSE)),--rehearse) $(if $(OUTPUT),--output "$(OUTPUT)") $(if $(ONLY),--only $(ONLY))

gpu-minutes-prepare:  ## Compile and collect in .gpu-minutes what gpu-minutes needs on a machine without a network (VERSION=3.12 ARCHITECTURES=sm_90 PRESENT="numpy pyarrow")
	@VERSION="$(VERSION)" ARCHITECTURES="$(ARCHITECTURES)" PRESENT="$(PRESENT)" tools/gpu_minutes_prepare.sh

gpu-gate:  ## Compile layers and kernels for GPUs, without one; fail if a figure changed (UPDATE=1 stores them, PLANT=1 plants faults)
	@PYTHON="$(PYTHON)" tools/environment.sh gate
	@PYTHONPATH=tests .venvs/gate/bin/python -m support.gpu_gate $(if $(filter 1,$(UPDATE)),--update) $(if $(filter 1,$(PLANT)),--plant)

docs: install  ## Write docs/configuration.md, its JSON schema and docs/compatibility-matrix.md
	@PYTHONPATH=tests $(BIN)/python -m support.pairs > docs/compatibility-matrix.md.new
	@mv docs/compatibility-matrix.md.new docs/compatibility-matrix.md
	@$(BIN)/neox-config docs > docs/configuration.md.new && mv docs/configuration.md.new docs/configuration.md
	@$(BIN)/neox-config schema > docs/configuration.schema.json.new
	@mv docs/configuration.schema.json.new docs/configuration.schema.json

docs-site:  ## Build the documents as a site that works offline: site/index.html (its own environment, then half a minute)
	@PYTHON="$(PYTHON)" tools/environment.sh docs
	@PYTHONPATH=tests .venvs/docs/bin/python -m support.docs_site
	@echo "open site/index.html"

dist:  ## Build the wheels of the four packages: dist/3.11/*.whl for Python 3.11, and so on (PYTHONS="3.11" to choose; minutes at first, for an environment per Python)
	@PYTHONS="$(PYTHONS)" tools/dist.sh

clean:  ## Remove environments, wheels and caches, but not quickstart/
	@echo "removing .venv, .venvs, wheels and caches; this may take minutes"
	@rm -rf dist site .site .gpu-gate .gpu-minutes .venv .venvs .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis packages/*/build packages/*/src/*.egg-info
