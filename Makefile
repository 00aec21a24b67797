# make demo     set everything up and tell the whole story: train heads, decode with them, measure (6 minutes)
# make test     set everything up and run the tests
# make lint     ruff and mypy
# make docs     the site, into build/site
# PYTHON=python3.12 make test    with another interpreter (3.11 or newer)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format docs install

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/medusa demo --output runs/demo --overwrite

test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/mkdocs build --strict
