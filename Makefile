# Two commands: `make train` trains the quickstart within its memory budget, `make test` runs the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test lint article venv clean

train: venv
	$(BIN)/trainfit train recipes/quickstart.yaml

# One process for each of two files; what starts ranks itself, or a device, has the machine alone.
test: venv
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/parity
	$(BIN)/python -m pytest tests/distributed tests/standin

lint: venv
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/mypy

# docs/llama-13b-on-8x910.md and its pictures, from rehearsals; several minutes.
article: venv
	$(BIN)/python docs/make_llama_13b.py

venv: $(VENV)/.installed

# torch comes first and alone, so that nothing else picks another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs build
