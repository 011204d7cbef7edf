# make test       lint, types, import contracts and tests; does all its own set-up from a fresh clone
# make test-compile  compile every kernel for every target, where `make test` reads a record of it
# make test-slow  a fifth of the slow tests, drawn by the commit's hash; SHARE=3 runs that one, SHARE=all all
# make test-cluster  only its tests of several replicas by Ray Serve, and red where Ray cannot start
# make test-cpus  its tests that compute, as other CPUs would run them: CELLS=2 draws two of the matrix
# make run        quantize the bundled model, score BF16 against it, write the report (RECIPE=fp8_dynamic)
# make release    check version, changelog and tag, build wheel and sdist into dist/; uploads nothing
# Needs Python 3.11+, make and a compiler, nothing else.
PYTHON ?= python3
RECIPE ?= nvfp4
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Else every process of the tests would compile all of its modules, and pytest rewrite all tests, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test lint test-compile test-slow test-cluster test-gpu test-cpus test-versions release clean

run: $(READY)
	$(BIN)/quantize run --recipe $(RECIPE) --resume

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n auto --maxprocesses 4 \
		--dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=evaluation $(BIN)/lint-imports
	$(BIN)/pyrefly check --min-severity error
	$(BIN)/python tests/support/names.py
	$(BIN)/python tests/support/subjects.py

# The tests that compute, as other CPUs would run them: all cells of the matrix, or CELLS=2 of them.
test-cpus: $(READY)
	$(BIN)/python -m tests.support.cpus $(CELLS)

# All that tests/data/compiled.json says is compiled anew and compared with it.
test-compile: $(READY)
	OMP_NUM_THREADS=1 QUANTIZE_TEST_COMPILE=1 $(BIN)/python -m pytest -q -m "not slow" -n auto --maxprocesses 4 \
		tests/fused_dequant/test_compile.py

# The slow tests by turn: a fifth, drawn by the commit's hash, or SHARE=0 to 4, or SHARE=all.
test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.turn $(SHARE)

# Ray's processes need idle cores: it gives up if it has not started after 30 seconds.
test-cluster: $(READY)
	OMP_NUM_THREADS=1 QUANTIZE_TEST_CLUSTER=1 $(BIN)/python -m pytest tests/serve/test_cluster.py

# The tests that need an NVIDIA GPU, with whatever Python has torch and triton there.
test-gpu:
	$(PYTHON) -m pytest -m gpu

# The tests that compute, on the oldest versions that pyproject.toml declares, on those on which speed was
# measured, and on the newest: all, or CELLS=newest, CELLS=newest/runtime, CELLS=1 (drawn), CELLS=core (CI's).
test-versions: $(READY)
	$(BIN)/python -m tests.support.versions $(CELLS)

# torch first and by name: any other package that wants torch would bring a CUDA build of several GB. Ray last
# and by itself: it has no wheel for some machines, and only its tests need it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "quantize needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,serve]' -c constraints.txt
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cluster]' -c constraints.txt
	touch $@

release: $(READY)
	$(BIN)/python tests/support/release.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
