# make demo    set up, compile the kernels for this machine, check every op against PyTorch, print the table
# make test    set up and run the tests
# make stress  set up and run the long tests: races, kills, whole projects; STRESS_SECONDS=480: those begun in eight minutes
# make check   set up and run the linter and the type checker
# make conformance  set up and run the tests of remotes on every server that is installed; see CONTRIBUTING.md
# make docs    set up and build the documentation in build/site, with any warning as an error
#
# Everything is installed into $(VENV); nothing else is touched. Another Torch: make test TORCH=2.15.0
PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell $(PYTHON) -c "import os; print(len(os.sched_getaffinity(0)) * 3 // 2)")
READY := $(VENV)/.ready-$(TORCH)

.PHONY: demo test stress conformance check docs clean

demo: $(READY)
	$(BIN)/jitkern prewarm --keep-going
	$(BIN)/python -m benches.demo

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS)

stress: $(READY)
	$(BIN)/python -m pytest -m "stress or slow" $(if $(STRESS_SECONDS),--stress-seconds $(STRESS_SECONDS))

conformance: $(VENV)/.conformance-$(TORCH)
	$(BIN)/python -m pytest tests/remote -m "not stress"

$(VENV)/.conformance-$(TORCH): $(READY)
	$(BIN)/python -m pip install -q -e ".[conformance]"
	touch $@

check: $(READY)
	$(BIN)/ruff check jitkern cache_tools kernels_src tests benches examples
	$(BIN)/ruff format --check jitkern cache_tools kernels_src tests benches examples
	$(BIN)/mypy

# The variable silences an advertisement of the theme.
docs: $(VENV)/.docs-$(TORCH)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs-$(TORCH): $(READY)
	$(BIN)/python -m pip install -q -e ".[docs]"
	touch $@

# The extra with the CUDA toolchain follows the CUDA version that Torch was built with.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "torch==$(TORCH)"
	extra=$$($(BIN)/python -W ignore -c "import torch; print({'13.2': 'cu132'}.get(torch.version.cuda, 'cuda'))") && \
	$(BIN)/python -m pip install -q -e ".[test,check,$$extra]"
	rm -f $(VENV)/.ready-*
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
