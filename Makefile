# make demo    set up, compile a kernel of each kind that works here, and compare them with PyTorch
# make test    set up and run the tests that each commit needs: 6 minutes of processor time
# make test-all   run all tests that need neither a server nor a GPU: hours
# make test-long  run those that make test leaves out; SECONDS=480: those begun in eight minutes
# make test-matrix   run what make test runs with each pair of Python and Torch that doctor names, in .venv-matrix
# make test-another  with one of these pairs, another one at each commit
# make check   set up and run the linter and the type checker
# make conformance  set up and run the tests of remotes on every server that is installed; see CONTRIBUTING.md
# make docs    set up and build the documentation in build/site, with any warning as an error
#
# Everything is installed into $(VENV), and compiled kernels are kept in ~/.cache/jitkern. Another Torch or Python,
# whose environment replaces the one in $(VENV): make test TORCH=2.15.0 PYTHON=python3.12
PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
CORES := $(shell $(PYTHON) -c "import os; print(len(os.sched_getaffinity(0)))")
PAIR := $(TORCH)-$(shell $(PYTHON) -c "import sys; print('%s%d.%d' % (sys.implementation.name, *sys.version_info[:2]))")

NOT_OURS = $(VENV) was not made by make, which would delete it: name another folder, as in `make $(or $(MAKECMDGOALS),demo) VENV=.venv-make`

.PHONY: demo test test-all test-long test-matrix test-another conformance check docs clean

demo: $(VENV)/.base-$(PAIR)
	$(BIN)/python -m benches.demo

test: $(VENV)/.test-$(PAIR)
	$(BIN)/python -m pytest -n $(CORES)

test-all: test test-long

test-long: $(VENV)/.test-$(PAIR)
	$(BIN)/python -m pytest -m "long and not conformance" $(if $(SECONDS),--seconds $(SECONDS))

test-matrix: $(VENV)/.test-$(PAIR)
	$(BIN)/python -m tests.matrix

test-another: $(VENV)/.test-$(PAIR)
	$(BIN)/python -m tests.matrix --besides $(TORCH)

conformance: $(VENV)/.conformance-$(PAIR)
	$(BIN)/python -m pytest tests/remote -m "not long or conformance"

check: $(VENV)/.check-$(PAIR)
	$(BIN)/ruff check jitkern cache_tools kernels_src tests benches examples
	$(BIN)/ruff format --check jitkern cache_tools kernels_src tests benches examples
	$(BIN)/mypy

# The variable silences an advertisement of the theme.
docs: $(VENV)/.docs-$(PAIR)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What jitkern needs to run, and NumPy, without which Torch warns. Where there is a GPU, the CUDA toolchain, too.
$(VENV)/.base-$(PAIR): pyproject.toml
	$(if $(wildcard $(VENV)),$(if $(wildcard $(VENV)/.base-* $(VENV)/.of-make),,$(error $(NOT_OURS))))
	$(PYTHON) -m venv $(if $(wildcard $(VENV)/.base-$(PAIR)),,--clear) $(VENV)
	touch $(VENV)/.of-make
	$(BIN)/python -m pip install -q "torch==$(TORCH)" numpy "setuptools>=77" wheel
	$(BIN)/python -m pip install -q --no-build-isolation -e ".$(if $(wildcard /dev/nvidiactl),[cuda])"
	touch $@

$(VENV)/.test-$(PAIR): $(VENV)/.base-$(PAIR)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[test,cuda]"
	touch $@

# These are named as the extras that they install.
$(VENV)/.check-$(PAIR) $(VENV)/.docs-$(PAIR) $(VENV)/.conformance-$(PAIR): $(VENV)/.%-$(PAIR): $(VENV)/.test-$(PAIR)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
