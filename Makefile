PYTHON ?= python3
VENV ?= .venv
LOWEST ?= .venv-lowest
EXTRAS := dev,docs
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
DEMO := $(VENV)/installed-for-the-demo

.PHONY: demo test check test-lowest test-slow coverage gpu compare types lint docs pictures format clean

demo: $(DEMO)
	$(BIN)/vl-plugins demo

test: $(INSTALLED) lint types
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

# All that may depend on the version of torch or of a host; the rest walks through commands whose parts are tested here.
# torch 2.2 is there for Python 3.10 to 3.12, and compiles with up to 3.11.
test-lowest: $(LOWEST)/installed
	$(LOWEST)/bin/python -m pytest -n auto --dist worksteal -m "not slow" --doctest-ignore-import-errors \
		--ignore tests/test_readme.py --ignore tests/test_docs.py --ignore tests/test_packaging.py \
		--ignore tests/commands/test_demo.py --ignore-glob "*integrations/sentence_transformers/*"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

coverage: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" --cov --cov-report=xml --cov-report=term:skip-covered

# With PYTHON's own torch, pytorch-metric-learning and open_clip: a GPU machine may have no package index.
gpu:
	$(PYTHON) -m benchmarks.metadata build/metadata
	PYTHONPATH="$(CURDIR)/build/metadata:$(CURDIR):$$PYTHONPATH" $(PYTHON) -m benchmarks.gpu $(GPU_FLAGS)

# Version 0.3 with this checkout: values, gradients, shards and trainings.
compare: $(INSTALLED) .v0_3
	$(BIN)/pip install --quiet "duckdb<2"  # which 0.3 groups tables with
	$(BIN)/python -m benchmarks.compare .v0_3 --same-batches $(COMPARE_FLAGS)

.v0_3:
	mkdir -p build
	git archive --prefix=.v0_3/ --output=build/v0_3.tar 5bd907c
	tar -xf build/v0_3.tar

# Before each commit: what the change touches, in less than a minute.
check: $(INSTALLED) lint types
	tests=$$($(BIN)/python -m tests.of_changes); test -z "$$tests" || $(BIN)/python -m pytest -q -m "not slow" $$tests

types: $(INSTALLED)
	$(BIN)/mypy

lint: $(BIN)/ruff
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

docs: $(INSTALLED)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -d build/doctrees docs build/site

pictures: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" sh docs/pictures/draw.sh

format: $(BIN)/ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Gigabytes are downloaded, so a broken connection gets two more attempts, which begin with pip's cache. The file is
# written last, so that an interrupted installation is done again. An environment that is there already, such as one
# with a torch of one's choice, is added to.
#
# pip takes a package that was interrupted halfway, such as by a full disk, for an installed one. INSTALLER is written
# last, so a package without it is installed again.
$(INSTALLED) $(DEMO) $(LOWEST)/installed: pyproject.toml
	@echo "Installing vl_plugins[$(EXTRAS)] into $(@D). With CUDA's libraries, which torch brings on Linux, an empty"
	@echo "environment takes about 3 GB of downloads, 6 GB on the disk and several minutes. README has a smaller torch."
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	for attempt in 1 2 3; do \
		for package in $(@D)/lib/python*/site-packages/*.dist-info; do \
			test ! -d "$$package" || test -e "$$package/INSTALLER" || rm -r "$$package"; \
		done; \
		$(@D)/bin/python -m pip install --progress-bar on --resume-retries 20 $(CONSTRAINTS) --editable '.[$(EXTRAS)]' \
		&& exit 0; sleep 30; \
	done; exit 1
	touch $@

$(DEMO): EXTRAS := open-clip,eval
$(LOWEST)/installed: tests/lowest.txt
$(LOWEST)/installed: CONSTRAINTS = --constraint tests/lowest.txt
$(LOWEST)/installed: EXTRAS := dev # docs has sentence-transformers, which needs transformers 5

# Seconds, where the whole environment takes minutes.
$(BIN)/ruff:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet ruff import-linter

clean:
	rm -rf $(VENV) $(LOWEST) .v0_3 demo build *.egg-info
