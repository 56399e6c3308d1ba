PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test test-slow lint format clean

demo: $(INSTALLED)
	$(BIN)/vl-plugins demo

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Written last, so that an interrupted installation is done again.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --progress-bar on --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build *.egg-info
