# `make` or `make help` lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench figures audit docs jaeger clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: $(VENV)/.models ## Profile ResNet-50, print its tables, write runs/demo and its report
	@$(BIN)/xsp profile torchvision:resnet50 --out runs/demo --overwrite
	@$(BIN)/xsp report runs/demo

# The tests come in two halves. Each half runs in three processes, since each waits for programs that it starts and for
# the disk; OMP_NUM_THREADS=1, since torch would take all cores in each of them. The tests start hundreds of Pythons:
# without compiled modules each compiles torch and the rest again (2 s), so they are kept, whatever the environment says.
LONG := slow or browser or jaeger
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

test: $(VENV)/.dev ## Run the tests: minutes
	@$(PYTEST) -m 'not ($(LONG))'

test-all: test $(VENV)/.spark ## Run the tests, and those that take long: whole programs, faults, browsers, Jaeger, Spark
	@$(PYTEST) -m '$(LONG)'

lint: $(VENV)/.dev ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(VENV)/.dev ## Run all benchmarks briefly, and write the page of the saved figures
	@$(BIN)/python benchmarks/run_all.py

figures: $(VENV)/.dev ## Write the page of the saved figures, without running anything
	@$(BIN)/python benchmarks/run_all.py --page

audit: $(VENV)/.dev ## Write the page of the dependencies, and look for known vulnerabilities
	@$(BIN)/python docs/dependencies.py
	@$(BIN)/python docs/dependencies.py --audit

docs: $(VENV)/.dev ## Write the generated pages of the docs anew
	@$(BIN)/python docs/generate.py

jaeger: ## Build a Jaeger and a Collector for the tests marked `jaeger` (needs Go; minutes, once)
	@deploy/build.sh

clean: ## Remove the environment and all runs
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# uv shares its cache between environments by hard links: torch is gigabytes, and is there once.
$(VENV)/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' || \
	  { echo "xsp needs Python 3.10 to 3.14; say which one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "making $(VENV) (once; with torch it takes minutes and gigabytes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet uv

$(VENV)/.models: $(VENV)/bin/uv pyproject.toml
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[models,otel]'
	@touch $@

# Spark is 500 MB and runs on a Java: where none is, its tests skip and say so.
$(VENV)/.spark: $(VENV)/.dev
	@if command -v java >/dev/null; then $(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev,spark]' || \
	  echo "pyspark cannot be installed: its tests will skip"; else echo "there is no Java: the tests of Spark will skip"; fi
	@touch $@

$(VENV)/.dev: $(VENV)/bin/uv pyproject.toml
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev]'
	@touch $@ $(VENV)/.models
