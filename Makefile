# Two targets do all the set-up: `make run` and `make test`. CONTRIBUTING.md lists the others.
SHELL := /bin/bash
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# The server's web page takes npm another minute or two and no test looks at it.
BUILD  := $(BIN)/moestream build --no-ui
MODEL  ?=
SLOTS  ?=
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: run test venv engine engine-tests lint test-unit test-cli test-patches test-native test-service test-identity \
        test-e2e test-upstream test-gpu test-wheel test-bins identity soak clean

# ---- set-up

# cmake and ninja come as wheels where the system has none.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,python]' -C cmake.args=-DLLAMA_BUILD=OFF
	@for tool in cmake ninja; do \
	  command -v $$tool >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check $$tool || exit 1; \
	done
	touch $@

venv: $(VENV)/.installed

# UI=1: with llama-server's web page, where npm is present
engine: venv
	$(if $(UI),$(BIN)/moestream build,$(BUILD))

# The product's programs, and upstream's tests with our test series on top, from one build tree.
engine-tests: venv
	$(BUILD) --test-series

# ---- run: build, serve the demo model (or MODEL=x.gguf SLOTS=32), ask one question

run: engine
	$(BIN)/python -m moestream.demo $(if $(MODEL),--model "$(MODEL)") $(if $(SLOTS),--slots "$(SLOTS)")

# ---- tests that need no GPU; the last line is pytest's own count

test: lint test-native engine-tests
	$(PYTEST) tests/unit tests/patches tests/cli tests/service tests/identity tests/e2e tests/upstream tests/gpu tests/wheel

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test-unit: venv
	$(PYTEST) tests/unit

test-cli: venv
	$(PYTEST) tests/cli

test-patches: venv
	$(PYTEST) tests/patches

test-service: venv
	$(PYTEST) tests/service

# The engine's parts alone, also under the address, undefined-behaviour and thread sanitizers: no llama.cpp is compiled.
test-native: venv
	PATH="$$PATH:$(CURDIR)/$(BIN)" JOBS=$(JOBS) tests/native/run.sh all

test-identity: engine-tests
	$(PYTEST) tests/identity

test-e2e: engine-tests
	$(PYTEST) tests/e2e

# Needs an NVIDIA card and the CUDA toolkit; without a card all but the report's tests are skipped, and say so.
GPU_TOOLS := moe-identity moe-replay moe-mtp moe-failed-batch
test-gpu: engine-tests
	if command -v nvidia-smi >/dev/null; then $(BUILD) --backend cuda $(GPU_TOOLS:%=--target %); fi
	$(PYTEST) tests/gpu

# Upstream's own tests on our build, streaming off and on.
test-upstream: engine-tests
	$(PYTEST) tests/upstream

# Every architecture, type, width of a batch and layout of files; about an hour on two cores: ARCHITECTURES='^qwen' TYPES=f32,q4_k JSON=identity.json
identity: engine-tests
	$(BIN)/python tests/matrix.py --jobs $(JOBS) $(if $(ARCHITECTURES),--architectures '$(ARCHITECTURES)') \
	  $(if $(TYPES),--types $(TYPES)) $(if $(JSON),--report "$(JSON)")

# Serves for a long time among clients of which some go away: SECONDS=3600 SLOTS=8 JSON=soak.json
soak: engine-tests
	$(BIN)/python tests/soak.py --seconds $(or $(SECONDS),600) $(if $(SLOTS),--slots $(SLOTS)) $(if $(JSON),--json "$(JSON)")

# Builds the wheel, installs it outside the checkout, builds the engine with it and serves the demo model.
test-wheel: venv
	$(PYTEST) tests/wheel

# Builds the portable engine, a quarter of an hour with one job, packs it, downloads it into an empty home and serves with it.
test-bins: venv
	$(BUILD) --portable
	$(PYTEST) tests/bins

clean:
	rm -rf build dist vendor/llama.cpp
