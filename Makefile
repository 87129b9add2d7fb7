# Targets for developers and CI. `make help` lists them.
SHELL := bash
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all check format test-contracts test-versions sweep \
	test-same test-recipes gpu-check gpu-minutes gpu-minutes-prepare gpu-gate docs docs-site dist clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install:  ## Create .venv with all four packages (PYTHON=python3.12 to choose the interpreter, TORCH=2.15.0 another torch)
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" tools/environment.sh full

quickstart: install  ## Corpus, tokenizer, training and samples on this machine, in quickstart/
	@$(MAKE) --no-print-directory -f tools/quickstart.mk

# A process per core; loading a file's fixtures twice would take longer than the tests that share them. Where Python is
# set to store no bytecode, each process of each test would compile the sources again.
PARALLEL := env -u PYTHONDONTWRITEBYTECODE --default-signal=INT,QUIT,HUP OMP_NUM_THREADS=1 $(BIN)/pytest -q -n logical --maxprocesses 8 --dist loadfile

test: check  ## Lint, types and all fast tests (ten minutes on two cores)
	@$(PARALLEL) -m "not slow and not sweep and not cluster and not recipe" packages tests

test-all: install  ## The rest of what CI runs: slow tests, simulated hosts, and three packages without the others
	@$(PARALLEL) -m "slow and not sweep and not cluster and not recipe" packages tests
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "cluster and not sweep" tests/cluster
	@tools/test.sh launcher data kernels

check: install  ## Lint, types and the size of the sources (seconds)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "run: make format"; exit 1; }
	@$(BIN)/mypy --no-error-summary packages/*/src
	@$(BIN)/python tools/size.py --check

format: install  ## Format the code and apply ruff's fixes
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

test-contracts: $(if $(PYTHON_ENV),,install)  ## What we use of torch and DeepSpeed beyond their documentation (PYTHON_ENV=FOLDER: in another environment)
	@OMP_NUM_THREADS=1 $(or $(PYTHON_ENV),.venv)/bin/python -m pytest -q $(wildcard packages/neox-model/tests/test_*_compat.py)

test-versions:  ## Contracts and fast tests with the oldest and the newest versions allowed; writes docs/reports/versions.md (an hour; ENVIRONMENTS=oldest to choose)
	@python3 tools/versions.py $(ENVIRONMENTS)

sweep: install  ## Tests of minutes to an hour; without NAME=..., a list of them
	@tools/sweep.sh $(NAME)

test-same:  ## Do the same as another commit: BASE=COMMIT (PART=2/10 CASE=TEXT GROUP="data plans" NEW=HEAD; SPEED=1 MUTANTS=120 GATE=1)
	@[ -n "$(BASE)" ] || { echo "name the commit to compare with: make test-same BASE=main" >&2; exit 2; }
	@$(MAKE) --no-print-directory install
	@PYTHONPATH=tests $(BIN)/python tools/test_same.py "$(BASE)" $(if $(PART),--part "$(PART)") $(if $(CASE),--case "$(CASE)") \
		$(if $(GROUP),--group $(GROUP)) $(if $(NEW),--new "$(NEW)") \
		$(if $(filter 1,$(SPEED)),--speed) $(if $(filter 1,$(GATE)),--gate) $(if $(MUTANTS),--mutants $(MUTANTS))

test-recipes: install  ## Follow CONTRIBUTING.md's recipes, run the documents' commands, install the wheels, rehearse gpu-check and gpu-minutes (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m recipe tests/integration/test_recipes.py tests/integration/test_documents_run.py \
		tests/integration/test_gpu_check.py tests/integration/test_gpu_minutes.py tests/integration/test_wheels.py

gpu-check: install  ## Everything that requires a GPU, with a report (REPORT=FILE); REHEARSE=1 runs what works on the CPU
	@PYTHONPATH=tests $(BIN)/python tools/gpu_check.py $(if $(filter 1,$(REHEARSE)),--rehearse) $(if $(REPORT),--report "$(REPORT)")

gpu-minutes: $(if $(PYTHON),,install)  ## Nine minutes of measurements on one GPU (OUTPUT=FOLDER, REHEARSE=1: on the CPU; PYTHON: without an installation)
	@$(or $(PYTHON),$(BIN)/python) tools/gpu_minutes.py $(if $(filter 1,$(REHEARSE)),--rehearse) $(if $(OUTPUT),--output "$(OUTPUT)") $(if $(ONLY),--only $(ONLY))

gpu-minutes-prepare:  ## Compile and collect in .gpu-minutes what gpu-minutes needs on a machine without a network (VERSION=3.12 ARCHITECTURES=sm_90 PRESENT="numpy pyarrow")
	@VERSION="$(VERSION)" ARCHITECTURES="$(ARCHITECTURES)" PRESENT="$(PRESENT)" tools/gpu_minutes_prepare.sh

gpu-gate:  ## Compile layers and kernels for GPUs, without one; fail if a figure changed (UPDATE=1 stores them, PLANT=1 plants faults)
	@PYTHON="$(PYTHON)" tools/environment.sh gate
	@PYTHONPATH=tests:tools .venvs/gate/bin/python -m gpu_gate $(if $(filter 1,$(UPDATE)),--update) $(if $(filter 1,$(PLANT)),--plant)

docs: install  ## Write docs/configuration.md, its JSON schema and docs/reports/compatibility-matrix.md
	@PYTHONPATH=tests $(BIN)/python tools/pairs.py > docs/reports/compatibility-matrix.md.new
	@mv docs/reports/compatibility-matrix.md.new docs/reports/compatibility-matrix.md
	@$(BIN)/neox-config docs > docs/configuration.md.new && mv docs/configuration.md.new docs/configuration.md
	@$(BIN)/neox-config schema > docs/configuration.schema.json.new
	@mv docs/configuration.schema.json.new docs/configuration.schema.json

docs-site:  ## Build the documents as a site that works offline: site/index.html (its own environment, then half a minute)
	@PYTHON="$(PYTHON)" tools/environment.sh docs
	@PYTHONPATH=tests .venvs/docs/bin/python tools/docs_site.py
	@echo "open site/index.html"

dist:  ## Build the wheels of the four packages: dist/3.11/*.whl for Python 3.11, and so on (PYTHONS="3.11" to choose; minutes at first, for an environment per Python)
	@PYTHONS="$(PYTHONS)" tools/dist.sh

clean:  ## Remove environments, wheels and caches, but not quickstart/
	@echo "removing .venv, .venvs, wheels and caches; this may take minutes"
	@rm -rf dist site .site .test-same .gpu-gate .gpu-minutes .venv .venvs .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis packages/*/build packages/*/src/*.egg-info
