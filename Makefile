# make demo: see it work.  make test: everything that must hold.
PYTHON ?= python3
BIN := .venv/bin
# Compiled modules are kept: without them every process that a test starts compiles the package again, 1.4 s of its time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long test-portable lint docs bench clean wheel faults fuzz mutants matrix gpu-compile

demo: .venv/.installed
	$(BIN)/cplus demo

test: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist loadfile -rs

# The longer forms that the suite leaves out to stay within a quarter of an hour.
test-long: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto -m long

# The suite without vector instructions, with AVX2, and with two threads per process: sums are rounded in another order.
test-portable: .venv/.installed
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default $(BIN)/pytest --numprocesses auto -o timeout=1200
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/pytest --numprocesses auto -o timeout=1200
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(BIN)/pytest --numprocesses auto -o timeout=1200

# Speed and memory against their bars; wants a quiet machine, and CPLUS_DATA for the real rows.
bench: .venv/.installed
	$(BIN)/python benchmarks/steps.py --out benchmarks/results
	$(BIN)/python benchmarks/training.py --out benchmarks/results
	$(BIN)/python benchmarks/scoring.py --out benchmarks/results
	$(BIN)/python benchmarks/generation.py --out benchmarks/results
	$(BIN)/python benchmarks/page.py

# Every command that writes, under every fault: the table, and exit code 1 where a field is red.
faults: .venv/.installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m faults

# 20,000 inputs for each reader.
fuzz: .venv/.installed
	OMP_NUM_THREADS=1 CPLUS_FUZZ=20000 $(BIN)/pytest --numprocesses auto -o timeout=0 tests/test_fuzz.py -k never_crashes

# Every small fault in the gate's arithmetic fails a test; exit code 1 where one survives that benchmarks/mutants.toml lacks.
mutants: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt cosmic-ray==8.7.0 mutmut==3.8.0
	$(BIN)/python benchmarks/mutants.py --out benchmarks/results/mutants.json

# The guard's contract tests with the versions that neighbours pin, each in its own environment under runs/matrix;
# 'make matrix ONLY=oldest' runs one. It prints rows for the table in docs/integrations.md; exit code 1 where a test fails.
matrix: .venv/.installed
	$(BIN)/python tools/matrix.py $(ONLY)

# The gate's kernels as a GPU would get them, on a machine without one: generated, compiled for sm_80 and sm_90, not run,
# and interpreted on the CPU. A CUDA build of torch goes into its own environment under runs/, 5 GB.
gpu-compile: runs/gpu/.installed
	PYTHONPATH=. TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 runs/gpu/bin/python benchmarks/gpu_compile.py

runs/gpu/.installed:
	$(PYTHON) -m venv runs/gpu
	runs/gpu/bin/pip install --quiet --disable-pip-version-check --no-compile 'torch==2.14.*' numpy
	touch $@

# The documentation site, into site/; a warning, such as a broken link, is an error.
docs:
	@$(BIN)/python -c 'import cplus, material, mkdocstrings' 2>/dev/null || { echo "make docs needs the extra 'docs'; install it with:" \
		"make .venv/.installed && .venv/bin/pip install --constraint constraints.txt --editable '.[docs]'" >&2; exit 1; }
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean

# The wheel, into dist/, tried where nothing else is installed and no compiler answers: it runs the demo on one seed.
wheel:
	rm -rf dist build runs/wheel
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(PYTHON) -m venv runs/wheel
	CC=false CXX=false runs/wheel/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	cd runs/wheel && CC=false CXX=false bin/cplus demo --seeds 1 --out demo

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
