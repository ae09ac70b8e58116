# make run   the default job (recipe GRPO on a tiny Qwen3); make run ARGS="sync=fully_async" changes settings
# make test  unit, integration and system tests
# Both set up .venv on first use, and again when pyproject.toml or constraints.txt has changed.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
RECIPE ?= grpo
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: run test acceptance lint format typing wheel clean

run: $(INSTALLED)
	@$(BIN)/rlbridge run $(RECIPE) $(ARGS)

test: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n auto tests/unit $(ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal tests/integration tests/system $(ARGS)

acceptance: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/pytest tests/acceptance $(ARGS)

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(INSTALLED)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

typing: $(INSTALLED)
	@bash .ci/typing.sh

wheel: $(INSTALLED)
	@$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "rlbridge needs Python 3.11 or newer with venv; give one with make PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
