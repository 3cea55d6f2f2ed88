# `make demo` and `make test` do all the set-up they need; `make venv` alone stops after it.
# PYTHON=/path/to/python3.12 overrides the search for a Python.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo model test test-all test-aot lint venv venv-aot clean FORCE

VENV := .venv
AOT := .venv-aot
JAX_AOT := 0.11.2
BIN := $(VENV)/bin
PROMPT := Write a short story about a lighthouse keeper and a lost whale, in two paragraphs.

demo: model
	$(BIN)/python -m kvjax.decode --prompt "$(PROMPT)" --max-new-tokens 512 --stream --stats

# The demo model; the tests that need it are skipped where it is missing.
model: venv
	@$(BIN)/python -m kvjax.fetch_model smollm2 >/dev/null

# Each worker gets one half of the tests and, when done, some of the other's: neighbours share
# compiled programs, and the heavy ones at the end are not left to one worker.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal

# Most of the time goes into compiling programs that run once: XLA's optimisations would cost a third
# of it. `make test-all` has them.
test: venv
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST)

# The cross products and soaks as well, and the ahead-of-time compilation tests.
test-all: model test-aot
	$(PYTEST) -m "not gpu and not aot"

test-aot: venv-aot
	JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 $(AOT)/bin/python -m pytest -q -m aot tests/aot

lint: venv
	$(BIN)/ruff check .

venv: $(VENV)/.installed
	@:

venv-aot: $(AOT)/.installed
	@:

# An environment is ready when its Python runs and its stamp, written last, names this folder. Else
# (half made, moved, or its Python gone) it is made again from nothing.
ready = $(filter $(CURDIR),$(shell $(1)/bin/python -c '' 2>/dev/null && cat $(1)/.installed 2>/dev/null))
PIP := -m pip install --quiet --disable-pip-version-check

define create
@python=$$(tools/find_python.sh); \
	echo "kvjax: making $(1) with $$python" >&2; \
	"$$python" -m venv --clear $(1)
endef

$(VENV)/.installed: pyproject.toml setup.py $(if $(call ready,$(VENV)),,FORCE)
	$(call create,$(VENV))
	@$(BIN)/python $(PIP) -e '.[dev]'
	@echo "$(CURDIR)" >$@

# The CUDA plug-ins without their libraries: enough to compile for a GPU, not to run on one.
$(AOT)/.installed: pyproject.toml setup.py $(if $(call ready,$(AOT)),,FORCE)
	$(call create,$(AOT))
	@$(AOT)/bin/python $(PIP) -e '.[dev]' 'jax==$(JAX_AOT)'
	@$(AOT)/bin/python $(PIP) --no-deps \
		'jax-cuda13-plugin==$(JAX_AOT)' 'jax-cuda13-pjrt==$(JAX_AOT)'
	@echo "$(CURDIR)" >$@

clean:
	rm -rf $(VENV) $(AOT) build dist *.egg-info
