PYTHON ?= python3
VENV ?= .venv
LOWEST ?= .venv-lowest
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test test-lowest test-slow lint format clean

demo: $(INSTALLED)
	$(BIN)/vl-plugins demo

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

# The whole suite: a part that touches neither torch nor a host is quick, and would be chosen by hand again and again.
# torch 2.2 is there for Python 3.10 to 3.12, and compiles with up to 3.11.
test-lowest: $(LOWEST)/installed
	$(LOWEST)/bin/python -m pytest -n auto --dist worksteal -m "not slow"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Written last, so that an interrupted installation is done again.
$(INSTALLED) $(LOWEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --progress-bar on $(CONSTRAINTS) --editable '.[dev]'
	touch $@

$(LOWEST)/installed: tests/lowest.txt
$(LOWEST)/installed: CONSTRAINTS = --constraint tests/lowest.txt

clean:
	rm -rf $(VENV) $(LOWEST) demo build *.egg-info
