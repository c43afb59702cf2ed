# Two commands: `make demo` and `make test`. Everything they need, they set up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PYTHONPATH :=

SOURCES := plugin-api/src:host/src:plugins/mens-core/src:plugins/mens-cpu-ref/src:plugins/mens-torch-cuda/src:plugins/mens-torch-mps/src
HOST_STAMP := $(VENV)/.host-installed
TEST_STAMP := $(VENV)/.test-installed
WHEELS_STAMP := wheels/.built
NATIVE_FILES := $(shell find plugins/mens-cpu-ref/native plugins/mens-core/src/mens_core/kernels -type f 2>/dev/null)
PYTHON_FILES := $(shell find plugin-api/src host/src plugins/*/src -name '*.py' -o -name '*.toml' -path '*/src/*' 2>/dev/null)

.PHONY: help demo first-act demo-file test lint types unit wheels native clean bench lanes mutants test-cuda bench-cuda test-metal

help:
	@echo "make demo    set up, install the CPU lane, import a real model, serve it, train an adapter, compare both"
	@echo "make test    set up, lint, types, the whole suite"
	@echo "make wheels  build every distribution into wheels/"
	@echo "make bench   measure against llama.cpp and the machine's limits"
	@echo "make test-cuda, make bench-cuda   the CUDA lane beside the CPU lane, and its speed; without a GPU they say so"
	@echo "make test-metal   the Metal lane beside the CPU lane on a Mac, with a certificate; elsewhere it says so"
	@echo "make lanes   scalar reference, AVX2, AVX-512 and emulated aarch64 on the demo model: one table of hashes"
	@echo "make mutants change each class of kernel line once and see the vectors notice; an hour"

# Before anything is set up: the demo's total counts that too.
STARTED := $(shell date +%s)
demo: $(HOST_STAMP) $(WHEELS_STAMP)
	@$(BIN)/vox-host demo --wheels wheels --accept-license --started $(STARTED)

# The demo's first act: plugin and model are there afterwards.
first-act: $(HOST_STAMP) $(WHEELS_STAMP)
	@$(BIN)/vox-host demo --wheels wheels --accept-license --started $(STARTED) --no-training

$(VENV)/bin/python:
	@echo "==> creating $(VENV)"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"error: vox-host needs Python 3.11 to 3.13; $(PYTHON) is {v[0]}.{v[1]}; run make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)

$(HOST_STAMP): $(VENV)/bin/python constraints.txt plugin-api/pyproject.toml host/pyproject.toml
	@echo "==> installing vox-host and its dependencies into $(VENV)"
	@$(PIP) install --editable plugin-api --editable host
	@touch $@

$(WHEELS_STAMP): $(HOST_STAMP) $(NATIVE_FILES) $(PYTHON_FILES) $(wildcard plugins/*/pyproject.toml)
	@echo "==> building wheels (native kernels included) into wheels/"
	@rm -rf wheels && mkdir -p wheels
	@$(PIP) wheel --no-deps --wheel-dir wheels ./plugin-api ./host ./plugins/mens-core
	@$(BIN)/vox-host plugin pack --path plugins/mens-cpu-ref --out wheels/mens-cpu-ref
	@$(BIN)/vox-host plugin pack --path plugins/mens-torch-cuda --out wheels/mens-torch-cuda
	@touch $@

wheels: $(WHEELS_STAMP)
	@ls -l wheels wheels/mens-cpu-ref wheels/mens-torch-cuda

$(TEST_STAMP): $(HOST_STAMP) tests/requirements.txt
	@echo "==> installing test tools into $(VENV)"
	@$(PIP) install --requirement tests/requirements.txt
	@touch $@

native: $(TEST_STAMP)
	@$(BIN)/python plugins/mens-cpu-ref/build_native.py

demo-file: $(TEST_STAMP)
	@$(BIN)/python tests/fixtures/demo_model.py

# Most tests use one core. Each process of a parallel run takes some 2 GiB, and keeps to the files it began.
# In the order of their folders: the slowest come first.
TEST_PROCESSES ?= 2
test: lint types native demo-file $(WHEELS_STAMP)
	@$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

lint: $(TEST_STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@PYTHONPATH=$(SOURCES) $(BIN)/lint-imports --no-cache

types: $(TEST_STAMP)
	@$(BIN)/mypy

unit: native
	@$(BIN)/python -m pytest -m "not real_model and not oracle"

GGUF ?= .cache/gemma-3-270m-q4_k_m.gguf
bench: demo-file first-act
	@$(BIN)/python bench/cpu.py --gguf $(GGUF) --out bench/results

# A certificate that another machine or an emulator made with the same options is compared too:
#   vox-host parity --model gemma-3-270m --plugin mens-cpu-ref:isa=neon --max-tokens 8 --out FILE
#   make lanes AGAINST=FILE
LANES ?= reference avx2 avx512
AGAINST ?=
lanes: first-act native
	@mkdir -p .cache
	@$(BIN)/vox-host parity --model gemma-3-270m --max-tokens 8 --out .cache/lanes.json \
	  $(foreach isa,$(LANES),--plugin mens-cpu-ref:isa=$(isa)) $(foreach file,$(AGAINST),--against $(file))
	@echo "==> the same requests under an emulator of aarch64, and all lanes in one table"
	@cd tests && PYTHONPATH=.:$(subst :,:../,../$(SOURCES)) $(abspath $(BIN))/python -m conformance.lanes_table ../.cache/lanes.json

mutants: native
	@mkdir -p .cache
	@cd tests && PYTHONPATH=.:$(subst :,:../,../$(SOURCES)) $(abspath $(BIN))/python -m mutation --per-rule 1 --out ../.cache/mutants.json

# They run in a Python that has torch for CUDA and cuda-bindings; nothing of CUDA is installed here.
# Example: make test-cuda CUDA_PYTHON=/opt/torch/bin/python
CUDA_PYTHON ?= $(or $(wildcard .venv-cuda/bin/python),$(PYTHON))
test-cuda:
	@$(CUDA_PYTHON) tests/gpu/check_lane.py
	@$(CUDA_PYTHON) tests/gpu/check_ranks.py
	@$(CUDA_PYTHON) tests/gpu/check_fast.py

# In a Python for arm64 that has torch. Example: make test-metal METAL_PYTHON=/opt/torch/bin/python
METAL_PYTHON ?= $(or $(wildcard .venv-metal/bin/python),$(PYTHON))
test-metal:
	@$(METAL_PYTHON) tests/torch_mps/check_metal.py

bench-cuda:
	@$(CUDA_PYTHON) bench/inference_gpu.py --out bench/results

clean:
	rm -rf $(VENV) wheels build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
