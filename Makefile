# Everything is installed into .venv. `make help` lists the targets.
VENV := .venv
BIN := $(VENV)/bin
EXTRA ?= cuda13
GPU ?= h100
ARGS ?=
PYTEST_ARGS ?=
# One worker per core; more than 8 gain nothing. No test takes two minutes, on a busy machine ten: one that hangs fails.
PYTEST := $(BIN)/python -m pytest --timeout=900
WORKERS ?= -n auto --maxprocesses=8
TEMPLATES = $(shell find templates -name '*.jinja' -o -name '*.cuh')

# The first of these that is new enough makes the environment; PYTHON=... names another one.
fits = $(shell $(1) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' >/dev/null 2>&1 && echo $(1))
PYTHON ?= $(firstword $(foreach python,python3 python3.14 python3.13 python3.12 python3.11,$(call fits,$(python))))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help tune test dev fmt lint test-gpu golden bench clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo 'Variables: PYTHON=python3.12  GPU=h200  ARGS="--budget 30s"  PYTEST_ARGS="-k mask"  EXTRA=cuda12'

tune: $(VENV)/.flashtune ## set up, then tune a small set of problems for GPU (default h100)
	$(BIN)/flashtune tune --gpu $(GPU) $(ARGS)

test: lint ## set up, then ruff, mypy, clang-format and all tests that need no GPU
	$(PYTEST) -m "not gpu" $(WORKERS) $(PYTEST_ARGS)

dev: $(VENV)/.flashtune-dev ## set up with the development tools

fmt: dev ## format Python and templates
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(TEMPLATES)

lint: dev ## check formatting, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p flashtune
	$(BIN)/clang-format --dry-run -Werror $(TEMPLATES)

test-gpu: dev ## the tests that need a GPU
	$(PYTEST) -m gpu $(PYTEST_ARGS)

golden: dev ## rewrite the golden generated sources
	$(PYTEST) -q tests/codegen/test_golden.py --update-golden

bench: dev ## compare with other attention kernels on the GPU at hand
	$(BIN)/python benchmarks/attention.py $(ARGS)

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are made last, so an interrupted set-up starts again.
$(VENV)/pyvenv.cfg:
	@if [ -z "$(and $(PYTHON),$(call fits,$(PYTHON)))" ]; then \
		echo "flashtune needs Python 3.11 to 3.14$(if $(PYTHON), and $(PYTHON) is not one): make PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi
	$(PYTHON) -m venv $(VENV)

$(VENV)/.flashtune: $(VENV)/pyvenv.cfg pyproject.toml setup.py
	@echo "Installing flashtune and what it needs into $(VENV): about 160 MB of downloads."
	$(BIN)/python -m pip install -e ".[$(EXTRA)]"
	@touch $@

# --group came with pip 25.1.
$(VENV)/.flashtune-dev: $(VENV)/.flashtune pyproject.toml
	$(BIN)/python -m pip install "pip>=25.1"
	$(BIN)/python -m pip install --group dev
	@touch $@
