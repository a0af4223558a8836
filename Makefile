# make demo | make test | make setup: each works on a fresh machine with Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_OUT ?= demo-output
# each of the many processes of a test would compile all of brim anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test pytest test-all mutants gpu soak model lint types check docs bench clean

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

# Types are checked beside the tests; four tests at a time on two cores, as many wait for other processes. Long files leave
# one smoke test here. At the end: what was skipped, and why.
test: lint
	$(MAKE) --no-print-directory -j 2 types pytest

pytest: setup
	$(BIN)/python -m pytest --collect-only -q >/dev/null || true  # the four find the tests compiled
	$(BIN)/python -m pytest -n 4 -m "not gpu and (smoke or not long)" --durations 20

# before a release, and after touching jobs, cluster or storage: make test, the rest of the long files, the tests of the
# GPU where there is one
test-all: test
	$(BIN)/python -m pytest -n 4 -m "long and not smoke" --durations 20
	if nvidia-smi --list-gpus >/dev/null 2>&1; then $(MAKE) --no-print-directory gpu; fi

# plants the bugs of tests/mutants.toml one by one: each must make its tests fail; make mutants ROOM=rf for one room
ROOM ?=
mutants: setup
	$(BIN)/python tests/mutants.py --room "$(ROOM)"

# needs an NVIDIA GPU
gpu: setup
	$(BIN)/python -m pytest -m gpu --durations 20

# a million damaged inputs; then a service under jobs, predictions, uploads and up to 1 000 kills, half of them on each
# database: hours. Its table is in soak/
SOAK_KILLS ?= 1000
SOAK_MINUTES ?= 240
soak: setup
	BRIM_FUZZ_INPUTS=1000000 BRIM_FUZZ_SEED=$$(date +%Y%m%d) $(BIN)/python -m pytest tests/fuzz
	$(BIN)/python tests/faults/soak.py --kills $(SOAK_KILLS) --minutes $(SOAK_MINUTES) --out soak

# the model that comes with brim, trained again from its seed; needs a GPU
MODEL_RUN ?= model-run
model: setup
	$(BIN)/brim segment train --scenes all --scenes-per-epoch 65536 --epochs 15 --seed 1 --out $(MODEL_RUN)
	$(BIN)/python -m brim.segmentation.networks.packing $(MODEL_RUN) src/brim/segmentation/weights/default.safetensors

# the documentation as a site, in site/
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the site is in site/; open site/index.html"

bench: setup
	$(BIN)/python benchmarks/bench_generate.py

clean:
	rm -rf $(VENV) $(DEMO_OUT) site .mypy_cache .ruff_cache .pytest_cache
