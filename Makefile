# `make demo` and `make test` do all their own set-up, in a virtual environment of the project.
#   PYTHON  interpreter to make it from, 3.11 or newer (default: the first one found)
#   VENV    where to keep it
#   EXTRAS  extras of pyproject.toml to install for `make test`

PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.14 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
EXTRAS ?= dev
BIN := $(VENV)/bin
OUT ?= out/demo
RESUME_OUT ?= out/resume
LLAMA_OUT ?= out/demo-llama

.PHONY: demo demo-llama resume test fuzz lint docs bench clean

demo: $(VENV)/.example
	$(BIN)/python examples/gpt/train.py --devices 8 --out $(OUT)

demo-llama: $(VENV)/.llama
	$(BIN)/python examples/llama/demo.py --out $(LLAMA_OUT)

resume: $(VENV)/.example
	$(BIN)/python examples/gpt/resume.py --out $(RESUME_OUT)

test: $(VENV)/.$(EXTRAS)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --doctest-modules zero2jax tests

# N random combinations of settings against one device, from seed FIRST on
N ?= 1000
FIRST ?= 100
fuzz: $(VENV)/.$(EXTRAS)
	FUZZ_FIRST=$(FIRST) FUZZ_N=$(N) JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 tests/test_property.py -k random_combination

lint: $(VENV)/.$(EXTRAS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "wrote site/index.html"

# With EXTRAS=example,plan the programs are compiled for GPUs, too. TORCH_PYTHON: an interpreter with torch and deepspeed.
TORCH_PYTHON ?= $(BIN)/python
bench: $(VENV)/.$(EXTRAS)
	JAX_PLATFORMS=cpu $(BIN)/python tests/benchmarks/bench.py --torch-python $(TORCH_PYTHON)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "zero2jax needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras: `.venv/.dev`, `.venv/.example`, ...
$(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) out site build *.egg-info
