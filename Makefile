# Every target sets up what it needs in .venv, so each works alone from a clean clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# -qq silences progress and warnings; errors still show.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# Figures are written to files, never to a screen.
export MPLBACKEND ?= Agg

.DEFAULT_GOAL := help
.PHONY: help demo examples test test-slow lint format bench soak notebooks docs clean
# Two installs must not write to one environment at the same time.
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP)-lab ## reproduce the paper on shipped data: tables, figures and the report, in out/quick
	$(BIN)/seminode reproduce --preset quick --out out/quick --jobs 2

examples: $(STAMP)-lab ## run all examples, some minutes, and leave their pictures in out/demo
	for name in spiral vowels flow flow_matching latent_ode pendulum; do $(BIN)/python examples/$$name.py || exit 1; done

test: $(STAMP)-dev ## run the tests and doctests, without the slow ones
	$(BIN)/python -m pytest -n auto

test-slow: $(STAMP)-dev ## run the slow tests
	$(BIN)/python -m pytest -m slow

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
	$(BIN)/python docs/tutorials/execute.py --limit 120

docs: $(STAMP)-docs ## build the documentation into site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the environment, caches and builds; results in out stay
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis
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
