# Everything a newcomer needs: `make demo` and `make test`. Plain Python 3.11 with pip is enough.

PYTHON ?= python3.11
ifeq (,$(shell command -v $(PYTHON) 2>/dev/null))
PYTHON := python3
endif
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
JOBS ?= 2
export OMP_NUM_THREADS ?= 1

.PHONY: chaos chaos-real help setup demo demo-tools test test-fast vllm-env vllm-server test-vllm adapters-env test-adapters check format bench reproduce docs clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Torch first, and only if it is missing: a torch that is already there is used as it is. TORCH= chooses another
# build: `make setup TORCH="torch --index-url <the index for CPU builds that PyTorch's install page names>"`.
$(VENV)/.runs: pyproject.toml
	@test -x $(BIN)/pip || { echo "making the virtual environment $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "installing $(TORCH) into $(VENV), once: some minutes"; \
		$(BIN)/pip install --disable-pip-version-check -q $(TORCH); }
	@echo "installing paceline and what it needs to train into $(VENV)"
	@$(BIN)/pip install --disable-pip-version-check -q -e '.[train]'
	@touch $@

$(VENV)/.ready: $(VENV)/.runs
	@echo "installing what tests and checks need into $(VENV)"
	@$(BIN)/pip install --disable-pip-version-check -q -e '.[train,dev]'
	@touch $@

setup: $(VENV)/.ready  ## make the virtual environment, with all that tests need

demo: $(VENV)/.runs  ## train the small policy on this machine's CPU, and watch the reward rise
	$(BIN)/paceline run examples/reverse-text/run.toml $(ARGS)

demo-tools: $(VENV)/.runs  ## the same with a tool: the policy asks a database, in a worker process; ENGINE=vllm: on a real vLLM
ifeq ($(ENGINE),vllm)
	@$(MAKE) --no-print-directory vllm-env
	@tools/vllm_run.sh $(VENV) examples/store-search/vllm.toml $(ARGS)
else
	$(BIN)/paceline run examples/store-search/run.toml $(ARGS)
endif

test: setup  ## all tests
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(ARGS)

test-fast: setup  ## the tests that need no model
	$(BIN)/pytest -n $(JOBS) -m "not torch and not demo and not browser and not vllm" $(ARGS)

vllm-env:  ## a second virtual environment, with a real vLLM for CPUs (x86-64 Linux, about 2 GB)
	@PYTHON="$(PYTHON)" tools/vllm_env.sh $(VENV)-vllm

vllm-server: vllm-env  ## serve the small policy with that vLLM at port 8000, for examples/reverse-text/vllm.toml
	$(VENV)-vllm/bin/python tools/vllm_serve.py src/paceline/assets/small_policy --port 8000 $(ARGS)

test-vllm: setup vllm-env  ## the tests against that vLLM, in one process: it starts a server once
	PACELINE_VLLM=$(CURDIR)/$(VENV)-vllm/bin/python $(BIN)/pytest -m vllm $(ARGS)

adapters-env:  ## a virtual environment for each package that an adapter stands on (about 1.5 GB): ENVS="verifiers" for one
	@PYTHON="$(PYTHON)" tools/adapters_env.sh $(VENV)-adapters $(ENVS)

test-adapters: setup  ## the tests of adapters, against those that are there
	PACELINE_ADAPTERS=$(CURDIR)/$(VENV)-adapters $(BIN)/pytest -m adapter $(ARGS)

check: setup  ## format, lint, types
	$(BIN)/ruff format --check src tests bench tools
	$(BIN)/ruff check src tests bench tools
	$(BIN)/mypy

format: setup  ## format and mend what can be mended
	$(BIN)/ruff format src tests bench tools
	$(BIN)/ruff check --fix src tests bench tools

chaos: setup  ## random faults and kills of the core, in simulated time: make chaos SEEDS=10000
	$(BIN)/python -m paceline.testing.storm --seeds $(or $(SEEDS),10000) $(ARGS)

chaos-real: setup  ## the demo, with its processes killed at random moments: make chaos-real KILLS=6
	$(BIN)/python tools/chaos_real.py --kills $(or $(KILLS),50) $(ARGS)

bench: setup  ## all benchmarks, or one: make bench ONLY=wire
	$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY))

reproduce: setup  ## simulate what papers report of scheduling; writes docs/benchmarks/scheduling.md
	$(BIN)/python -m tools.reproduce $(ARGS)

docs: setup  ## write the generated reference
	$(BIN)/paceline config reference > docs/reference/config.md
	$(BIN)/paceline config reference --study > docs/reference/study.md

clean:  ## remove what was made here, runs excepted
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
