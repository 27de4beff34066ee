# Every target sets up what it needs in .venv, so each works alone from a clean clone.

PYTHON ?= python3
# For wheel-test: interpreters, and the version of torch; by default the one that is pinned.
PYTHONS ?= $(PYTHON)
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# -qq silences progress and warnings; errors still show.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# For test-matrix: pairs of Python and torch.
MATRIX ?= $(foreach version,3.10 3.11 3.12 3.13,$(version):$(TORCH))
# For `make mutation`: modules (by default the core), how many mutants, and which.
MODULES ?=
MUTANTS ?= 300
SEED ?= 0

# Figures are written to files, never to a screen.
export MPLBACKEND ?= Agg

.DEFAULT_GOAL := help
.PHONY: help demo examples test test-slow test-ray test-oldest test-matrix mutation lint format bench soak notebooks docs wheel-test
.PHONY: release-check clean
# Two installs must not write to one environment at the same time.
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP)-lab ## reproduce the paper on shipped data: tables, figures and the report, in out/quick
	$(BIN)/seminode reproduce --preset quick --out out/quick --jobs 2

examples: $(STAMP)-lab ## run all examples, some minutes, and leave their pictures in out/demo
	for name in spiral vowels flow flow_matching latent_ode pendulum events stiff; do $(BIN)/python examples/$$name.py || exit 1; done

# With worksteal nearly every file runs in one worker, and both workers are busy until the end.
test: $(STAMP)-dev ## run the tests and doctests, without the slow ones
	$(BIN)/python -m pytest -n auto --dist worksteal

test-slow: $(STAMP)-dev ## run the slow tests
	$(BIN)/python -m pytest -m slow

test-ray: $(STAMP)-dev $(STAMP)-ray ## sweep on a Ray cluster of this machine, with workers and the head killed; some minutes
	$(BIN)/python -m pytest -m slow -rP tests/seminode_lab/test_ray.py

test-oldest: ## run a selection of the tests with the oldest versions that are admitted, in .venv-3.10-2.8.0
	$(PYTHON) .ci/versions.py 3.10:oldest

test-matrix: ## run the same selection on every Python that is admitted, with torch TORCH, in .venv-3.x-TORCH
	$(PYTHON) .ci/versions.py $(MATRIX)

mutation: $(STAMP)-dev $(STAMP)-mutation ## change the code of the core in MUTANTS places, and see whether tests notice
	$(BIN)/python -m benchmarks.mutation $(MODULES) --sample $(MUTANTS) --seed $(SEED)

# pyright reads the benchmarks too, so it needs the libraries they import.
lint: $(STAMP)-dev $(STAMP)-bench ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: $(STAMP)-dev ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP)-bench ## compare with torchdiffeq, torchode, torchcde and diffrax; takes hours
	$(BIN)/python -m benchmarks

soak: $(STAMP)-bench ## very long solves and trainings: memory, clock, caches; takes an hour
	$(BIN)/python -m benchmarks.soak

notebooks: $(STAMP)-docs ## execute the tutorials, some minutes, and store their outputs
	$(BIN)/python docs/tutorials/execute.py --limit 300

docs: $(STAMP)-docs ## build the documentation into site, and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python .ci/site_links.py site

wheel-test: ## build from a clean clone into dist, install for PYTHONS with torch TORCH, try it there
	$(PYTHON) .ci/wheel_test.py --dist dist --torch $(TORCH) --python $(PYTHONS)

release-check: ## check that TAG, such as v0.2.0, is the version in all files
	$(PYTHON) .ci/release_check.py "$(TAG)"

clean: ## remove the environment, caches and builds; results in out stay
	rm -rf $(VENV) .venv-* build dist site .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Torch goes in first and alone, so that its pin decides which build everything else is resolved against.
$(STAMP)-torch: constraints.txt
	@echo "Setting up $(VENV): torch"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch
	@touch $@

# One rule for every extra of pyproject.toml: .stamp-dev, .stamp-lab, .stamp-bench, .stamp-docs.
$(STAMP)-%: $(STAMP)-torch pyproject.toml constraints.txt
	@echo "Setting up $(VENV): seminode[$*]"
	@$(PIP_INSTALL) -e '.[$*]'
	@touch $@
