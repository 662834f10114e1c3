# make demo: see it work.  make test: everything that must hold.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench clean

demo: .venv/.installed
	$(BIN)/cplus demo

test: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto

lint: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs build *.egg-info
