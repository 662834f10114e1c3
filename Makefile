# make demo: see it work.  make test: everything that must hold.
PYTHON ?= python3
BIN := .venv/bin
# Compiled modules are kept: without them every process that a test starts compiles the package again, 1.4 s of its time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long test-portable lint docs bench clean faults fuzz soak coverage mutants matrix

demo: .venv/.installed
	$(BIN)/cplus demo

test: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal -rs

# The longer forms that the suite leaves out to stay within a quarter of an hour.
test-long: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto -m long

# The suite under other instructions and numbers of threads, an hour or more; resumes, and exit code 1 where a row is red.
test-portable: .venv/.installed
	$(BIN)/python benchmarks/portable.py

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

# 100,000 inputs for each reader; then 25,000 for the readers of text, grown by what they reach.
fuzz: .venv/.installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz.py --out benchmarks/results/fuzz.json
	$(BIN)/pip install --quiet --disable-pip-version-check 'atheris>=3.0'
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python benchmarks/guided.py --out benchmarks/results/guided.json

# 10,000 updates: memory, open files and pace must stay flat; the curves are drawn into docs/soak.svg.
soak: .venv/.installed
	$(BIN)/python benchmarks/soak.py --out benchmarks/results/soak.json
	$(BIN)/python benchmarks/soak.py --draw benchmarks/results/soak.json --picture docs/soak.svg

# Every branch of what attaches, seals, runs and reads, by the tests that belong to it; exit code 1 under 95 % in a file.
COVERED := cplus/core/guard.py cplus/probes/bank.py cplus/lab/runs.py cplus/lab/runs.py cplus/lab/runs.py \
	$(addprefix cplus/data/,encoded.py examples.py harness.py hub.py readers.py split.py)
COVERING := $(patsubst %,tests/test_%.py,attach gates kernels integration_ranks integration_trainer probes data \
	harness fuzz demo diagnostics freeform_runs sequence studies)
coverage: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --cov --cov-report= $(COVERING)
	$(BIN)/coverage json -q -o - | $(BIN)/python benchmarks/coverage_bars.py $(COVERED)

# Every small fault in the gate's arithmetic fails a test; exit code 1 where one survives that benchmarks/mutants.toml lacks.
mutants: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt cosmic-ray==8.7.0 mutmut==3.8.0
	$(BIN)/python benchmarks/mutants.py --out benchmarks/results/mutants.json

# The guard's contract tests with the versions that neighbours pin, each in its own environment under runs/matrix;
# 'make matrix ONLY=oldest' runs one. The table in docs/integrations.md is updated; exit code 1 where a test fails.
matrix: .venv/.installed
	$(BIN)/python tools/matrix.py $(ONLY)

# The documentation site, into site/; a warning, such as a broken link, is an error.
docs:
	@$(BIN)/python -c 'import cplus, material, mkdocstrings' 2>/dev/null || { echo "make docs needs the extra 'docs'; install it with:" \
		"make .venv/.installed && .venv/bin/pip install --constraint constraints.txt --editable '.[docs]'" >&2; exit 1; }
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean

lint: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

# lm-evaluation-harness and what it imports to score a task; the whole extra 'lm-eval' is 36 packages, some built from source.
HARNESS := lm-eval sacrebleu colorama lxml portalocker tabulate

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --no-deps $(HARNESS)
	$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null || true  # on all cores; pip would use one
	touch $@

clean:
	rm -rf .venv runs build site *.egg-info
