# Everything a developer types. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiled bytecode is what makes a trainer start in a second; never hand this variable on.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("surefoot needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": set PYTHON=") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8'
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -e '.[operator,runtime,cli,embedded-redis]' --group test --group lint
	touch $@

.PHONY: setup
setup: $(VENV)/.ready ## make .venv with everything the project needs
