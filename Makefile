# Everything runs in .venv, made from this folder's own files.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench clean
demo: .venv/installed
	$(BIN)/zb demo

test: .venv/installed
	$(BIN)/pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python -m benchmarks read
	$(BIN)/python -m benchmarks loader
	$(BIN)/python -m benchmarks paths
	$(BIN)/python -m benchmarks convert
	$(BIN)/python -m benchmarks window
	$(BIN)/python -m benchmarks tokenize

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
