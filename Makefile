# make demo     set everything up, and run `medusa demo` (about five minutes on two CPU cores)
# make check    lint, types and the fast core of the tests, in a minute: run it while you work
# make test     set everything up and run all tests
# make lint     ruff and mypy
# make docs     the site, into build/site
# make real     all figures of a real model, SmolLM2-135M-Instruct: about three CPU hours; REAL=--quick: ten minutes
# PYTHON=python3.12 make test    with another interpreter (3.11 or newer)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= HuggingFaceTB/SmolLM2-135M-Instruct
DATA ?= runs/data

# What breaks everything else: exactness, acceptance, masks, cache, topology, heads, checkpoints, losses, imports.
CORE := tests/test_lossless.py tests/test_layers.py \
	tests/decode/test_accept.py tests/decode/test_cache.py tests/decode/test_reader.py tests/decode/test_rejection.py \
	tests/decode/test_target.py tests/decode/test_topology.py \
	tests/medusa/test_tree.py tests/medusa/heads tests/medusa/checkpoints \
	tests/train/test_labels.py tests/train/test_loss.py
# `make check` leaves to `make test` the slowest tests, and those that show that a planted fault is found.
LATER := not known_faults and not planted_fault and not sampled_texts and not longrope_boundary and not dynamic_rope

# Without compiled modules on disk, which some environments switch off, each process compiles some thousands of them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: check demo test lint format docs install real

# Python compiles each module when it is first imported. pip would compile all of them, which takes half a minute.
install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(VENV)/base $@

# The demo needs no tools of development, which take longer to install than everything else.
$(VENV)/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e .
	touch $@

demo: $(VENV)/base
	$(BIN)/medusa demo --output runs/demo --overwrite

check: lint
	$(BIN)/python -m pytest -n 2 -k '$(LATER)' $(CORE)

# Rewritten assertions explain a failure, but to rewrite them takes 9 CPU seconds. So only failed tests run with them.
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --assert=plain \
		|| { $(BIN)/python -m pytest --last-failed --last-failed-no-failures=none; exit 1; }

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/mkdocs build --strict

SPEC_BENCH := https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl
MT_BENCH := https://raw.githubusercontent.com/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl

# The last file comes last: with it, all are there.
$(DATA)/mt_bench/question.jsonl: | $(VENV)/base
	$(BIN)/hf download openai/gsm8k --repo-type dataset --include 'main/test*' --local-dir $(DATA)/gsm8k
	$(BIN)/hf download openai/openai_humaneval --repo-type dataset --include '*.parquet' --local-dir $(DATA)/humaneval
	curl --fail --location --create-dirs --output $@ $(MT_BENCH)

$(DATA)/spec_bench/question.jsonl:
	curl --fail --location --create-dirs --output $@ $(SPEC_BENCH)

# The same command continues an interrupted run. MODEL=google/gemma-3-270m-it make real    another model
real: $(DATA)/mt_bench/question.jsonl $(DATA)/spec_bench/question.jsonl
	$(BIN)/python scripts/real_model.py $(MODEL) --data $(DATA) --prompts $(DATA)/spec_bench/question.jsonl --output runs/real-$(notdir $(MODEL))$(REAL) $(REAL)
