# make setup | demo | test | bench | lint | clean     (needs Python 3.11 or newer; everything else goes into .venv)
.DEFAULT_GOAL := help
.PHONY: help setup demo test bench bench-peers lint format clean

# The first interpreter that really runs and is new enough; 3.11 is what the lock was made with.
PYTHON ?= $(shell for p in python3.11 python3 /usr/bin/python3.11 /usr/bin/python3 python3.12 python3.13 python; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
# How many pytest processes, and threads in each of them: two cores are the machine in mind.
WORKERS ?= 2

help:
	@echo "make setup   create .venv from requirements.lock (done by the others when needed)"
	@echo "make demo    compile and run a handful of mods, and compare them with torch"
	@echo "make test    run the tests"
	@echo "make bench   measure attnc, its peers and the machine, and write bench/RESULTS.md (quiet machine, half an hour)"
	@echo "make bench-peers   install the peers that make bench compares with"
	@echo "make lint    ruff and pyright"
	@echo "make clean   remove .venv and caches"

setup:
	@test -n "$(PYTHON)" || { echo "attnc needs Python 3.11 or newer; none was found. Set PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) tools/setup_environment.py --environment $(VENV)

demo: setup
	@$(BIN)/attnc demo

test: setup
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

bench: setup
	@$(BIN)/attnc bench --suite all --json bench/results.json --write-results

bench-peers: setup
	@$(PYTHON) tools/setup_environment.py --environment $(VENV) --on-top bench/requirements.lock

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --warnings

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests bench tools \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +
