# `make demo` and `make test` need Python >= 3.11 and nothing else; both make their own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

# The registry's default torch is a CUDA build of several GB; the CPU build is on PyTorch's own index. That
# index is tried first with pip's own HTTP client, since pip would retry an unreachable one for minutes.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PROBE := from pip._vendor import requests; \
  requests.get("$(TORCH_INDEX)/torch/", timeout=5, stream=True).raise_for_status()
TORCH_FROM = $$($(BIN)/python -c '$(PROBE)' 2>/dev/null && echo --extra-index-url $(TORCH_INDEX) || \
  echo "$(TORCH_INDEX) cannot be reached: taking torch from where pip is configured to look" >&2)
INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(TORCH_FROM)

# Else each of the many processes that tests start compiles the same modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow nightly test-torch support gpu gpu-wheels lint typecheck imports build release docs schema sentences screenshots gallery samples mutation lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp  ## see dpro work: record a small real job on the CPU and explain it
	$(BIN)/dpro demo

test: $(VENV)/dev.stamp  ## the tests, without the slow ones
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow"

test-slow: $(VENV)/dev.stamp  ## all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# Resumes where it was cut short; NIGHTLY="--only fuzz" runs one stage.
nightly: $(VENV)/dev.stamp  ## every suite and benchmark, whole, into build/nightly.md (three hours)
	$(BIN)/python -m tests.nightly $(NIGHTLY)

# An environment of each version: the CPU build where its index can be reached, else the CUDA build, which does
# without a GPU (5 GB each). TORCH_PYTHON is a Python that all of them have builds for.
TORCH_VERSIONS ?= 2.6 2.8 2.11 2.13
TORCH_ENVIRONMENTS ?= build/torch
TORCH_PYTHON ?= $(PYTHON)
test-torch: $(VENV)/dev.stamp $(TORCH_VERSIONS:%=$(TORCH_ENVIRONMENTS)/%/bin/torchrun)  ## recording on older PyTorch
	DPRO_TORCH_VERSIONS="$(TORCH_VERSIONS)" DPRO_TORCH_ENVIRONMENTS="$(TORCH_ENVIRONMENTS)" \
	  $(BIN)/python -m pytest tests/torch_versions

$(TORCH_ENVIRONMENTS)/%/bin/torchrun: | $(VENV)/dev.stamp
	$(TORCH_PYTHON) -m venv --clear $(TORCH_ENVIRONMENTS)/$*
	$(TORCH_ENVIRONMENTS)/$*/bin/python -m pip install -qq --disable-pip-version-check $(TORCH_FROM) 'torch==$*.*' numpy

support: $(VENV)/dev.stamp  ## try all that docs/support.md lists and this machine has, and write that page
	$(BIN)/python -m tests.support

# On a machine with a GPU: its own Python, which has the CUDA build of PyTorch. docs/gpu.md says what to look at.
GPU_PYTHON ?= python3
GPU_FOLDER ?= build/gpu
gpu:  ## what only a GPU can say: costs, fit, predictions and faults there, in stages of minutes
	for stage in windows facts overhead replay pairs ranks; do \
	  $(GPU_PYTHON) benchmarks/gpu.py -o $(GPU_FOLDER) --only $$stage > /dev/null; test $$? -lt 2 || exit 2; \
	done
	$(GPU_PYTHON) benchmarks/gpu.py --table $(GPU_FOLDER)/gpu.json
	! $(GPU_PYTHON) -c 'import pytest' 2>/dev/null || $(GPU_PYTHON) -m pytest -m "" tests/gpu

# For machines with a GPU and without a network, whose Python lacks what dpro needs.
GPU_WHEELS := click isal itanium-demangler markdown-it-py mdurl msgspec polars polars-runtime-32 pygments rich
gpu-wheels: $(VENV)/dev.stamp  ## what dpro needs for Python 3.12 on x86-64, into build/wheels
	rm -rf build/wheels
	$(BIN)/python -m pip download -q --disable-pip-version-check -c constraints.txt --no-deps \
	  --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux2014_x86_64 \
	  --platform manylinux_2_28_x86_64 -d build/wheels $(GPU_WHEELS)
	du -ch build/wheels/*.whl | tail -1

lint: $(VENV)/dev.stamp  ## style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

typecheck: $(VENV)/dev.stamp  ## mypy --strict
	$(BIN)/mypy --strict -p dpro

imports: $(VENV)/dev.stamp  ## which package may import which
	$(BIN)/lint-imports

build: $(VENV)/dev.stamp  ## wheel and sdist, into dist/
	$(BIN)/python -m build --no-isolation

release: $(VENV)/dev.stamp  ## build, try every command in fresh environments, say what to upload
	$(BIN)/python -m tests.release

docs: $(VENV)/docs.stamp  ## the site of docs/, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

sentences: $(VENV)/dev.stamp  ## every sentence that dpro can print, with its place in the code, into build/sentences.md
	$(BIN)/python -m tests.sentences build/sentences.md

schema: $(VENV)/dev.stamp  ## docs/schema.md and docs/json.md, from the declarations of tables and documents
	$(BIN)/python -m tests.schema_page docs/schema.md
	$(BIN)/python -m tests.json_page docs/json.md

screenshots: $(VENV)/dev.stamp  ## the pictures of README and docs/, by a headless Chromium
	$(BIN)/python -m tests.screenshots docs/images

gallery: $(VENV)/dev.stamp  ## nine runs × views × widths × dark and light, in build/gallery, to be looked at
	$(BIN)/python -m tests.gallery build/gallery

RECORD_SAMPLE = $(BIN)/dpro record -o sample_traces/$(1) --every 25 --window-steps 3 -- \
  torchrun --nproc-per-node 2 sample_traces/train.py --steps 60 $(2) && $(BIN)/dpro info sample_traces/$(1)
samples: export PATH := $(CURDIR)/$(BIN):$(PATH)
samples: export OMP_NUM_THREADS := 1
samples: $(VENV)/dev.stamp  ## record the sample runs again
	rm -rf sample_traces/healthy sample_traces/slow_rank sample_traces/slow_input
	$(call RECORD_SAMPLE,healthy,)
	$(call RECORD_SAMPLE,slow_rank,--slow-rank 1 --slow-ms 6)
	$(call RECORD_SAMPLE,slow_input,--slow-input-ms 4)

# Some hours for all mutants; MUTATION_SAMPLE=50 takes a sample of each module.
MUTATION_SAMPLE ?= 0
mutation: $(VENV)/mutation.stamp  ## change the code a little: do the tests notice? (slow)
	$(BIN)/python -m tests.mutation --sample $(MUTATION_SAMPLE)

lock: $(VENV)/dev.stamp  ## resolve the development environment again, and pin it in constraints.txt
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip install -qq --disable-pip-version-check $(TORCH_FROM) -e '.[dev,docs,mutation]' torch
	{ grep '^#' constraints.txt; build/lock/bin/python -m pip freeze --exclude-editable | \
	  sed 's/+.*//' | grep -v '^nvidia-.*-cu\|^triton'; } > build/lock/constraints.txt
	mv build/lock/constraints.txt constraints.txt

clean:  ## remove everything that was made here
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps, so that a second run starts at once. pip is the last thing venv installs: it marks a whole one.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$($(PYTHON) --version) is too old, dpro needs 3.11: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { $(PYTHON) -c 'import sys; print("error: this Python cannot make virtual environments:" \
	    " sudo apt install python%d.%d-venv" % sys.version_info[:2], file=sys.stderr)'; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

$(VENV)/demo.stamp: pyproject.toml setup.py constraints.txt | $(VENV)/bin/pip
	@echo "installing dpro and PyTorch into $(VENV): once, some minutes (200 MB)"
	@$(INSTALL) -e '.[replay]' torch
	@touch $@

$(VENV)/dev.stamp: pyproject.toml setup.py constraints.txt | $(VENV)/bin/pip
	@echo "installing dpro, PyTorch and the tools into $(VENV): once, some minutes (300 MB)"
	@$(INSTALL) -e '.[dev]' torch
	@touch $@ $(VENV)/demo.stamp

$(VENV)/mutation.stamp: pyproject.toml setup.py constraints.txt | $(VENV)/bin/pip
	@$(INSTALL) -e '.[mutation]' torch
	@touch $@

$(VENV)/docs.stamp: pyproject.toml setup.py | $(VENV)/bin/pip
	@$(INSTALL) -e '.[docs]'
	@touch $@
