# make demo | make test | make setup: each works on a fresh machine with Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_OUT ?= demo-output

.PHONY: setup demo test soak lint types check docs bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	# only for the real sequences in it, which are read as files: its numba is of another NumPy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps aeon
	touch $(STAMP)

demo: setup
	$(BIN)/brim demo --out $(DEMO_OUT)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

check: lint types

# three at a time on two cores, as many tests wait for processes; those with whole services or clusters, many processes
# each, two at a time; what measures a service under load, alone
SPREAD := --dist loadfile --no-loadscope-reorder
HEAVY := tests/cluster tests/faults tests/browser
ALONE := tests/faults/test_fault_load.py tests/faults/test_predict_faults.py
test: check
	$(BIN)/python -m pytest -n 3 $(SPREAD) --durations 40 $(HEAVY:%=--ignore %)
	$(BIN)/python -m pytest -n 2 $(SPREAD) --durations 15 $(HEAVY) $(ALONE:%=--ignore %)
	$(BIN)/python -m pytest $(ALONE)

# the long half of tests/faults: 200 kills on each database; an hour or so
soak: setup
	BRIM_SOAK=1 BRIM_KILLS=200 $(BIN)/python -m pytest tests/faults tests/cluster tests/jobs/test_worker_rf.py

# the documentation as a site, in site/
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: setup
	$(BIN)/python benchmarks/bench_generate.py

clean:
	rm -rf $(VENV) $(DEMO_OUT) site .mypy_cache .ruff_cache .pytest_cache
