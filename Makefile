# Every target sets up what it needs; only Python 3.11 or newer and make must be there.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test lint types docs clean

demo: $(VENV)/demo.installed
	$(BIN)/python docs/examples/digits.py

test: $(VENV)/test.installed
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.installed
	$(BIN)/pyright

docs: $(VENV)/dev.installed
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# one stamp for each extra: installed again when pyproject.toml changes
$(VENV)/%.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

clean:
	rm -rf .venv* build dist docs/_build docs/jupyter_execute
