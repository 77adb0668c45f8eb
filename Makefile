# Everything runs in .venv, made from this folder's own files.
PYTHON ?= python3
BIN := .venv/bin
# one test process more than there are cores: many tests wait for other processes
JOBS ?= $(shell expr $$(nproc) + 1)

.PHONY: demo test lint bench docs pictures clean
demo: .venv/installed
	$(BIN)/python examples/demo.py

# set, it would have each process that a test starts compile the package anew
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/installed-dev
	$(BIN)/pytest --numprocesses $(JOBS) --dist worksteal

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# this package and the limits of the machine, in 3 minutes: build/bench/report.md
bench: .venv/installed-dev
	$(BIN)/python -m benchmarks report --ours --rounds 2 --mib 64 --out build/bench

# warnings are errors; the first page is docs/_build/html/index.html
docs: .venv/installed-docs
	$(BIN)/sphinx-build -q -W --keep-going docs docs/_build/html

# those of the first page; the report is photographed by Chromium
pictures: .venv/installed-dev
	$(BIN)/python docs/pictures.py

# compat: type checkers and editors find an editable install by a path, and not by an import hook
# the demo needs the package with torch, and nothing else; the tools come on top of it
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --config-settings editable_mode=compat --editable '.[torch]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --config-settings editable_mode=compat --editable '.[dev]'
	touch $@

.venv/installed-docs: .venv/installed-dev
	$(BIN)/pip install --quiet --constraint constraints.txt --config-settings editable_mode=compat --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv build docs/_build docs/api *.egg-info
