# make demo: see it work.  make test: everything that must hold.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench clean faults fuzz soak

demo: .venv/.installed
	$(BIN)/cplus demo

test: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto

# Speed and memory against their bars; wants a quiet machine, and CPLUS_DATA for the real rows.
bench: .venv/.installed
	$(BIN)/python benchmarks/steps.py --out benchmarks/results
	$(BIN)/python benchmarks/training.py --out benchmarks/results
	$(BIN)/python benchmarks/scoring.py --json > benchmarks/results/scoring.json
	$(BIN)/python benchmarks/generation.py --json > benchmarks/results/generation.json
	$(BIN)/python benchmarks/page.py

# Every command that writes, under every fault: the table, and exit code 1 where a field is red.
faults: .venv/.installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m faults

# 100,000 inputs for each reader.
fuzz: .venv/.installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz.py --out benchmarks/results/fuzz.json

# 10,000 updates: memory, open files and pace must stay flat; the curves are drawn into docs/soak.svg.
soak: .venv/.installed
	$(BIN)/python benchmarks/soak.py --out benchmarks/results/soak.json
	$(BIN)/python benchmarks/soak.py --draw benchmarks/results/soak.json --picture docs/soak.svg

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
