# Everything from a fresh clone with only python3: `make demo` and `make test` set up .venv by themselves.
# The install is repeated only when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_DIR ?= benchmarks/out
# Both names: newer pips hold the build tools to the second one.
PINS := PIP_CONSTRAINT="$(CURDIR)/constraints.txt" PIP_BUILD_CONSTRAINT="$(CURDIR)/constraints.txt"

# Two ranks on two cores: a pool of threads in each would only make them wait for each other.
test nightly: export OMP_NUM_THREADS = 1

.PHONY: demo test nightly bench lint venv clean

demo: $(STAMP)  ## The main job: two unequal processes, a snapshot at every step, killed and resumed.
	$(BIN)/python examples/main_job.py

test: lint  ## Format, lint, types, tests, README code.
	$(BIN)/python -m pytest

nightly: lint  ## Everything in `test`, and the tests that take minutes.
	$(BIN)/python -m pytest -m "not gpu"

bench: $(STAMP)  ## The figures of benchmarks/RESULTS.md.
	$(BIN)/python -m benchmarks.write --json $(BENCH_DIR)/write.json
	$(BIN)/python -m benchmarks.overlap --json $(BENCH_DIR)/overlap.json
	$(BIN)/python -m benchmarks.balance --json $(BENCH_DIR)/balance.json

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PINS) $(BIN)/python -m pip install --quiet --editable '.[test,examples,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis demo_out $(BENCH_DIR)
